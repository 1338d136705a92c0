"""Dumps of the variables of other languages, passed as a file in the session's workspace.

A dump is hostile data: the server bounds, stores and returns it, but never parses it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.errors import AnswerLate, HibernationError, KernelMcpError, SavedTooLate
from kernel_mcp.kernelspecs.snippets import filled
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.pipes import Checksum
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

PIECE_BYTES = 4 * MIB
EXTRA_BYTES = 32 * MIB
"""Bytes of a dump beyond those of the variables."""
REASON_CHARS = 200
PREFIX = ".kernel-mcp-"
"""Beginning of the names of dumps in a workspace; the server's process id follows."""

Evaluate = Callable[[str, float], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class DumpCode:
    """Code of a language that writes and reads dumps, in which words stand for values.

    write  has FILE, LEAVE (a JSON list of names) and MOST (bytes); prints an object with the fields
           of `sessions.snapshot.Dump`
    read   has FILE and LEAVE; prints an object with `names` and `lost`
    starts_anew  a sentence on what is not in dumps
    """

    write: str
    read: str
    starts_anew: str


class FileSnapshots:
    """The `Snapshots` of one kernel."""

    def __init__(
        self,
        code: DumpCode,
        evaluate: Evaluate,
        limits: KernelLimits,
        workspace: Path,
        seen_at: str,
    ) -> None:
        """The kernel sees the folder `workspace` at the path `seen_at`."""
        self._code = code
        self._limits = limits
        self._evaluate = evaluate
        self._workspace = workspace
        self._seen_at = seen_at

    async def write(
        self, path: Path, *, max_bytes: int, leave: Iterable[str], seconds: float
    ) -> tuple[Mapping[str, Any], int, str]:
        """Write the variables to `path`; return the kernel's description, size and checksum.

        The description is hostile data. Raises HibernationError, OSError.
        """
        if disk := self._limits.limits.disk_bytes:  # the limit of one file
            max_bytes = min(max_bytes, max(0, disk - MIB))
        async with self._exchange(max_bytes + EXTRA_BYTES) as name:
            said = await self._ask(self._code.write, name, leave, seconds, max_bytes)
            size, checksum = await anyio.to_thread.run_sync(
                partial(self._fetch, name, path, max_bytes + EXTRA_BYTES)
            )
        return said, size, checksum

    async def read(self, path: Path, *, leave: Iterable[str], seconds: float) -> Mapping[str, Any]:
        """Load the dump in `path`; return the kernel's description, which is hostile data.

        Raises HibernationError, OSError.
        """
        async with self._exchange(path.stat().st_size) as name:
            await anyio.to_thread.run_sync(self._hand_over, path, name)
            return await self._ask(self._code.read, name, leave, seconds)

    async def _ask(
        self, code: str, name: str, leave: Iterable[str], seconds: float, most: int = 0
    ) -> Mapping[str, Any]:
        names, file = json.dumps(sorted(leave)), f"{self._seen_at}/{name}"
        try:
            said = await self._evaluate(filled(code, file=file, leave=names, most=most), seconds)
        except AnswerLate as error:
            raise SavedTooLate(f"its kernel takes longer than {seconds:g} s for it") from error
        except KernelMcpError as error:
            raise HibernationError(f"its kernel could not do it: {error}") from error
        if not isinstance(said, dict):
            raise HibernationError("its kernel did not answer as expected")
        if reason := said.get("failure"):
            raise HibernationError(one_line(str(reason))[:REASON_CHARS])
        return said

    @asynccontextmanager
    async def _exchange(self, size: int) -> AsyncIterator[str]:
        """Yield the name of a file of `size` bytes in the workspace, which is removed afterwards.

        Those of servers that were killed are removed, too.
        """
        mine = f"{PREFIX}{os.getpid()}-"
        async with self._limits.holding(size):
            for left in self._workspace.glob(f"{PREFIX}*"):
                if not left.name.startswith(mine):
                    left.unlink(missing_ok=True)
            name = f"{mine}{secrets.token_hex(8)}"
            try:
                yield name
            finally:
                (self._workspace / name).unlink(missing_ok=True)

    def _fetch(self, name: str, path: Path, most: int) -> tuple[int, str]:
        """Copy the file of a kernel to `path`. Blocking. Raises HibernationError, OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        passed, size = Checksum(), 0
        with open(os.open(self._workspace / name, flags), "rb", buffering=0) as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise HibernationError("its kernel wrote no file")
            with open(_created(path), "wb") as target:
                while piece := source.read(PIECE_BYTES):
                    size += len(piece)
                    if size > most:
                        raise HibernationError("its kernel wrote more than was permitted")
                    passed.add(piece)
                    target.write(piece)
        return size, str(passed)

    def _hand_over(self, path: Path, name: str) -> None:
        """Copy `path` to a file that the kernel may read. Blocking. Raises OSError."""
        owner = self._workspace.stat()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            open(os.open(path, flags), "rb", buffering=0) as source,
            open(_created(self._workspace / name), "wb") as target,
        ):
            if owner.st_uid != os.geteuid():
                os.fchown(target.fileno(), owner.st_uid, owner.st_gid)
            while piece := source.read(PIECE_BYTES):
                target.write(piece)


def _created(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
