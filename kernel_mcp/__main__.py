"""`python -m kernel_mcp` is the command `kernel-mcp`."""

import os
import sys

# Python puts the current folder first, whose modules nobody vouches for
try:
    _HERE = os.path.realpath("")
except FileNotFoundError:  # it was removed
    _HERE = ""
if _HERE and sys.path[0] == _HERE and not __file__.startswith(f"{_HERE}/"):
    del sys.path[0]

from kernel_mcp.cli import main

sys.exit(main())
