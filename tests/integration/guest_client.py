"""A guest kernel as a plain subprocess, driven by a raw ZMQ client that checks every message."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

BOOT = Path(__file__).parents[2] / "kernel_specs" / "restricted" / "boot.py"
DELIMITER = b"<IDS|MSG>"
SECONDS = 60.0
KEY = "secret"
PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}


@dataclass
class Outcome:
    """The outcome of one request: the reply and every iopub message up to idle."""

    reply: dict[str, Any]
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def text(self, name: str = "stdout") -> str:
        """All text of one stream."""
        return "".join(
            content["text"]
            for kind, content in self.messages
            if kind == "stream" and content["name"] == name
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Contents of all messages of one type."""
        return [content for name, content in self.messages if name == kind]

    def joined(self) -> list[str]:
        """As `outputs`; text of one stream is one piece, however quickly it was sent."""
        found: list[str] = []
        for output in self.outputs():
            name, _, text = output.partition(":")
            if found and name in ("stdout", "stderr") and found[-1].startswith(f"{name}:"):
                found[-1] += text
            else:
                found.append(output)
        return found

    def outputs(self) -> list[str]:
        """Streams, displays, results and errors in order, each as short text."""
        found = []
        for kind, content in self.messages:
            if kind == "stream":
                found.append(f"{content['name']}:{content['text']}")
            elif kind in {"display_data", "execute_result"}:
                found.append(f"{kind}:{content['data']['text/plain']}")
            elif kind == "error":
                found.append(f"error:{content['ename']}")
        return found


class GuestKernel:
    """One kernel process and connections to three of its channels."""

    def __init__(
        self,
        folder: Path,
        *,
        boot: dict[str, Any] | None = None,
        confined: bool = True,
        connection: dict[str, Any] | None = None,
    ) -> None:
        """Start boot.py in `folder`; `boot` and `connection` override entries of its two files."""
        self.workspace = folder / "w"
        self.workspace.mkdir()
        self.connection = {
            "transport": "ipc",
            "ip": str(folder / "k"),
            "key": KEY,
            "signature_scheme": "hmac-sha256",
            **{f"{name}_port": port for name, port in PORTS.items()},
            **(connection or {}),
        }
        self.connection_file = folder / "connection.json"
        self.connection_file.write_text(json.dumps(self.connection))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if confined:
            settings = {
                "version": 1,
                "policy": {"allow_all": True, "modules": []},
                "workspace": str(self.workspace),
                "tmp": str(folder),
                "ready_fd": theirs.fileno(),
                **(boot or {}),
            }
            (folder / "boot.json").write_text(json.dumps(settings))
        self._stderr = folder / "stderr"  # a file: children that live on would keep a pipe open
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(BOOT), "-f", str(self.connection_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                env={"PATH": os.environ["PATH"]},
            )
        theirs.close()
        self.ready = ours
        self.context = zmq.Context()
        self.channels: dict[str, zmq.Socket[bytes]] = {}
        self._count = 0

    def wait_ready(self) -> dict[str, Any]:
        """The ready packet."""
        self.ready.settimeout(SECONDS)
        packet = json.loads(self.ready.recv(65536) or b"{}")
        self.ready.close()
        return dict(packet)

    def connect(self, *, hwm: int = 0) -> None:
        """Connect shell, control and iopub, and wait for the kernel's greeting on iopub."""
        for name, kind in (("shell", zmq.DEALER), ("control", zmq.DEALER), ("iopub", zmq.SUB)):
            channel: zmq.Socket[bytes] = self.context.socket(kind)
            channel.linger = 0
            channel.rcvhwm = hwm
            if name == "iopub":
                channel.subscribe(b"")
            channel.connect(f"ipc://{self.connection['ip']}-{PORTS[name]}")
            self.channels[name] = channel
        while self.receive("iopub")[0]["msg_type"] != "iopub_welcome":
            pass

    def send(self, channel: str, kind: str, content: dict[str, Any]) -> str:
        """Send one request; its message id."""
        self._count += 1
        name = f"message-{self._count}"
        header = {"msg_id": name, "msg_type": kind, "session": "s", "username": "u"}
        header |= {"version": "5.3", "date": "2024-01-01T00:00:00Z"}
        parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
        self.channels[channel].send_multipart([DELIMITER, sign(parts), *parts])
        return name

    def receive(
        self, channel: str, seconds: float = SECONDS
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Header, parent header and content of the next message; checks that it is whole."""
        if not self.channels[channel].poll(int(seconds * 1000)):
            raise TimeoutError(f"nothing on {channel} for {seconds} s")
        frames = self.channels[channel].recv_multipart()
        start = frames.index(DELIMITER)
        signature, *parts = frames[start + 1 :]
        assert len(parts) == 4
        assert signature == sign(parts)
        header, parent, _, content = (json.loads(part) for part in parts)
        return header, parent, content

    def begin(self, code: str, **options: Any) -> str:
        """Send a cell; its message id."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        return self.send("shell", "execute_request", content | options)

    def first_output(self, request: str, kind: str = "stream") -> dict[str, Any]:
        """Content of the next message of one type that belongs to a request."""
        while True:
            header, parent, content = self.receive("iopub")
            if parent.get("msg_id") == request and header["msg_type"] == kind:
                return content

    def finish(self, request: str) -> Outcome:
        """Collect what is still to come of a request."""
        messages = []
        while True:
            header, parent, content = self.receive("iopub")
            if parent.get("msg_id") != request:
                continue
            if header["msg_type"] == "status" and content["execution_state"] == "idle":
                break
            messages.append((header["msg_type"], content))
        return Outcome(self.reply("shell", request), messages)

    def reply(self, channel: str, request: str) -> dict[str, Any]:
        """The reply to a request."""
        while True:
            _, parent, content = self.receive(channel)
            if parent.get("msg_id") == request:
                return content

    def run(self, code: str, **options: Any) -> Outcome:
        """Run one cell to its end."""
        return self.finish(self.begin(code, **options))

    def ask(self, kind: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request on the control channel and its reply."""
        return self.reply("control", self.send("control", kind, content or {}))

    def interrupt(self) -> None:
        """SIGINT to the kernel's process group, as the host sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_exit(self) -> tuple[int, str]:
        """Exit code and stderr."""
        return self.process.wait(SECONDS), self._stderr.read_text()

    def close(self) -> None:
        """Kill the process with its children and release the sockets."""
        self.ready.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)
        for channel in self.channels.values():
            channel.close()
        self.context.term()


@contextmanager
def guest(folder: Path, **options: Any) -> Iterator[GuestKernel]:
    """A connected kernel, ended afterwards."""
    kernel = GuestKernel(folder, **options)
    try:
        packet = kernel.wait_ready()
        assert packet.get("ready"), packet
        kernel.connect()
        yield kernel
    finally:
        kernel.close()


def wait_until_asleep(pid: int) -> None:
    """Return once the main thread of a process waits in the system, as in `time.sleep`."""
    path = Path(f"/proc/{pid}/task/{pid}/stat")
    wait_until(lambda: path.read_text().rpartition(")")[2].split()[0] == "S")


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once a condition of the outside world holds; AssertionError after SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.001)


def sign(parts: list[bytes]) -> bytes:
    """The signature of a message."""
    return hmac.new(KEY.encode(), b"".join(parts), hashlib.sha256).hexdigest().encode()
