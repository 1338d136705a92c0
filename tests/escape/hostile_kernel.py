"""A kernel that does not play by the rules, as a program: MODE SOCKETS KEY.

SOCKETS is the path prefix of its sockets. It answers `execute_request` as the mode says; with
`honest` as a kernel should.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import zmq

DELIM = b"<IDS|MSG>"
MIB = 1024 * 1024


Behaviour = Callable[["Peer", Any], None]
MODES: dict[str, Behaviour] = {}


def mode(function: Behaviour) -> Behaviour:
    """Make a way of answering `execute_request` known by its name."""
    MODES[function.__name__] = function
    return function


class Peer:
    """The kernel's end of the channels, with every liberty."""

    def __init__(self, prefix: str, key: str) -> None:
        self.prefix = prefix
        self.key = key.encode()
        self.context = zmq.Context()
        self.shell = self._bind(zmq.ROUTER, 1)
        self.iopub = self._bind(zmq.XPUB, 2)
        self.control = self._bind(zmq.ROUTER, 4)
        self.client = b""
        self.watcher = b""

    def _bind(self, kind: int, port: int) -> Any:
        made = self.context.socket(kind)
        made.linger = 0
        if kind == zmq.XPUB:
            made.set(zmq.XPUB_NODROP, 1)
        made.bind(f"ipc://{self.prefix}-{port}")
        return made

    def frames(self, kind: Any, parent: Any, content: Any, *, key: bytes | None = None) -> Any:
        header = {"msg_id": os.urandom(8).hex(), "msg_type": kind, "version": "5.3"}
        parts = [part if isinstance(part, bytes) else json.dumps(part).encode()
                 for part in (header, parent, {}, content)]  # fmt: skip
        return [DELIM, self.sign(parts, key), *parts]

    def sign(self, parts: list[bytes], key: bytes | None = None) -> bytes:
        signer = hmac.new(self.key if key is None else key, digestmod=hashlib.sha256)
        for part in parts:
            signer.update(part)
        return signer.hexdigest().encode()

    def publish(self, kind: Any, parent: Any, content: Any, **options: Any) -> None:
        self.iopub.send_multipart([b"topic", *self.frames(kind, parent, content, **options)])

    def reply(self, kind: Any, parent: Any, content: Any, **options: Any) -> None:
        self.shell.send_multipart([self.client, *self.frames(kind, parent, content, **options)])

    def text(self, parent: Any, text: str) -> None:
        self.publish("stream", parent, {"name": "stdout", "text": text})

    def end(self, parent: Any, **more: Any) -> None:
        """Send the messages of an honest kernel whose cell has run."""
        self.reply("execute_reply", parent, {"status": "ok", "execution_count": 1, **more})
        self.publish("status", parent, {"execution_state": "idle"})

    def honest(self, parent: Any) -> None:
        self.publish("status", parent, {"execution_state": "busy"})
        self.text(parent, "honest\n")
        self.end(parent)

    def serve(self, behave: Callable[[Peer, Any], None]) -> None:
        """Greet who subscribes, then answer one request after the other."""
        poller = zmq.Poller()
        for channel in (self.shell, self.iopub, self.control):
            poller.register(channel, zmq.POLLIN)
        while True:
            for channel, _ in poller.poll():
                parts = channel.recv_multipart()
                if channel is self.iopub:
                    self.publish("iopub_welcome", {}, {"subscription": ""})
                    continue
                at = parts.index(DELIM)
                header = json.loads(parts[at + 2])
                if channel is self.control:
                    self.watcher = parts[0]
                    lie_about_variables(self, header)
                else:
                    self.client = parts[0]
                    if header["msg_type"] == "execute_request":
                        behave(self, header)  # what the server only asks has no output


@mode
def flood_output(peer: Peer, parent: Any) -> None:
    while True:
        peer.text(parent, "x" * 64 * 1024)


@mode
def flood_big_output(peer: Peer, parent: Any) -> None:
    while True:
        peer.publish("display_data", parent, {"data": {"text/plain": "x" * 15 * MIB}})


@mode
def flood_displays(peer: Peer, parent: Any) -> None:
    for number in itertools.count():
        data = {"text/plain": "x" * MIB, "image/png": "A" * MIB}
        transient = {"display_id": f"{number}-" + "i" * MIB}
        content = {"data": data, "metadata": {"m": "x" * MIB}, "transient": transient}
        peer.publish("display_data", parent, content)


@mode
def flood_shell(peer: Peer, parent: Any) -> None:
    while True:
        peer.reply("execute_reply", {"msg_id": "other"}, {"status": "ok", "x": "x" * 10_000})


@mode
def flood_control(peer: Peer, parent: Any) -> None:
    if not peer.watcher:
        peer.honest(parent)
        return
    frames = peer.frames("x_reply", {"msg_id": "other"}, {"x": "x" * 10_000})
    while True:
        peer.control.send_multipart([peer.watcher, *frames])


@mode
def flood_tiny(peer: Peer, parent: Any) -> None:
    frames = peer.frames("stream", parent, {"name": "stdout", "text": "."})
    for _ in range(100_000):
        peer.iopub.send_multipart([b"t", *frames])
    peer.end(parent)


@mode
def flood_welcome(peer: Peer, parent: Any) -> None:
    frames = peer.frames("iopub_welcome", {}, {"subscription": ""})
    for _ in range(50_000):
        peer.iopub.send_multipart([b"t", *frames])
    peer.honest(parent)


@mode
def flood_unsigned(peer: Peer, parent: Any) -> None:
    frames = peer.frames("stream", parent, {"name": "stdout", "text": "forged"}, key=b"wrong")
    for _ in range(20_000):
        peer.iopub.send_multipart([b"t", *frames])
    peer.honest(parent)


@mode
def flood_replies(peer: Peer, parent: Any) -> None:
    error = {"status": "error", "ename": "E", "evalue": "late", "traceback": []}
    for _ in range(50_000):
        peer.reply("execute_reply", parent, {"status": "ok", "execution_count": 7})
        peer.reply("execute_reply", parent, error)
    peer.honest(parent)


@mode
def flood_values(peer: Peer, parent: Any) -> None:
    """JSON that takes a second to parse, in a message of legal size, again and again."""
    for inner in (b"[],", b"{},", b'"",', b"1,", b'{"a":1},'):
        body = b'{"data":{"application/json":[' + inner * (15 * MIB // len(inner)) + b"0]}}"
        for _ in range(4):
            peer.publish("display_data", parent, body)
    keys = ",".join(f'"{number}":1' for number in range(MIB)).encode()
    peer.publish("display_data", parent, b'{"data":{' + keys + b"}}")
    peer.honest(parent)


@mode
def flood_headers(peer: Peer, parent: Any) -> None:
    for _ in range(20):
        peer.publish("stream", {"msg_id": "x" * 10 * MIB}, {"name": "stdout", "text": "x"})
        peer.publish("s" * 10 * MIB, parent, {})
    peer.honest(parent)


@mode
def forge_for_others(peer: Peer, parent: Any) -> None:
    for other in ("", "0", "other", parent["msg_id"] + "x"):
        forged = {"msg_id": other}
        peer.reply("execute_reply", forged, {"status": "error", "ename": "E", "evalue": "e"})
        peer.publish("status", forged, {"execution_state": "idle"})
    peer.honest(parent)


@mode
def forge_idle(peer: Peer, parent: Any) -> None:
    peer.publish("status", parent, {"execution_state": "idle"})
    peer.text(parent, "after idle\n")
    peer.end(parent)


@mode
def no_idle(peer: Peer, parent: Any) -> None:
    peer.text(parent, "before\n")
    peer.reply("execute_reply", parent, {"status": "ok"})


@mode
def slow_end(peer: Peer, parent: Any) -> None:
    """Its reply overtakes all else, which comes once it has been asked whether it still works."""
    peer.reply("execute_reply", parent, {"status": "ok"})
    asked = question(peer)
    peer.text(parent, "slow\n")
    peer.publish("status", parent, {"execution_state": "idle"})
    peer.publish("status", asked, {"execution_state": "idle"})


@mode
def no_idle_but_answers(peer: Peer, parent: Any) -> None:
    peer.reply("execute_reply", parent, {"status": "ok"})
    asked = question(peer)
    peer.text(parent, "before\n")
    peer.publish("status", asked, {"execution_state": "idle"})


@mode
def forge_parents(peer: Peer, parent: Any) -> None:
    """Output that answers requests of others, and some that answers none."""
    for forged in (
        {**parent, "session": "other"}, {**parent, "msg_id": "x"}, {"msg_id": "x", "session": "y"}
    ):  # fmt: skip
        peer.text(forged, "forged\n")
        peer.publish("display_data", forged, {"data": {"text/plain": "forged"}})
    peer.publish("display_data", {}, {"data": {"text/plain": "forged"}})
    peer.text({}, "of a file descriptor\n")
    peer.honest(parent)


def question(peer: Peer) -> Any:
    """The header of the next control request."""
    parts = peer.control.recv_multipart()
    return json.loads(parts[parts.index(DELIM) + 2])


@mode
def abort(peer: Peer, parent: Any) -> None:
    peer.end(parent, status="aborted")


@mode
def wrong_types(peer: Peer, parent: Any) -> None:
    values: list[Any] = [None, 1, 1.5, True, "x", [], {}, [1], {"a": 1}, [[]], 10**400]
    kinds = ["stream", "display_data", "execute_result", "update_display_data", "clear_output",
             "error", "status", "execute_input", "input_request", "comm_open", "debug_event",
             "shutdown_reply", "", "x"]  # fmt: skip
    fields = ["name", "text", "data", "metadata", "transient", "wait", "ename", "evalue",
              "traceback", "execution_state", "execution_count", "prompt"]  # fmt: skip
    for kind in kinds:
        for value in values:
            peer.publish(kind, parent, dict.fromkeys(fields, value))
            peer.publish(kind, parent, value)
            peer.publish(kind, value, {})
            peer.reply(kind, parent, value)
    for value in values:
        peer.publish(value, parent, {})
        peer.publish("display_data", parent, {"data": {"text/plain": value, "a/b": value}})
        peer.reply("execute_reply", {"msg_id": value}, {"status": value})
        peer.publish("error", parent, {"ename": "E", "evalue": "e", "traceback": [value] * 3})
    for depth in (900, 100_000, 5_000_000):
        peer.publish("display_data", parent, b'{"data":' + b"[" * depth + b"]" * depth + b"}")
    peer.iopub.send_multipart([b""])
    peer.iopub.send_multipart([DELIM, DELIM])
    peer.iopub.send_multipart([os.urandom(100) for _ in range(30)])
    peer.iopub.send_multipart([b"t", *peer.frames("stream", parent, b"not json")])
    peer.iopub.send_multipart([b"t", *peer.frames("stream", parent, b"\xff\xfe{}")])
    peer.iopub.send_multipart([b"t", *peer.frames("stream", parent, b'{"a":' + b"9" * 9000 + b"}")])
    peer.honest(parent)


@mode
def ask_for_input(peer: Peer, parent: Any) -> None:
    for _ in range(100):
        peer.reply("input_request", parent, {"prompt": "Password: ", "password": True})
    peer.honest(parent)


@mode
def huge_message(peer: Peer, parent: Any) -> None:
    peer.text(parent, "x" * 17 * MIB)
    time.sleep(60)


@mode
def many_parts(peer: Peer, parent: Any) -> None:
    peer.iopub.send_multipart([b"t"] * 1000)
    time.sleep(60)


@mode
def never(peer: Peer, parent: Any) -> None:
    time.sleep(600)


@mode
def close_output(peer: Peer, parent: Any) -> None:
    peer.iopub.close(0)
    time.sleep(60)


@mode
def close_everything(peer: Peer, parent: Any) -> None:
    peer.context.destroy(0)
    time.sleep(60)


@mode
def die(peer: Peer, parent: Any) -> None:
    peer.text(parent, "last words\n")
    time.sleep(0.3)
    os._exit(3)


@mode
def close_and_die(peer: Peer, parent: Any) -> None:
    peer.context.destroy(0)
    os._exit(3)


def tell_variables(peer: Peer, parent: Any, content: Any) -> None:
    frames = peer.frames("kernel_mcp_variables_reply", parent, content)
    peer.control.send_multipart([peer.watcher, *frames])


def lie_about_variables(peer: Peer, parent: Any) -> None:
    lies: list[Any] = [{}, {"variables": 1}, {"variables": [1, None, {"name": {}, "shape": "x"}]}]
    many = {"variables": [{"name": "n" * 1000, "size": -1}] * 5000, "omitted": "x"}
    for content in (*lies, many):
        tell_variables(peer, parent, content)


def _listen(prefix: str) -> list[socket.socket]:
    """The sockets without libzmq: whatever bytes one likes."""
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for port, listener in zip((1, 2, 4), listeners, strict=True):
        listener.bind(f"{prefix}-{port}")
        listener.listen()
    return listeners


def handshake(connection: socket.socket, kind: bytes) -> None:
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    connection.sendall(bytes((4, len(body))) + body)


def raw(name: str, prefix: str) -> None:
    """Greet like a kernel as far as the mode goes, then send something else."""
    listeners = _listen(prefix)
    print("ready", flush=True)
    connections = [listener.accept()[0] for listener in listeners]
    if name == "raw_garbage":
        for connection in connections:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
    elif name == "raw_silence":
        pass
    elif name == "raw_slow":
        for byte in b"\xff" + bytes(40):
            connections[1].send(bytes((byte,)))
            time.sleep(0.05)
    else:
        for connection, kind in zip(connections, (b"ROUTER", b"XPUB", b"ROUTER"), strict=True):
            handshake(connection, kind)
        part = struct.pack(">BQ", 3, MIB) + b"x" * MIB
        endless = {
            "raw_endless_message": part,
            "raw_endless_parts": b"\x01\x00" * 10_000,
            "raw_endless_commands": b"\x04\x05\x04PING" * 10_000,
            "raw_huge_size": struct.pack(">BQ", 2, 2**62) + b"x" * 1000,
            "raw_unknown_flags": b"\xf8\x00",
            "raw_long_command": struct.pack(">BQ", 6, MIB),
        }[name]
        while True:
            connections[1].sendall(endless)
    time.sleep(600)


def main(name: str, prefix: str, key: str) -> None:
    if name.startswith("raw_"):
        raw(name, prefix)
        return
    peer = Peer(prefix, key)
    print("ready", flush=True)
    peer.serve(MODES.get(name, Peer.honest))


if __name__ == "__main__":
    main(*sys.argv[1:])
