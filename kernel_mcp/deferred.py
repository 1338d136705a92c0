"""Imports the MCP SDK for a server on stdio, without the parts that such a server may never use.

The SDK defines some four hundred pydantic models, for all versions of the protocol. A server uses
few of them, so each is built on first use, and those of a version are defined when a client speaks
it. The SDK also imports packages for clients and HTTP, which need a sixth of a server's memory.
They are imported on first use, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from pydantic import BaseModel, TypeAdapter

from kernel_mcp.lazy_imports import lazy_imports

_DEFER_BUILD = "_defer_build"

UNUSED = (
    "cryptography",
    "httpx2",
    "mcp.client",
    "mcp.server.auth",
    "mcp.server.sse",
    "mcp.server.streamable_http",
    "mcp.server.streamable_http_manager",
    "mcp.server.transport_security",
    "mcp.shared.auth",
    "starlette",
)
"""Packages that the SDK imports and a server on stdio does not use."""
VERSIONS = ("mcp_types._v2025_11_25", "mcp_types._v2026_07_28")
"""Modules of the SDK with the models of some versions; a client speaks one version."""


@contextmanager
def _deferred_adapters() -> Iterator[None]:
    """Let pydantic build `TypeAdapter`s of this block at their first use, as its models.

    Only models have a setting for that. Where pydantic has no such property they are built at once.
    """
    known = vars(TypeAdapter).get(_DEFER_BUILD)
    setattr(TypeAdapter, _DEFER_BUILD, True)
    try:
        yield
    finally:
        setattr(TypeAdapter, _DEFER_BUILD, known)


BaseModel.model_config["defer_build"] = True
with lazy_imports(*UNUSED, *VERSIONS), _deferred_adapters():
    import_module("mcp.server.mcpserver")
