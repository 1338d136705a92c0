"""The cost of one long session: anonymous memory of server and kernel as its cells go by.

`python -m benchmarks.soak --cells 100000` prints a line at each tenth and ends with 1 when the
server has grown by more than `--most` MB since the first thousand cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import descendants

BASE_CELLS = 1000
"""Cells after which all that is made once has been made."""
MB = 1_000_000


class Client:
    """The least that an MCP client over stdio needs; one request at a time."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """Shake hands."""
        client = {"name": "soak", "version": "0"}
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        self.request("initialize", hello)
        self._send({"method": "notifications/initialized"})

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool. Raises RuntimeError when that fails."""
        token = {"progressToken": next(self._numbers)}
        result = self.request("tools/call", {"name": tool, "arguments": arguments, "_meta": token})
        if result.get("isError"):
            raise RuntimeError(str(result))
        return result

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises RuntimeError."""
        number = next(self._numbers)
        self._send({"id": number, "method": method, "params": params})
        assert self._server.stdout is not None
        for line in self._server.stdout:
            message = json.loads(line)
            if message.get("id") == number and "method" not in message:
                if "error" in message:
                    raise RuntimeError(str(message["error"]))
                result: dict[str, Any] = message["result"]
                return result
        raise RuntimeError("the server has ended")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._server.stdin.flush()


@contextmanager
def serving(flags: list[str]) -> Iterator[tuple[Client, int]]:
    """A client of a server of its own, and the server's process id."""
    command = [sys.executable, "-m", "kernel_mcp", *flags]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        client = Client(server)
        client.open()
        yield client, server.pid


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own and in no file: RssAnon."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def cell_of(number: int) -> str:
    """A small cell as agents write them: none is like another."""
    kinds = (
        f"x{number % 50} = {number}",
        f"print('cell', {number})",
        f"x = {number}\nx * 2",
        f"def f(a):\n    return a + {number}\nf(1)",
    )
    return kinds[number % len(kinds)]


def measure(cells: int, every: int, flags: list[str]) -> list[tuple[int, int, int]]:
    """Cells run, and bytes of the server and of its largest descendant at that time."""
    found: list[tuple[int, int, int]] = []
    with serving(flags) as (client, server):
        began = time.monotonic()
        for number in range(1, cells + 1):
            client.call("execute", code=cell_of(number))
            if number in (BASE_CELLS, cells) or number % every == 0:
                kernel = max(map(anonymous_bytes, descendants(server)), default=0)
                found.append((number, anonymous_bytes(server), kernel))
                each = (time.monotonic() - began) / number
                print(
                    f"{number:>7,} cells  server {found[-1][1] / MB:6.1f} MB  "
                    f"kernel {kernel / MB:6.1f} MB  {each * 1000:.2f} ms each",
                    flush=True,
                )
    return found


def main() -> int:
    """Run the cells; 1 when the server has grown too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--most", type=float, default=15.0, help="MB that the server may grow by")
    options, flags = parser.parse_known_args()
    found = measure(options.cells, max(BASE_CELLS, options.cells // 10), flags)
    base = next((server for cells, server, _ in found if cells >= BASE_CELLS), 0)
    grown = (found[-1][1] - base) / MB
    print(f"the server has grown by {grown:.1f} MB since cell {BASE_CELLS:,}")
    return 1 if grown > options.most else 0


if __name__ == "__main__":
    sys.exit(main())
