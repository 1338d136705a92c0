"""`python -m kernel_mcp` is the command `kernel-mcp`."""

import sys

_UNSAFE_PATH = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))

# Python has put the current folder first, whose modules nobody vouches for
if _UNSAFE_PATH and not __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]

from kernel_mcp.cli import main  # noqa: E402

sys.exit(main())
