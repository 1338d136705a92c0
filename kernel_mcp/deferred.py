"""Imports the MCP SDK for a server on stdio, without the parts that such a server may never use.

The SDK defines some four hundred pydantic models, for all versions of the protocol. A server uses
few of them, so each is built on first use. The SDK also imports packages for clients and HTTP,
which need a sixth of a server's memory. They are imported on first use, too.
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
"""Packages that the SDK imports and a server on stdio does not use."""

BaseModel.model_config["defer_build"] = True
with lazy_imports(*UNUSED):
    import_module("mcp.server.mcpserver")
