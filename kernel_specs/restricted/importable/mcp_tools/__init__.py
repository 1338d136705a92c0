"""Tools of other servers, called from code: `from tools import NAME`, then `NAME.tool(…)`.

`servers()` returns the servers that the operator has opened, `search("words")` tools by what they
do. `help(NAME.tool)` shows signature and description. `await NAME.tool.aio(…)` is for asyncio.
Errors are `ToolError` and the classes derived from it. `on_progress` may be set to a function of
progress, total and message, which is called while a tool runs.
"""

from __future__ import annotations

import multiprocessing.util as processes
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mcp_tools.functions import Server, ServerFinder, directory, gateway, identifiers, search
from mcp_tools.values import (
    Blob,
    Image,
    Link,
    Text,
    ToolError,
    ToolRefused,
    ToolTimeout,
    ToolUnavailable,
    shown,
)

__all__ = [
    "Blob",
    "Image",
    "Link",
    "Text",
    "ToolError",
    "ToolRefused",
    "ToolTimeout",
    "ToolUnavailable",
    "fileno",
    "on_progress",
    "search",
    "servers",
]
__path__ = []  # below this package there are servers alone
for _own in ("calls", "functions", "values"):
    globals().pop(_own)

on_progress: Callable[[Any, Any, str], object] | None = None
fileno, servers = gateway.fileno, directory.servers


def __getattr__(name: str) -> Server:
    """Return a server by its name. Raises AttributeError, ToolUnavailable."""
    found = None if name.startswith("_") else directory.find(name)
    if found is None:
        known = "" if name.startswith("_") else ", ".join(identifiers(directory.servers()))
        raise AttributeError(
            f"no server of tools is called {name!r}; there are {shown(known, 500)}"
        )
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *identifiers(directory.servers())})


def _pass_on(path: bytes, args: Any, passfds: Sequence[int]) -> int:
    """Start a process of multiprocessing, which can call tools, too."""
    fd = gateway.fileno()
    return _spawn(path, args, [*passfds, fd] if fd >= 0 else passfds)


_spawn, processes.spawnv_passfds = processes.spawnv_passfds, _pass_on
sys.meta_path.append(ServerFinder)
if gateway.fileno() >= 0:
    gateway.ask()
