"""A gateway of tools for tests: it dials the socket of a process, and answers what a test says."""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

IMPORTABLE = Path(__file__).parents[4] / "kernel_specs/restricted/importable"
MOST_CONNECTIONS = 8
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJg"
    "gg=="
)
ORDERS = {
    "name": "list_orders",
    "description": "Return the orders of a customer.\nNewest first.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "limit": {"type": "integer", "default": 20, "description": "Most orders."},
            "customer": {"type": "string"},
            "state": {"enum": ["open", "closed"]},
        },
        "required": ["customer"],
        "additionalProperties": False,
    },
    "policy": "runs",
}


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A tool that takes any arguments."""
    return {"name": name, "description": f"The tool {name}.", "inputSchema": {}, **more}


SERVERS: list[dict[str, Any]] = [
    {
        "name": "crm",
        "description": "Customers",
        "tools": [ORDERS, tool("echo"), tool("wait"), tool("answer"), tool("meet"), tool("get-it")],
    },
    {"name": "git-hub", "description": "", "error": "it has not started", "tools": []},
]


class Gateway:
    """Dials `path`: one connection ahead, at most eight. `events` has what has happened, in order.

    `answers` maps a tool to a function from its arguments to header and blobs of the answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.answers: dict[str, Callable[[Any], tuple[dict[str, Any], Sequence[bytes]]]] = {
            "echo": lambda given: ({"result": {"structured": given, "content": []}}, ()),
            "answer": lambda given: (given["header"], [bytes(each) for each in given["blobs"]]),
        }
        self.answers["meet"] = lambda given: (self._met.wait(), self.answers["echo"](given))[1]
        self.servers: list[dict[str, Any]] = SERVERS
        self.raw: bytes | None = None
        """Bytes that are sent as the answer to each request."""
        self.most = 0
        """Largest number of requests at a time."""
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._busy = 0
        self._met = threading.Barrier(MOST_CONNECTIONS)
        self._ended = False
        self._open: dict[socket.socket, bool] = {}
        """Connections, and whether each carries a request."""
        self._dial()

    def _dial(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._free, socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.path))
            except OSError:
                return
            with self._lock:
                if self._ended:
                    return
                self._open[connection] = False
            try:
                size = connection.recv(4, socket.MSG_WAITALL)
                self._open[connection] = True
                if not self._ended:
                    self._dial()
                if len(size) == 4:
                    body = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
                    self._answer(connection, json.loads(body))
            except OSError:
                self.events.put(("broken", None))
            del self._open[connection]

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        with self._lock:
            self._busy += 1
            self.most = max(self.most, self._busy)
        self.events.put((request["op"], request))
        if self.raw is not None:
            connection.sendall(self.raw)
        elif request["op"] == "list":
            for each in self.servers:  # one that starts late, and is waited for
                if each["name"] == request["server"] and "then" in each:
                    each.update(tools=each["then"], error=None)
            send(connection, {"servers": self.servers})
        elif request.get("tool") == "wait":
            if not connection.recv(1):
                self.events.put(("cancelled", request["arguments"]))
        elif request["op"] == "read":
            item = {"uri": request["uri"], "text": "read"}
            send(connection, {"result": {"content": [item]}})
        else:
            send(connection, *self.answers[request["tool"]](request["arguments"]))
        with self._lock:
            self._busy -= 1

    def close(self) -> None:
        """End all connections, as a gateway that is killed."""
        with self._lock:
            self._ended = True
        for connection in sorted(self._open, key=self._open.__getitem__):
            connection.shutdown(socket.SHUT_RDWR)


def send(connection: socket.socket, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send one frame."""
    text = json.dumps({**header, "blobs": [len(each) for each in blobs]}).encode()
    connection.sendall(b"".join([len(text).to_bytes(4, "big"), text, *blobs]))


def run(
    listening: socket.socket, code: str, python: str = sys.executable, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has the listening socket, as a child of a session's kernel has."""
    return subprocess.run([python, "-B", *options, "-c", code], **surroundings(listening))


def surroundings(listening: socket.socket) -> dict[str, Any]:
    """Return arguments of `subprocess` for such a process."""
    fd = listening.fileno()
    path = {"PYTHONPATH": str(IMPORTABLE), "KERNEL_MCP_TOOLS_FD": str(fd)}
    return {
        "env": {**os.environ, **path},
        "pass_fds": [fd],
        "capture_output": True,
        "text": True,
        "check": False,
    }
