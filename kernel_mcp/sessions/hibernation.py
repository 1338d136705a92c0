"""A session's sleep: its variables put aside, proven to come back, and brought back.

A dump counts only after a fresh kernel has loaded it while the old kernel still lives. Where
nothing forces a kernel out it stays when a variable would be lost. Where something does, a variable
that cannot be written or read is left out with a reason, and never costs the others.

What is lost is told twice: in the words of a notice, and as data, `Waking.lost`, which maps each
name to a reason and goes into the result of the next cell.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.config.values import MIB
from kernel_mcp.errors import HibernationError
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.snapshot import Dump, Loaded, give, hand_over, load, take

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

DUMP_NAME = "variables.dump"
MAKE_ROOM = "to make room for another session"
ROUNDS = 4
"""Dumps that are tried, each without what the trial of the one before has shown to do harm."""
TRIALS = 24
"""Kernels that may be started, and lost, to find out which variables do harm."""
APART_BYTES = 64 * MIB
"""Room for variables taken apart, which multiplies what they share; larger ones show together."""
SEARCH_S = 600.0
"""How long finding them may take; a machine may be busy."""
LISTED_CHARS = 8000
"""Names in one notice; the rest is counted."""
MAX_RESULTS = 5
"""Results of cells that are named one by one."""
START_ANEW = (
    "Threads, caches, environment variables, the current folder, library settings and the state of "
    "imported modules start anew"
)
ENDED_WITH_KERNEL = "a file in a folder that ends with its kernel; files in the workspace stay"
_RESULT = re.compile(r"Out\[\d+\]")


@dataclass(frozen=True, slots=True)
class Sleep:
    """What a hibernated session is instead of having a kernel. `idle_s` and `since` in seconds.

    `dump` is None where there was nothing to save, or nothing could be saved: `failure` says why.
    `lost` maps the names of variables that will not come back to reasons. `copies` names arrays
    that shared memory with another object and will not. `files` ended with the kernel.
    """

    since: float
    idle_s: float
    purpose: str = ""
    dump: Dump | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    copies: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def gone(self) -> dict[str, str]:
        """Names of variables and paths of files that will not come back, with reasons."""
        return {**self.lost, **dict.fromkeys(self.files, ENDED_WITH_KERNEL)}

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.dump.size if self.dump is not None else 0

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        """Descriptions of the variables that will come back."""
        described = self.dump.variables if self.dump is not None else ()
        return [item for item in described if item["name"] not in self.lost]

    def remark(self) -> str:
        """How things stand while the session sleeps."""
        text = "This session is hibernated: its next cell brings these variables back."
        if self.failure:
            text = f"This session is hibernated without its variables: {self.failure}."
        if self.lost:
            text += f" Not back: {reasons(self.lost)}."
        if self.files:
            text += f" Files that ended with its kernel: {listing(self.files)}."
        return text

    def began(self) -> str:
        """The start of every notice."""
        purpose = f" {self.purpose}" if self.purpose else ""
        return f"This session had been hibernated after {duration(self.idle_s)} idle{purpose}"


@dataclass(frozen=True, slots=True)
class Waking:
    """How a session came back.

    `notice` is for the answer of its first cell, empty when there had been nothing to save;
    `loss` says in short what is gone, None when nothing is. `back` names variables, and `lost`
    maps the names of lost variables and the paths of lost files to reasons: all of them, while the
    notice is cut. It is empty where even the names are lost. `restored` says whether the kernel
    holds what an earlier one had made.
    """

    notice: str = ""
    loss: str | None = None
    back: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    restored: bool = False


class Hibernation:
    """One session's way to sleep and back; holds at most one dump, in `folder`.

    `start` starts a kernel beside the one that lives.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int, start: Callable[[], Awaitable[Kernel]]
    ) -> None:
        self.sleep: Sleep | None = None
        self._path = folder / DUMP_NAME
        self._max_bytes = max_bytes
        self._start = start

    async def prepare(self, kernel: Kernel | None, sleep: Sleep, *, forced: bool) -> Sleep:
        """Save the variables of `kernel`, which goes on living; `sleep` with what came of it.

        Raises HibernationError when something would be lost and nothing is `forced`, KernelMcpError
        or OSError when it is not the kernel's fault that nothing was saved.
        """
        if kernel is None:
            return sleep
        try:
            saved = await (self._save_most(kernel) if forced else self._save_all(kernel))
        except HibernationError as error:
            await self._remove()
            if not forced:
                raise
            return replace(sleep, failure=str(error))
        except BaseException:
            await self._remove()
            raise
        if not saved.dump.stored:
            await self._remove()
        return replace(
            sleep,
            dump=saved.dump if saved.dump.stored else None,
            lost=saved.lost,
            copies=saved.dump.copies,
            files=saved.files,
        )

    async def bring_back(self, kernel: Kernel) -> Waking:
        """Load what was saved into `kernel`. Raises HibernationError when that kernel is lost."""
        sleep = self.sleep
        if sleep is None:
            return Waking()
        if sleep.dump is None:
            return nothing_back(sleep, sleep.failure)
        try:
            loaded = await give(kernel, sleep.dump)
        except OSError as error:
            return nothing_back(sleep, f"they cannot be read from disk: {error.strerror}")
        return came_back(sleep, loaded.names, unread(loaded))

    async def end(self) -> None:
        """Forget the sleep and what it had saved."""
        self.sleep = None
        await self._remove()

    async def _save_all(self, kernel: Kernel) -> _Saved:
        """A dump of everything. Raises HibernationError when something would be lost."""
        dump = await self._take(kernel)
        loaded = None if dump.lost else await self._try(dump)
        lost = dump.lost if loaded is None else unread(loaded)
        if loaded is None or lost:
            raise HibernationError(f"{len(lost)} of its variables would be lost")
        return _Saved(dump, {}, loaded.missing)

    async def _save_most(self, kernel: Kernel) -> _Saved:
        """A dump of all that comes back, and what is not in it."""
        lost: dict[str, str] = {}
        search = _Search(self._start)
        for _ in range(ROUNDS):
            dump = await self._take(kernel, lost)
            lost |= dump.lost
            try:
                loaded = await self._try(dump)
            except HibernationError as error:
                failure = str(error)
            else:
                if not loaded.lost:
                    return _Saved(dump, lost, loaded.missing)
                failure = ""
            # Apart a variable costs only itself. What does harm only with others shows together.
            harm = await search.through(await self._take(kernel, lost, shared=False))
            if not harm:
                harm = await search.through(await self._take(kernel, lost), together=True)
            lost |= harm
        raise HibernationError(failure or "they could not be read back together")

    async def _take(
        self, kernel: Kernel, leave: Iterable[str] = (), *, shared: bool = True
    ) -> Dump:
        size = self._max_bytes if shared else min(self._max_bytes, APART_BYTES)
        return await take(kernel, self._path, max_bytes=size, shared=shared, leave=leave)

    async def _try(self, dump: Dump) -> Loaded:
        """Load a dump in a fresh kernel. Raises HibernationError when that kernel is lost."""
        async with _beside(self._start) as trial:
            try:
                return await give(trial, dump)
            except HibernationError as error:
                raise HibernationError(
                    f"they could not be read back in a trial: {error}"
                ) from error

    async def _remove(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self._path.unlink(missing_ok=True))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A dump that comes back whole, what is not in it, and the files that end with the kernel."""

    dump: Dump
    lost: Mapping[str, str]
    files: tuple[str, ...]


class _Search:
    """Finds the variables of a dump that cannot be read or end the kernel that reads them.

    They are loaded one by one; when a kernel is lost the next one goes on behind the guilty one.
    """

    def __init__(self, start: Callable[[], Awaitable[Kernel]]) -> None:
        self._start = start
        self._trials = TRIALS
        self._end = anyio.current_time() + SEARCH_S

    async def through(self, dump: Dump, *, together: bool = False) -> dict[str, str]:
        """Which of the variables do harm, with reasons; the first one where they are `together`.

        Names that no trial has come to are among them. Raises KernelMcpError, OSError.
        """
        harm: dict[str, str] = {}
        good: list[str] = []
        left = list(dump.stored)
        while left and self._trials and anyio.current_time() < self._end:
            self._trials -= 1
            await self._trial(dump, good, left, harm)
            if together and harm:
                return harm
        return harm | dict.fromkeys(left, "could not be tried: others had ended too many trials")

    async def _trial(
        self, dump: Dump, good: list[str], left: list[str], harm: dict[str, str]
    ) -> None:
        """Load what is `good` and go on with what is `left`, until a variable ends the kernel."""
        async with _beside(self._start) as trial:
            await hand_over(trial, dump)
            name = good[-1] if good else ""
            try:
                if good:
                    await load(trial, dump, count=len(good), leave=harm)
                while left:
                    name = left.pop(0)
                    good.append(name)
                    loaded = await load(trial, dump, count=1, leave=harm)
                    if loaded.lost:
                        good.remove(name)
                        harm |= loaded.lost
                    if loaded.behind:
                        return
            except HibernationError as error:
                good.remove(name)
                harm[name] = f"ended the trial of reading it: {error}"


@asynccontextmanager
async def _beside(start: Callable[[], Awaitable[Kernel]]) -> AsyncIterator[Kernel]:
    """A kernel that is thrown away afterwards."""
    kernel = await start()
    try:
        yield kernel
    finally:
        with anyio.CancelScope(shield=True):
            await kernel.aclose()


def unread(loaded: Loaded) -> dict[str, str]:
    """What was in a dump and has not come out of it, with reasons."""
    behind = dict.fromkeys(loaded.behind, "was stored behind one that could not be read")
    return {**loaded.lost, **behind}


def came_back(sleep: Sleep, names: Sequence[str], failed: Mapping[str, str]) -> Waking:
    """A notice that says exactly what is there again and what is not.

    `failed` maps names that could not be read now to reasons.
    """
    parts = [sleep.began()]
    lost = {**sleep.lost, **failed}
    if names:
        parts.append(f"Back: {listing(names)} ({len(names)})")
    if lost:
        parts.append(
            f"Not back: {reasons(lost)}: create {'it' if len(lost) == 1 else 'them'} again"
        )
    if sleep.copies:
        parts.append(f"Copies now, that shared memory with another object: {listing(sleep.copies)}")
    if sleep.files:
        parts.append(
            f"Files that ended with the kernel, unlike those in the workspace: "
            f"{listing(sleep.files)} ({len(sleep.files)})"
        )
    parts.append(START_ANEW)
    gone = {**sleep.gone, **failed}
    loss = f"hibernation could not keep {listing(gone)}" if gone else None
    return Waking(". ".join(parts), loss, tuple(names), gone, restored=sleep.dump is not None)


def nothing_back(sleep: Sleep, failure: str) -> Waking:
    """A notice for a session whose variables are lost, or that had none."""
    if failure:
        text = f"{sleep.began()}, but its variables could not be saved: {failure}. All variables"
        saved = sleep.dump.names if sleep.dump is not None else ()
        return Waking(
            f"{text} of earlier cells are lost, files in the workspace are kept",
            f"the session was hibernated, and {failure}",
            lost={**dict.fromkeys(saved, failure), **sleep.gone},
        )
    return came_back(sleep, (), {}) if sleep.gone else Waking()


def duration(seconds: float) -> str:
    """A time in words: `40 s`, `12 min`, `1 h`, `1 h 30 min`, `3 days`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{minutes // (24 * 60)} days"


def listing(names: Iterable[str]) -> str:
    """Names with commas, counted from where they become too long."""
    return _joined([one_line(name) for name in names])


def reasons(lost: Mapping[str, str]) -> str:
    """Names with reasons in brackets; many results of cells count as one."""
    results = [name for name in lost if _RESULT.fullmatch(name)]
    if len(results) > MAX_RESULTS:
        short = ", ".join([*results[:MAX_RESULTS], "…"])
        lost = {**{k: v for k, v in lost.items() if k not in results}, short: lost[results[0]]}
    return _joined([f"{one_line(name)} ({one_line(reason)})" for name, reason in lost.items()])


def _joined(items: Sequence[str]) -> str:
    left = LISTED_CHARS
    shown: list[str] = []
    for item in items:
        left -= len(item)
        if left < 0:
            shown.append(f"and {len(items) - len(shown)} more")
            break
        shown.append(item)
    return ", ".join(shown)
