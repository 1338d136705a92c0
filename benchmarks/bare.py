"""An MCP server that does nothing, on stdio or, told `http`, over HTTP: what the SDK costs."""

import socket
import sys

from mcp.server import MCPServer

server: MCPServer[None] = MCPServer("bare")


@server.tool(structured_output=False)
def execute(code: str, session: str = "") -> str:
    """Answer what a cell with `1` would."""
    return code


def serve_http() -> None:
    """Serve on a port that is free, and say on stderr which one that is."""
    import uvicorn  # the server on stdio starts without it

    # named as TCP, or asyncio lets each answer wait for an acknowledgement
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    port = listening.getsockname()[1]
    print(f"bare: serving http://127.0.0.1:{port}/mcp", file=sys.stderr, flush=True)
    config = uvicorn.Config(server.streamable_http_app(), log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_http()
    else:
        server.run("stdio")
