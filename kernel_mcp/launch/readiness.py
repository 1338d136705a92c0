"""A starting kernel: its readiness message, its last output, and what /proc shows of it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import BoundaryBroken, LaunchError
from kernel_mcp.launch.base import hold_little, take_no_descriptors
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.proc import parent_of
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.confinement import ObservedConfinement, observe, violations
from kernel_mcp.sandbox.mounts import PROC, fixed

BUDGET_BYTES = 1024 * 1024
PAUSE_S = 0.05
"""Pause in seconds after each `BUDGET_BYTES`: a flood blocks its writer, not the server."""
KEPT_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
DRAIN_READS = 16
"""Maximum number of reads at the end of a process: by default a pipe holds at most 1 MiB."""


class StderrTail:
    """The last 16 KiB that a process wrote to a pipe, read on the event loop.

    Owns the descriptor.
    """

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._kept = bytearray()
        self.heard: Callable[[bytes], object] = bytes
        """Callback for output as it is read."""
        os.set_blocking(fd, False)
        self._budget = BUDGET_BYTES
        self._pause: asyncio.TimerHandle | None = None
        loop.add_reader(fd, self._on_readable)

    def text(self) -> str:
        """Return the kept output, without control characters except newlines and tabs."""
        text = self._kept.decode("utf-8", "replace")
        return "".join(char for char in text if char.isprintable() or char in "\n\t")

    def drain(self) -> None:
        """Read everything that the pipe holds now."""
        for _ in range(DRAIN_READS):
            if not self._read():
                break

    def forget(self) -> None:
        """Discard the kept output, which is that of an earlier kernel."""
        self._kept.clear()

    def close(self) -> None:
        """Stop reading and close the descriptor."""
        if self._pause is not None:
            self._pause.cancel()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _on_readable(self) -> None:
        more = False
        with Barrier("reading what a process writes") as barrier:
            more = self._read()
        if self._fd >= 0 and (barrier.failure is not None or (more and self._budget <= 0)):
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._budget = BUDGET_BYTES
        self._loop.add_reader(self._fd, self._on_readable)

    def _read(self) -> bool:
        """Read once; return False if no more data is available now."""
        if self._fd < 0:
            return False
        try:
            piece = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
            return False
        self._budget -= len(piece)
        self._kept += piece
        self.heard(piece)
        del self._kept[:-KEPT_BYTES]
        return True


logger = logging.getLogger(__name__)

ENDED = "the kernel ended right after it had become ready"


@dataclass(frozen=True, slots=True)
class WritableMounts:
    """Mount points that kernels may write to besides their own files, as in /proc/PID/mountinfo.

    paths    single mounts
    folders  mounted folders; entries in them may be mount points as well
    fixed    returns the paths in these folders that are read-only now
    """

    paths: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()
    fixed: Callable[[], frozenset[str]] = frozenset


NO_MOUNTS = WritableMounts()
UNPROMISED = ("nothing was promised, and nothing was looked at",)


@dataclass(frozen=True, slots=True)
class Inspection:
    """Result of a passed inspection, as readable `words`.

    Call `forget` once the kernel has ended.
    """

    words: tuple[str, ...]
    forget: Callable[[], None]


class Inspector:
    """Compares kernels with their expected confinement, the server and one another.

    All launchers of a server share one instance.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._server = observe(os.getpid())
        self._inspected: dict[int, tuple[int, ObservedConfinement]] = {}
        """Process id and observed facts of each inspected kernel, by pidfd."""

    def inspect(
        self,
        pid: int,
        pidfd: int,
        identity: Identity | None,
        *,
        forked: bool = False,
        others: Collection[str] = (),
        ceilings: Mapping[str, int] | None = None,
        opened: WritableMounts = NO_MOUNTS,
        kin: Iterable[int] = (),
    ) -> Inspection:
        """Check the confinement of a ready kernel in /proc, before it runs any code; takes 0.3 ms.

        It may share no namespace with `others`, the server or a kernel that is not forgotten yet,
        except kernels with a pidfd in `kin`. `ceilings` are upper bounds of its resource limits,
        `opened` is what it may write to besides its own files. `pidfd` must stay open until
        `forget`. Raises BoundaryBroken for a violation, LaunchError if the kernel has ended.
        """
        expected = self._sandbox.expected_confinement(identity, forked=forked)
        if expected is None:
            return Inspection(UNPROMISED, _nothing)
        if expected.writable is not None:
            closed = fixed() if PROC in opened.paths else ()
            expected = replace(
                expected,
                writable=expected.writable | opened.paths | opened.folders,
                parts_of=opened.folders,
                fixed=opened.fixed(),
                covered=(*expected.covered, *closed),
            )
        try:
            found = observe(pid, pidfd)
        except ProcessLookupError:
            raise LaunchError(ENDED) from None
        except PermissionError as reason:
            raise BoundaryBroken(
                f"the kernel was ended before it ran any code: the server may not look at it "
                f"({reason}), so that nobody can tell whether its sandbox holds. Give the server "
                "CAP_SYS_PTRACE (for containers: --cap-add SYS_PTRACE), or run it as an ordinary "
                "user."
            ) from reason
        taken = set(found.alone(expected).values())
        problems = violations(
            expected,
            found,
            self._server,
            {*others, *self._namespaces_of_others(taken, set(kin))},
            ceilings,
        )
        if problems:
            way = "forked from its template" if forked else "started"
            text = (
                f"a kernel that was {way} in the {self._sandbox.name} sandbox was ended before it "
                f"ran any code, because that does not hold: {'; '.join(problems)} (see "
                "`kernel-mcp doctor`)"
            )
            logger.error("%s", text)
            raise BoundaryBroken(text)
        self._inspected[pidfd] = (pid, found)
        own = " ".join(kind for kind in expected.namespaces if kind in found.namespaces)
        places = [] if expected.writable is None else [f"writable: {' '.join(found.writable)}"]
        spaces = [f"namespaces of its own: {own}"] if own else []
        return Inspection((*found.words(), *places, *spaces), lambda: self._forget(pidfd))

    def lineage(self, pid: int) -> frozenset[str]:
        """Return the namespaces of the processes between a template's kernel and the server.

        Any of these may end meanwhile, as a stage of a template does. Raises LaunchError if the
        kernel has ended, and PermissionError.
        """
        found: set[str] = set()
        child = pid
        while True:
            try:
                parent = parent_of(child)
            except ProcessLookupError:
                if child == pid:
                    raise LaunchError(ENDED) from None
                child = pid  # its parent has ended: begin again
                continue
            if parent <= 1 or parent == os.getpid():
                return frozenset(found)
            with suppress(ProcessLookupError):  # it is ending, and has no namespaces any more
                found.update(observe(parent).held)
            child = parent

    def _namespaces_of_others(self, taken: set[str], kin: set[int]) -> set[str]:
        """Return namespaces and mounts of living kernels, except `kin`, that share any of `taken`.

        They are read again from /proc, as Linux reuses their numbers.
        """
        held: set[str] = set()
        for pidfd, (pid, facts) in list(self._inspected.items()):
            if pidfd not in kin and not taken.isdisjoint(facts.held):
                try:
                    held.update(observe(pid, pidfd).held)
                except OSError:
                    continue  # the kernel has ended, and its namespaces with it
        return held

    def _forget(self, pidfd: int) -> None:
        self._inspected.pop(pidfd, None)


def _nothing() -> None:
    """Do nothing: the kernel was not inspected."""


_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid, as the receiver's namespaces number them."""
MESSAGE_BYTES = 64 * 1024


class ReadinessChannel:
    """A socket pair with SO_PASSCRED: Linux adds the sender's pid in the server's namespace."""

    def __init__(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        self._host, guest = socket.socketpair(socket.AF_UNIX, kind)
        self._host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        take_no_descriptors(self._host)
        self._host.setblocking(False)
        self._guest: socket.socket | None = guest
        self.message: dict[str, Any] = {}
        """The readiness message."""

    def pass_guest(self) -> int:
        """Return the process's end, which can be passed once; the caller closes it afterwards."""
        assert self._guest is not None
        guest, self._guest = self._guest, None
        return guest.detach()

    def give(self, fds: Sequence[int]) -> None:
        """Send descriptors to the process, and close them on this side."""
        try:
            socket.send_fds(self._host, [b"sockets"], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def control_socket(self) -> socket.socket:
        """Return a duplicate of the host's end, for sending only; `close` does not close it."""
        line = self._host.dup()
        line.shutdown(socket.SHUT_RD)
        hold_little(line)
        return line

    async def wait(self) -> int:
        """Wait until the kernel is ready; return its pid on the host.

        Raises LaunchError if the kernel fails or closes the channel.
        """
        await anyio.wait_readable(self._host)
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            packet, extra, _, _ = self._host.recvmsg(MESSAGE_BYTES, space)
        except ConnectionResetError:
            packet, extra = b"", []
        if not packet:
            raise LaunchError("the kernel ended before it was ready")
        message = _parse(packet)
        if message.get("ready") is not True:
            raise LaunchError(f"the kernel could not start: {str(message.get('error'))[:2000]}")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.message = message
                return int(_CREDENTIALS.unpack(data)[0])
        raise LaunchError("the kernel's readiness came without credentials")

    def close(self) -> None:
        """Close the host's end, and the process's if it was not passed on."""
        self._host.close()
        if self._guest is not None:
            self._guest.close()


def _parse(packet: bytes) -> dict[str, Any]:
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) else {"error": "its readiness message is not JSON"}
