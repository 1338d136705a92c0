"""Imports the MCP SDK for a server on pipes, without what such a server may never use.

The SDK has pydantic build some four hundred models, for all versions of the protocol, of which a
server uses a few: each is built when it is first used. It imports what clients and HTTP need, a
sixth of a server's memory: that is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module

from pydantic import BaseModel

from kernel_mcp.lazy_imports import lazy_imports

UNUSED = (
    "cryptography",
    "httpx2",
    "mcp.client",
    "mcp.server.auth.middleware",
    "mcp.server.auth.routes",
    "mcp.server.sse",
    "mcp.server.streamable_http",
    "mcp.server.streamable_http_manager",
    "mcp.server.transport_security",
    "starlette",
)
"""Packages that the SDK imports and a server on pipes does not use."""

BaseModel.model_config["defer_build"] = True
with lazy_imports(*UNUSED):
    import_module("mcp.server.mcpserver")
