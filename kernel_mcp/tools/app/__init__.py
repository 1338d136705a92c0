"""The view of a cell that clients with MCP Apps show to a person."""

from __future__ import annotations

from pathlib import Path

from mcp.server.extension import Extension

VIEW = "ui://kernel-mcp/cell.html"
MIME = "text/html;profile=mcp-app"


class Views(Extension):
    """Tells clients that there are views."""

    identifier = "io.modelcontextprotocol/ui"


async def page() -> str:
    """Return the HTML of the view, without indentation and comments of its script."""
    source = Path(__file__).with_name("cell.html").read_text(encoding="utf-8")
    lines = map(str.strip, source.splitlines())
    return "\n".join(line for line in lines if not line.startswith("//"))
