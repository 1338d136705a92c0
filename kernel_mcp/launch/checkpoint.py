"""The host's side of one checkpoint: a suspended copy of a kernel, which is hostile.

The server makes every descriptor and receives none. Linux adds the sender's process id to each
packet; it must belong to the sandbox. A packet that answers no request ends the checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.base import take_no_descriptors
from kernel_mcp.linux.proc import tree
from kernel_mcp.records import dataclass

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid, as the receiver's namespaces number them."""
PACKET_BYTES = 64 * 1024
QUOTED_CHARS = 300
ENDED = "its process has ended"
MOST_STATUS = 0xFFFF
RESUME_S = 5.0
"""CPU seconds within which a copy must fork a kernel; it takes some 20 ms."""


@dataclass(frozen=True, slots=True)
class ResumedKernel:
    """A kernel that a checkpoint has forked: its process, the key of its messages, its number.

    `closed` is its own report of files that are no longer open: hostile data.
    """

    pid: int
    pidfd: int
    key: str
    number: int
    closed: object


class _ResumeRequest:
    """A request for a kernel, and a callback for the kernel's end."""

    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.found: tuple[int, int] | None = None
        self.closed: object = None
        self.ended = False
        self.on_end: Callable[[int], None] = lambda _status: None


class Checkpoint:
    """One copy, from the moment its park socket is made.

    pid, pidfd  its process, once it is `suspended`
    refusal     reason why it cannot be used any more, or ""
    died        True if its process has ended by itself
    size        bytes of memory that the kernel held when the copy was made
    users       number of sessions that may be restored from it
    """

    def __init__(
        self,
        admit: Callable[[int], int],
        on_gone: Callable[[Checkpoint], None],
        begun: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """`admit` returns a pidfd of a process of the sandbox, or raises LaunchError or OSError.

        `on_gone` is called when the process has ended although the server did not end it.
        `begun` returns the processes that may become the copy, until it is suspended.
        """
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        self._host, self._guest = socket.socketpair(socket.AF_UNIX, kind)
        self._host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        take_no_descriptors(self._host)
        self._host.setblocking(False)
        self._admit = admit
        self._on_gone = on_gone
        self._begun = begun
        self._loop = asyncio.get_running_loop()
        self._suspended = anyio.Event()
        self._numbers = itertools.count(1)
        self._requests: dict[int, _ResumeRequest] = {}
        self._closed = self._ended_here = False
        self.pid = self.pidfd = -1
        self.size = 0
        self.users = 1
        self.refusal = ""
        self.died = False
        self._loop.add_reader(self._host, self._on_readable)

    @property
    def usable(self) -> bool:
        """Return True if the copy is suspended and can be resumed."""
        return not self._closed and not self.refusal and self.pidfd >= 0

    def send_park_socket(self, control_socket: socket.socket) -> None:
        """Send the kernel the park socket of the copy. Raises LaunchError."""
        try:
            socket.send_fds(control_socket, [b'{"op": "park"}'], [self._guest.fileno()])
        except OSError as reason:
            raise LaunchError(f"the kernel takes no word of the server: {reason}") from reason
        finally:
            self._guest.close()

    async def suspended(self, cpu_s: float) -> None:
        """Wait until the copy is suspended. Raises LaunchError after `cpu_s` CPU seconds."""
        why = await silence.await_answer(self._suspended, self._begun, cpu_s)
        if not self.usable:
            raise LaunchError(self.refusal or f"it was not there: {why}")

    async def resume(self, fds: Sequence[int], folder: str = "") -> ResumedKernel:
        """Fork a kernel from the copy, with the socket ends `fds`; `folder` is that of a branch.

        The caller keeps `fds` and owns the pidfd of the result. Raises LaunchError. If the
        checkpoint is still `usable` then, only the new kernel has ended: the caller may try again.
        """
        if not self.usable:
            raise LaunchError(self.refusal or "the checkpoint has ended")
        number, key = next(self._numbers), secrets.token_hex(32)
        request = self._requests[number] = _ResumeRequest()
        order = {"op": "wake", "id": number, "key": key, "folder": folder}
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)  # code may have stopped it
            socket.send_fds(self._host, [json.dumps(order).encode()], fds)
            with anyio.CancelScope(shield=True):
                why = await silence.await_answer(request.answered, self._resuming, RESUME_S)
        except OSError as reason:
            raise LaunchError(f"the checkpoint takes no word of the server: {reason}") from reason
        if request.found is None:
            if request.ended and self.usable:
                raise LaunchError("the kernel that it forked has ended at once")
            self.refuse(f"it did not become a kernel: {why}")
            raise LaunchError(self.refusal)
        return ResumedKernel(*request.found, key, number, request.closed)

    def _resuming(self) -> Iterable[int]:
        """Return its process and its children without the kernels, which may be computing."""
        kernels = {each.found[0] for each in self._requests.values() if each.found is not None}
        return tree(self.pid, kernels)

    def when_ended(self, number: int, callback: Callable[[int], None]) -> None:
        """Call `callback` with the wait status of a kernel, once the checkpoint reports it.

        Not called if the checkpoint never does, or has done so already.
        """
        if (request := self._requests.get(number)) is not None:
            request.on_end = callback

    def refuse(self, reason: str) -> None:
        """Mark the checkpoint as unusable for this reason, and kill its process."""
        self.refusal = self.refusal or reason
        self._suspended.set()
        self._hang_up()
        self._ended_here = True
        if self.pidfd >= 0:
            _kill(self.pidfd)
        for request in self._requests.values():
            request.answered.set()

    def close(self) -> None:
        """Kill its process; the kernels that it has forked keep running."""
        if self._closed:
            return
        self._closed = True
        self.refuse("it was given up")
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def _hang_up(self) -> None:
        self._guest.close()
        if self._host.fileno() >= 0:
            self._loop.remove_reader(self._host)
            self._host.close()

    def _on_readable(self) -> None:
        with Barrier("listening to a checkpoint") as barrier:
            self._read()
        if barrier.failure is not None:
            self._end("the server could not take in what it said")

    def _read(self) -> None:
        """Read one packet at a time, so that a flood delays no other checkpoint."""
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            content, extra, _, _ = self._host.recvmsg(PACKET_BYTES, space)
        except BlockingIOError:
            return
        except ConnectionResetError:
            content, extra = b"", []
        if not content:
            self._end(ENDED)
            return
        pid = next(
            (
                _CREDENTIALS.unpack(data)[0]
                for level, kind, data in extra
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
            ),
            0,
        )
        try:
            packet = json.loads(content)
            valid = isinstance(packet, dict) and self._handle(packet, pid)
        except (ValueError, RecursionError, TypeError, LaunchError, OSError):
            valid = False
        if not valid:
            text = content.decode("utf-8", "replace")[:QUOTED_CHARS]
            self._end(f"it said what nobody had asked for: {text!r}")

    def _handle(self, packet: dict[str, Any], pid: int) -> bool:
        """Handle a packet; return False if it is not valid now. Raises LaunchError, OSError."""
        if packet == {"parked": True} and self.pid < 0:
            self.pidfd = self._admit(pid)
            self.pid = pid
            self._loop.add_reader(self.pidfd, self._on_end)
            self._suspended.set()
            return True
        number = packet.get("alive", packet.get("ended"))
        if type(number) is not int or (request := self._requests.get(number)) is None:
            return False
        alive = packet.keys() == {"alive", "closed"}
        if alive and not request.answered.is_set() and pid != self.pid:
            request.found = pid, self._admit(pid)
            request.closed = packet["closed"]
            request.answered.set()
            return True
        status = packet.get("status")
        if packet.keys() == {"ended", "status"} and is_end(status) and pid == self.pid:
            del self._requests[number]
            request.ended = True
            request.answered.set()
            request.on_end(status)
            return True
        return False

    def _on_end(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self._end(ENDED)

    def _end(self, reason: str) -> None:
        """End the checkpoint; call `on_gone` unless the server has ended it."""
        by_itself = not self._ended_here
        self.refuse(reason)
        if by_itself and self.pid >= 0:
            self.died = reason == ENDED
            self._on_gone(self)


def is_end(status: object) -> TypeGuard[int]:
    """Return True if `status` is the wait status (wait(2)) of a process that has ended."""
    if type(status) is not int or not 0 <= status <= MOST_STATUS:
        return False
    with suppress(ValueError):  # raised for a process that is only stopped
        os.waitstatus_to_exitcode(status)
        return True
    return False


def _kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
