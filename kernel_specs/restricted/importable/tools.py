"""The short name of `mcp_tools`; a file of the session with this name comes first."""

from __future__ import annotations

import sys

import mcp_tools

sys.modules[__name__] = mcp_tools
