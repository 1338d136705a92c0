"""Saves of a kernel's variables, written by a forked child of the kernel or by the kernel itself.

A child costs the kernel only the fork, and its crash does not affect the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.errors import HibernationError, SavedTooLate
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.forked_save import PATIENCE_S, ForkedSave
from kernel_mcp.sessions.snapshot import SECONDS, Dump, take

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.session_save import SessionSave

TOO_LARGE = "too large"
"""Prefix of the reason why a value was left out for lack of room."""
ATTEMPTS = 24
"""Maximum number of children in one save, each without the variable that crashed the last one."""
HERE_S = 2.0
"""Processor seconds for the save of a kernel that must not be forked. They double after each
attempt that had no time for a variable of the former save, up to `snapshot.SECONDS`."""
LATE = ("took longer than ", "there was no time left")
"""Prefixes of the reasons why a value was left out for lack of time."""
NOTHING: Mapping[str, str] = MappingProxyType({})

Turn = Callable[[], AbstractAsyncContextManager[bool]]
"""A block in which the kernel runs no cell; it yields True if the kernel may be saved now."""


async def write_forked(
    kernel: Kernel,
    session_save: SessionSave,
    turn: Turn,
    *,
    max_bytes: int,
    whole: bool = False,
    hurry: bool = False,
    attempts: int = ATTEMPTS,
    leave: Mapping[str, str] = NOTHING,
) -> tuple[Dump, float] | None:
    """Write a kernel's variables by forked children; return None if it may not be saved now.

    Names in `leave`, which maps them to reasons, count as lost. With `whole` all variables are
    written, or none. Without `hurry` the children have the lowest priority. The second value is the
    processor time of the last child in seconds. Raises UnfitToFork, HibernationError, OSError.
    """
    left = dict(leave)
    failure = HibernationError("nothing was tried")
    until = anyio.current_time() + PATIENCE_S
    for _ in range(attempts):
        with ForkedSave() as saving:
            async with turn() as free:
                if not free:
                    return None
                path = session_save.new_dump_path(kernel)
                await saving.begin(
                    kernel, max_bytes=max_bytes, whole=whole, hurry=hurry, leave=left
                )
            try:
                dump = await saving.finish(path, max_bytes=max_bytes)
                return replace(dump, lost={**dump.lost, **left}), saving.cpu_s
            except HibernationError as error:
                if not saving.last:
                    raise
                left[saving.last] = f"ended the process that stored it: {error}"
                failure = error
        if anyio.current_time() > until:
            break
    raise failure


async def write_here(
    kernel: Kernel,
    session_save: SessionSave,
    *,
    max_bytes: int,
    whole: bool = False,
    seconds: float = 0.0,
    leave: Mapping[str, str] = NOTHING,
) -> tuple[Dump, float]:
    """Write a kernel's variables in the kernel itself, while no cell runs; see `write_forked`.

    It may use `seconds` of processor time; 0 stands for `snapshot.SECONDS`. Raises
    HibernationError, OSError.
    """
    before, began = kernel.handle.usage().cpu_s, anyio.current_time()
    path = session_save.new_dump_path(kernel)
    try:
        dump = await take(kernel, path, max_bytes=max_bytes, seconds=seconds, leave=leave)
    except SavedTooLate:
        session_save.late += 1
        raise
    late = session_save.saved_names(name for name, why in dump.lost.items() if why.startswith(LATE))
    if late and 0 < seconds < SECONDS:
        session_save.late += 1
        raise HibernationError(
            f"{seconds:g} s of processor time were not enough for {one_line(late[0])}, which was "
            "saved before"
        )
    session_save.late = 0
    if whole and any(why.startswith(TOO_LARGE) for why in dump.lost.values()):
        raise HibernationError(TOO_LARGE)
    used = kernel.handle.usage().cpu_s - before  # includes other threads
    cpu_s = min(used, anyio.current_time() - began)
    return replace(dump, lost={**dump.lost, **leave}), cpu_s
