"""`python -m kernel_mcp` is the command `kernel-mcp`."""

import sys

from kernel_mcp.cli import main

sys.exit(main())
