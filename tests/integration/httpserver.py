"""The real server on HTTP as a process of its own, and what becomes of it at its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.memory import status_bytes
from tests.integration.processes import descendants, ends

ROOT = Path(__file__).parents[2]
SERVING = re.compile(r"serving (http\S+)/mcp")
TOKEN = re.compile(r"Bearer (kmcp_[\w-]+)")
READY_S = 120
LEAN = ("--warm", "0", "--no-template")
"""Without what only makes starts fast."""


class HttpServer:
    """One server; `url` and `token` are those that it has printed."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str] | None = None, token: str = ""
    ) -> None:
        self.url = ""
        self.token = token
        self.said: list[str] = []
        self._told = threading.Event()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "KERNEL_MCP_PERSIST": "off", **(environ or {})},
            start_new_session=True,  # without a terminal, as a service
        )
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()
        told = self._told.wait(READY_S)
        if not told or not self.url:
            self.close()
            raise AssertionError(f"the server does not serve: {self.log[-2000:]}")

    @property
    def mcp(self) -> str:
        """Where MCP is served."""
        return f"{self.url}/mcp"

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def log(self) -> str:
        """All that it has said on stderr."""
        return "".join(self.said)

    @property
    def descriptors(self) -> int:
        """The number of its open descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def opened_below(self, folder: Path) -> int:
        """How many of these are files below a folder, without a name or with one."""
        found = 0
        for each in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found += str(each.readlink()).startswith(f"{folder}/")
        return found

    @property
    def memory_bytes(self) -> int:
        """Its own memory, without files and shared memory."""
        return status_bytes(self.process.pid, "RssAnon")

    @property
    def peak_bytes(self) -> int:
        """The most that it has ever held."""
        return status_bytes(self.process.pid, "VmHWM")

    @property
    def processes(self) -> set[int]:
        """Every process below it."""
        return set(descendants(self.process.pid))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stopped(self, *, known: set[int] | None = None) -> None:
        """Wait for its end after a signal: code 0, nothing left of it, no traceback in its log."""
        known = self.processes if known is None else known
        code = self.process.wait(timeout=READY_S)
        self._reader.join(READY_S)
        assert code == 0, (code, self.log[-2000:])
        assert ends(known) == []
        assert "Traceback" not in self.log, self.log[-4000:]

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        self._reader.join(READY_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := SERVING.search(line):
                self.url = found[1]
            if self.url and (found := TOKEN.search(line)):
                self.token = self.token or found[1]
            if self.url and "claude mcp add" in line:
                self._told.set()
        self._told.set()


def command(*flags: str) -> list[str]:
    """How the server is started, on a port that is free."""
    lean = () if "--warm" in flags else LEAN
    return [sys.executable, "-m", "kernel_mcp", "--http", "127.0.0.1:0", *lean, *flags]


@contextmanager
def http_server(
    *flags: str, token: str = "", environ: Mapping[str, str] | None = None
) -> Iterator[HttpServer]:
    """A server with these flags, which a signal ends in order after this block."""
    server = HttpServer(command(*flags), environ, token)
    try:
        yield server
        if server.process.poll() is None:
            known = server.processes
            server.signal()
            server.stopped(known=known)
    finally:
        server.close()
