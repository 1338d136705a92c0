"""An MCP server on stdio that does nothing: what the SDK itself costs."""

from mcp.server import MCPServer

server: MCPServer[None] = MCPServer("bare")


@server.tool(structured_output=False)
def execute(code: str, session: str = "") -> str:
    """Answer what a cell with `1` would."""
    return code


if __name__ == "__main__":
    server.run("stdio")
