"""A server whose proxy finds the hosts of tests on loopback, where no name may lead otherwise.

`python -m tests.integration.loopback_hosts '{"api.test": PORT}' FLAGS…`
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import sys
from collections.abc import Sequence
from typing import Any

from kernel_mcp.linux.process import bare_program
from kernel_mcp.network import proxy, tunnel
from tests.integration.unprivileged import REPOSITORY


def main(argv: Sequence[str]) -> int:
    """The proxy; the last word has the ports of hosts by name."""
    *words, given = argv
    ports: dict[str, int] = json.loads(given)
    usual = tunnel.Dialer.connect

    async def connect(self: tunnel.Dialer, entry: Any, host: str, port: int, resolving: Any) -> Any:
        if host not in ports:
            return await usual(self, entry, host, port, resolving)
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", ports[host]))
        return sock

    setattr(tunnel.Dialer, "connect", connect)  # noqa: B010  # mypy lets no method be replaced
    return proxy.main(words)


def _program(ports: str, module: str, *words: str, packages: bool = False) -> list[str]:
    assert module == "kernel_mcp.network.proxy"
    argv = bare_program("tests.integration.loopback_hosts", *words, ports, packages=packages)
    found = argv.index("tests.integration.loopback_hosts") - 1
    argv[found] += f":{REPOSITORY}"
    return argv


if __name__ == "__main__":
    from kernel_mcp import cli
    from kernel_mcp.launch import proxy_client as kept

    setattr(kept, "bare_program", functools.partial(_program, sys.argv[1]))  # noqa: B010
    sys.exit(cli.main(sys.argv[2:]))
