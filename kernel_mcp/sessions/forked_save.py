"""The server's side of dumps that a forked child of the kernel writes while cells go on.

The child is hostile. Its report is bounded and checked. The dump itself is bounded and stored, but
never parsed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.errors import HibernationError, LaunchError
from kernel_mcp.launch import silence
from kernel_mcp.launch.base import take_no_descriptors
from kernel_mcp.linux.pipes import Checksum, from_socket
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.snapshot import EXTRA_BYTES, MAX_NAME_CHARS, MAX_NAMES, Dump
from kernel_mcp.units import MIB

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

SECONDS = 60.0
"""Processor seconds that the child may use for all variables."""
PATIENCE_S = 300.0
"""Wall-clock bound of the whole save in seconds, for a busy machine."""
FORK_S = 5.0
"""Processor seconds that the kernel may use for the fork, which takes 7 ms for 6 GB of memory."""
READ_BYTES = 1 * MIB
REPORT_BYTES = 4 * MIB
_BLOCK = struct.Struct("<cQ")
_CREDENTIALS = struct.Struct("3i")
_CLOSED = "the process that stored them ended too early"


class UnfitToFork(HibernationError):
    """Raised if the kernel must not be forked; the text is the reason."""


class ForkedSave:
    """A child of a kernel that writes its variables. Leaving the block kills the child.

    `begin` requires an idle kernel, `finish` does not.
    """

    def __init__(self) -> None:
        self._host, self._guest = socket.socketpair()
        self._child = -1
        self._spared = {os.getpid()}
        self._kept = bytearray()
        self.last = ""
        """The variable that the child is writing; empty once it has written all."""
        self.cpu_s = 0.0
        """Processor seconds that the child reports, at most `SECONDS`."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._host.setblocking(False)
            self._host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            take_no_descriptors(self._host)
            undo.pop_all()

    def __enter__(self) -> ForkedSave:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child, and close every descriptor."""
        self._host.close()
        self._guest.close()
        if self._child >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._child, signal.SIGKILL)
            os.close(self._child)
            self._child = -1

    async def begin(
        self,
        kernel: Kernel,
        *,
        max_bytes: int,
        whole: bool = False,
        hurry: bool = False,
        leave: Iterable[str] = (),
    ) -> None:
        """Fork the child, which leaves out the names in `leave`.

        With `whole` it writes all variables or nothing. Without `hurry` it has the lowest priority.
        Raises UnfitToFork, HibernationError.
        """
        if kernel.snapshots is not None:
            raise UnfitToFork("only this server's own Python kernels are forked")
        self._spared.add(kernel.handle.pid)
        content = {
            "max_bytes": max_bytes,
            "seconds": SECONDS,
            "leave": sorted(leave),
            "whole": whole,
            "hurry": hurry,
        }
        try:
            kind = "kernel_mcp_save_request"
            with kernel.asking("shell", kind, content, given=self._guest.fileno()) as answer:
                self._guest.close()
                why = await silence.await_answer(answer.done, lambda: [kernel.handle.pid], FORK_S)
        except LaunchError as error:
            raise HibernationError("its kernel took no requests") from error
        if kernel.exit is not None:
            raise HibernationError(f"its kernel ended meanwhile ({kernel.exit.describe()})")
        if answer.message is None:
            raise HibernationError(f"no process could be forked: {why or 'its kernel has ended'}")
        reply = answer.message.content
        if reply.get("status") != "ok":
            reason = one_line(str(reply.get("reason", "no reason given")), 200)
            raise UnfitToFork(f"no process could be forked: {reason}")
        if unfit := reply.get("unfit"):
            raise UnfitToFork(one_line(str(unfit), 200))

    async def finish(self, path: Path, *, max_bytes: int) -> Dump:
        """Receive the dump from the child into the file `path`, sync it to disk, and return it.

        Raises HibernationError for a fault of the child, OSError for one of the disk.
        """
        with anyio.move_on_after(PATIENCE_S):
            report = await self._report()
            size = report.get("size")
            if not isinstance(size, int) or not 0 < size <= max_bytes + EXTRA_BYTES:
                raise HibernationError("its kernel said something impossible about its variables")
            dump = Dump.of(path, size, report)
            if await self._head() != (b"d", size):
                raise HibernationError("its kernel sent something else than it had announced")
            return replace(dump, checksum=await self._store(path, size))
        raise HibernationError(f"it was not done within {PATIENCE_S:g} s")

    async def _report(self) -> Mapping[str, Any]:
        """Read the names of variables in progress, then the report before the dump; return that."""
        names = 0
        while True:
            tag, size = await self._head()
            if tag == b"n" and size <= 4 * MAX_NAME_CHARS and names <= MAX_NAMES:
                names += 1
                self.last = one_line((await self._exactly(size)).decode("utf-8", "replace"))
                continue
            if tag != b"r" or size > REPORT_BYTES:
                raise HibernationError("its kernel sent something else than it had announced")
            text = await self._exactly(size)
            try:
                report = await anyio.to_thread.run_sync(json.loads, text)
            except (ValueError, RecursionError):
                report = None
            if not isinstance(report, dict):
                raise HibernationError("its kernel named its variables in an impossible way")
            self.last, self.cpu_s = "", _seconds(report.get("cpu_s"))
            if report.get("status") != "ok":
                raise HibernationError(one_line(str(report.get("reason")), 200))
            return report

    async def _store(self, path: Path, size: int) -> str:
        """Receive the dump into a file, and return its checksum.

        Raises HibernationError, OSError.
        """
        passed = Checksum()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            first = bytes(memoryview(self._kept)[:size])
            self._kept.clear()
            await anyio.to_thread.run_sync(_write, file.fileno(), first, passed)
            left = size - len(first)
            if await from_socket(self._host, file.fileno(), left, passed) < left:
                raise HibernationError(_CLOSED)
            await anyio.to_thread.run_sync(os.fsync, file.fileno())
        return str(passed)

    async def _head(self) -> tuple[bytes, int]:
        tag, size = _BLOCK.unpack(await self._exactly(_BLOCK.size))
        return tag, size

    async def _exactly(self, size: int) -> bytes:
        while len(self._kept) < size:
            await self._receive()
        found = bytes(memoryview(self._kept)[:size])
        del self._kept[:size]
        return found

    async def _receive(self) -> None:
        """Receive data into the buffer. Raises HibernationError at the end of the stream."""
        while True:
            await anyio.wait_readable(self._host)
            try:
                data, facts, _, _ = self._host.recvmsg(
                    READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                continue
            except OSError:
                data, facts = b"", []
            break
        if not data:
            raise HibernationError(_CLOSED)
        if self._child < 0:
            self._know(facts)
        self._kept += data

    def _know(self, facts: Iterable[tuple[int, int, bytes]]) -> None:
        """Open a pidfd of the child, and make the child the first choice of the OOM killer.

        Its pid comes from the SCM_CREDENTIALS that Linux attaches to the message.
        """
        for level, kind, said in facts:
            pid = 0
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _CREDENTIALS.unpack(said)[0]
            if pid > 0 and pid not in self._spared:
                with contextlib.suppress(OSError):
                    self._child = os.pidfd_open(pid)
                    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _write(descriptor: int, data: bytes, passed: Checksum) -> None:
    passed.add(data)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _seconds(said: object) -> float:
    return max(0.0, min(float(said), SECONDS)) if isinstance(said, (int, float)) else 0.0


BYTES_PER_S = 10 * MIB
"""Maximum average bytes per second that saves of one session write."""
CPU_SHARE = 20
"""Saves of one session use at most 1 / `CPU_SHARE` of a processor on average."""


def pause_after(size: int, cpu_s: float) -> float:
    """Return the minimum seconds between the start of a save and that of the next one.

    The save has written `size` bytes in `cpu_s` seconds of processor time.
    """
    return max(CPU_SHARE * cpu_s, size / BYTES_PER_S)
