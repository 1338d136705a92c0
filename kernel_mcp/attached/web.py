"""List the kernels of a Jupyter server, and connect to one by web socket.

Source of the paths: https://jupyter-server.readthedocs.io/en/latest/developers/rest-api.html, of
the messages: https://jupyter-server.readthedocs.io/en/latest/developers/websocket-protocols.html
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from time import perf_counter
from typing import Any
from urllib.parse import quote

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.websocket import (
    WebSocketClientConnection,
    WebSocketClosedError,
    WebSocketError,
    websocket_connect,
)

from kernel_mcp.attached.targets import AttachTarget
from kernel_mcp.barriers import Barrier
from kernel_mcp.config.attachments import Attachment
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import (
    BURST_S,
    Channel,
    ChannelListener,
    Floods,
    KernelChannels,
)
from kernel_mcp.kernels.message_codec import MAX_MESSAGE_BYTES, MessageCodec, WireError
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

PROTOCOL = "v1.kernel.websocket.jupyter.org"
TIMEOUT_S = 20.0
"""Seconds that a Jupyter server has to answer."""
MOST_RECEIVED = 8 * MAX_MESSAGE_BYTES
"""Maximum bytes of a message: a larger one ends the connection, and the variables are lost."""
PING_S = 20.0
"""Seconds between pings: a server that does not answer one counts as gone."""
MOST_PINGS = 1000
"""Pings accepted from a server between two messages; each costs time, and an answer is queued."""
MAX_LIST_BYTES = 4 * MIB
"""Largest list of kernels; an entry has some 500 bytes."""
MOST_PATH_CHARS = 1000
RECEIVING = 2.0
"""Time to receive and decode a message, as a multiple of the time to decode it."""
MOST_PARTS = 64
MOST_SHOWN = 10
SHOWN_CHARS = 200
GONE = "it was ended on its Jupyter server"
_NUMBER_BYTES = 8
CHANNELS: dict[bytes, Channel] = {
    b"shell": "shell",
    b"iopub": "iopub",
    b"control": "control",
    b"stdin": "stdin",
}


@dataclass(frozen=True, slots=True)
class Running:
    """A kernel of a Jupyter server; `path` is that of its notebook, "" for none."""

    kernel: str
    path: str = ""


async def kernels_of(server: Attachment) -> list[Running]:
    """Return the kernels of a server, those of notebooks first. Raises LaunchError."""
    sessions = await _fetched(server, "api/sessions")
    found = [
        Running(kernel, _text(each.get("path")))
        for each in sessions
        if isinstance(each, dict) and isinstance(each.get("kernel"), dict)
        if (kernel := _text(each["kernel"].get("id")))
    ]
    known = {each.kernel for each in found}
    others = await _fetched(server, "api/kernels")
    ids = [_text(each.get("id")) for each in others if isinstance(each, dict)]
    return [*found, *(Running(each) for each in ids if each and each not in known)]


def _text(value: object) -> str:
    """Return an id or path that fits into a URL and into answers; "" for any other value."""
    if not isinstance(value, str) or len(value) > MOST_PATH_CHARS:
        return ""
    return value if value.encode("utf-8", "replace").decode() == value else ""


async def kernel_at(place: AttachTarget) -> Running:
    """Return the kernel at a place. Raises LaunchError, also if several match."""
    there = await kernels_of(place.attachment)
    meant = there
    if place.kernel:
        meant = [each for each in there if each.kernel == place.kernel]
    elif place.notebook:
        meant = [each for each in there if each.path == place.notebook]
    if len({each.kernel for each in meant}) == 1:
        return meant[0]
    shown = [
        str(AttachTarget(place.attachment, each.kernel, each.path)) for each in there[:MOST_SHOWN]
    ]
    more = f" and {len(there) - MOST_SHOWN} more" if len(there) > MOST_SHOWN else ""
    if not there:
        raise LaunchError(
            f"No kernel runs on {place.attachment}. Open a notebook there and run a cell, then "
            "call this again."
        )
    which = "has no such kernel" if not meant else "runs several kernels"
    raise LaunchError(f"{place.attachment} {which}. Pass one of: {', '.join(shown)}{more}.")


def _headers(server: Attachment) -> dict[str, str]:
    return {"Authorization": f"token {server.token}"} if server.token else {}


async def _fetched(server: Attachment, path: str) -> list[Any]:
    found = await _answer(server, path)
    if not isinstance(found, list):
        raise LaunchError(f"{server} is no Jupyter server: {path} is no list.")
    return found


async def start_kernel(server: Attachment) -> str:
    """Start a kernel of a server's default kind, and return its id. Raises LaunchError."""
    found = await _answer(server, "api/kernels", "POST", b"{}")
    if not (isinstance(found, dict) and (kernel := _text(found.get("id")))):
        raise LaunchError(f"{server} is no Jupyter server: it has started no kernel.")
    return kernel


async def is_running(server: Attachment, kernel: str) -> bool:
    """Return True if a server has a kernel with this id. Raises LaunchError."""
    found = await _fetched(server, "api/kernels")
    return any(isinstance(each, dict) and each.get("id") == kernel for each in found)


async def interrupt_kernel(server: Attachment, kernel: str) -> None:
    """Interrupt a kernel. Raises LaunchError."""
    await _answer(server, f"api/kernels/{quote(kernel)}/interrupt", "POST", b"")


async def end_kernel(server: Attachment, kernel: str) -> None:
    """End a kernel. Raises LaunchError."""
    await _answer(server, f"api/kernels/{quote(kernel)}", "DELETE")


async def _answer(
    server: Attachment, path: str, method: str = "GET", body: bytes | None = None
) -> Any:
    """Return the JSON answer of a server; None for an empty one. Raises LaunchError."""
    request = HTTPRequest(
        f"{server}/{path}",
        method=method,
        body=body,
        headers=_headers(server),
        connect_timeout=TIMEOUT_S,
        request_timeout=TIMEOUT_S,
        follow_redirects=False,
        decompress_response=False,
    )
    client = SimpleAsyncHTTPClient(force_instance=True, max_body_size=MAX_LIST_BYTES)
    try:
        found = (await client.fetch(request)).body
        return json.loads(found) if found else None
    except HTTPClientError as reason:
        raise LaunchError(_refused(server, reason)) from reason
    except (OSError, ValueError, RecursionError) as reason:
        raise LaunchError(f"The Jupyter server {server} cannot be used: {reason}.") from reason
    finally:
        client.close()


def _refused(server: Attachment, reason: HTTPClientError) -> str:
    if reason.code in (301, 302, 303, 307, 308, 401, 403):
        return (
            f"The Jupyter server {server} wants another token (HTTP {reason.code}). The operator "
            f"gives it behind the address: '{server}/?token-file=PATH', ?token-env=VARIABLE or "
            "?token=TOKEN; `jupyter server list` shows it."
        )
    return f"The Jupyter server {server} answers {one_line(str(reason))[:SHOWN_CHARS]}."


async def joined(server: Attachment, kernel: str) -> WebSocketClientConnection:
    """Return an open web socket to a kernel. Raises LaunchError."""
    scheme, _, rest = server.place.partition("://")
    address = f"{'wss' if scheme == 'https' else 'ws'}://{rest}/api/kernels/{quote(kernel)}"
    request = HTTPRequest(
        f"{address}/channels?session_id={secrets.token_hex(16)}",
        headers=_headers(server),
        connect_timeout=TIMEOUT_S,
        request_timeout=TIMEOUT_S,
        follow_redirects=False,
    )
    try:
        found = await websocket_connect(
            request,
            subprotocols=[PROTOCOL],
            max_message_size=MOST_RECEIVED,
            ping_interval=PING_S,
        )
    except HTTPClientError as reason:
        raise LaunchError(_refused(server, reason)) from reason
    except (OSError, ValueError, WebSocketError) as reason:
        raise LaunchError(f"The Jupyter server {server} cannot be used: {reason}.") from reason
    if found.selected_subprotocol != PROTOCOL:
        found.close()
        raise LaunchError(
            f"The Jupyter server {server} is too old: it does not speak {PROTOCOL}, as "
            "jupyter-server 2 does. Update it, or name a connection file with --attach."
        )
    return found


class Unsigned(MessageCodec):
    """Codec of messages without signatures: the Jupyter server checks and adds them."""

    def __init__(self) -> None:
        super().__init__("", shared=True)

    def _sealed(self, parts: Sequence[bytes]) -> list[bytes]:
        return list(parts)

    def _opened(self, frames: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
        if len(frames) < 4:
            raise WireError("too few frames")
        return frames[:4], frames[4:]


class WebChannels(KernelChannels):
    """The channels of a kernel over one web socket."""

    def __init__(
        self,
        found: WebSocketClientConnection,
        server: Attachment,
        kernel: str,
        floods: Floods,
        listener: ChannelListener,
    ) -> None:
        """`floods` is shared by all kernels whose messages this event loop reads."""
        super().__init__(Unsigned(), listener)
        self._socket = found
        self._server, self._kernel = server, kernel
        self._interrupts: set[asyncio.Task[None]] = set()
        self._floods = floods
        self._debt = 0.0
        self._settled = perf_counter()
        self._resting = False
        self._pings = 0
        self._stream = found.protocol.stream if found.protocol is not None else None
        self._hurry(socket.TCP_NODELAY)
        found.on_ping = self._on_ping  # type: ignore[method-assign]
        self._taking = self._loop.create_task(self._take())

    def send(
        self,
        channel: Channel,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> str:
        """See `KernelChannels`; no descriptor can be given."""
        msg_id, parts = self.wire.request(kind, content)
        try:
            sent = self._socket.write_message(packed([channel.encode(), *parts, *buffers]), True)
        except WebSocketClosedError as error:
            raise LaunchError("The connection to the Jupyter server is closed.") from error
        sent.add_done_callback(lambda done: done.exception())  # `_take` reports a broken connection
        return msg_id

    def interrupt(self) -> None:
        """See `KernelChannels`: the server does it, as many kernels take no such message."""
        task = self._loop.create_task(self._interrupt())
        self._interrupts.add(task)
        task.add_done_callback(self._interrupts.discard)

    async def _interrupt(self) -> None:
        with Barrier("interrupting a kernel of a Jupyter server"):
            if await is_running(self._server, self._kernel):
                await interrupt_kernel(self._server, self._kernel)
            else:
                self._break(GONE)

    def taken(self, channel: Channel) -> bool:
        """Return False: it is not known whether a kernel behind a server has read a message."""
        return False

    @property
    def resting(self) -> bool:
        """See `KernelChannels`."""
        return self._resting

    async def drained(self, timeout: float) -> None:
        """Return at once: received messages are delivered immediately."""

    def close(self) -> None:
        """See `KernelChannels`."""
        self._closed = True
        self._taking.cancel()
        self._floods.discard(self)
        self._socket.close()

    async def _take(self) -> None:
        """Receive messages; pause when they use more than their share of time, see `Channels`."""
        while (message := await self._socket.read_message()) is not None:
            began = perf_counter()
            self._pings = 0
            self._debt = max(0.0, self._debt - (began - self._settled) * self._floods.pays(self))
            self._on_message(message)
            del message
            self._settled = perf_counter()
            self._debt += RECEIVING * (self._settled - began)
            if self._debt > BURST_S:
                self._resting = True
                self._floods.add(self)
                await asyncio.sleep(self._debt / self._floods.pays(self))
                self._floods.discard(self)
                self._resting = False
        self._break("its Jupyter server has closed the connection")

    def _on_ping(self, data: bytes) -> None:
        self._pings += 1
        if self._pings > MOST_PINGS and self._stream is not None:
            self._stream.close()

    def _on_message(self, message: str | bytes) -> None:
        self._hurry(socket.TCP_QUICKACK)  # what the server sends next waits for that, up to 40 ms
        if self._closed or not isinstance(message, bytes):
            return
        try:
            channel, *frames = unpacked(message)
        except WireError:
            return  # not of the protocol's shape
        name = CHANNELS.get(channel)
        if name is not None and len(message) <= MAX_MESSAGE_BYTES:
            self._deliver(name, frames)
        elif name == "iopub":
            self._leave_out(len(message))
        elif name is not None:  # a cell without its reply would not end
            self._socket.close()

    def _hurry(self, option: int) -> None:
        if self._stream is not None and self._stream.socket is not None:
            with suppress(OSError):  # it may have been closed
                self._stream.socket.setsockopt(socket.IPPROTO_TCP, option, 1)


def packed(parts: Sequence[bytes]) -> bytes:
    """Return a channel's name and the parts of a message as one web socket message."""
    places = [_NUMBER_BYTES * (len(parts) + 2)]
    for part in parts:
        places.append(places[-1] + len(part))
    numbers = (number.to_bytes(_NUMBER_BYTES, "little") for number in (len(places), *places))
    return b"".join((*numbers, *parts))


def unpacked(message: bytes) -> list[bytes]:
    """Return the channel's name and the parts, the reverse of `packed`. Raises WireError."""
    count = int.from_bytes(message[:_NUMBER_BYTES], "little")
    if not 6 <= count <= MOST_PARTS or len(message) < _NUMBER_BYTES * (count + 1):
        raise WireError("not the parts of a message")
    starts = range(_NUMBER_BYTES, _NUMBER_BYTES * (count + 1), _NUMBER_BYTES)
    places = [int.from_bytes(message[at : at + _NUMBER_BYTES], "little") for at in starts]
    if places != sorted(places) or places[-1] > len(message):
        raise WireError("parts beyond the message")
    return [message[a:b] for a, b in pairwise(places)]
