"""Hibernation: a session's variables saved to a file, and loaded again as after a restart.

A fresh kernel loads a dump while the old kernel still lives. Unless it is forced, hibernation fails
when a variable would be lost. Forced, it leaves out each variable that cannot be written or read,
with a reason; waking leaves out those that end the kernel which reads them. The others come back.

A loss is reported twice: as text in a notice, and as data in the result of the next cell
(`Waking.lost`, name to reason).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import anyio

from kernel_mcp.errors import HibernationError
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.snapshot import (
    UNREADABLE,
    Dump,
    Loaded,
    UnsavableError,
    damage,
    give,
    handed_over,
    load,
    take,
)

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

DUMP_NAME = "variables.dump"
MAKE_ROOM = "to make room for another session"
ROUNDS = 4
"""Dumps that are tried, each without the variables that failed in the trial before."""
TRIALS = 24
"""Kernels that may be started, and lost, to find the variables that end them."""
BEHIND = "shares objects with one that ended the kernel"
UNTRIED = "could not be tried: others had ended too many kernels"
LISTED_CHARS = 8000
"""Characters of names in one notice; the other names are counted."""
TIMES = " \N{MULTIPLICATION SIGN} "
MAX_RESULTS = 5
"""Results of cells (`Out[n]`) that are named one by one."""
START_ANEW = (
    "Threads, caches, environment variables, the current folder, library settings and the state of "
    "imported modules start anew"
)
ENDED_WITH_KERNEL = "a file in a folder that ends with its kernel; files in the workspace stay"
_RESULT = re.compile(r"Out\[\d+\]")
_PLAIN = re.compile(r"[\w/\[\]@+~-][^\s()'\"\\,;:]*|(Out\[\d+\], )+…|[\d,]+ more")
"""Names of variables, of results, of files, and what stands for many."""


Files: TypeAlias = tuple[str, ...]
"""Paths that end with a kernel."""


class Shelf(Protocol):
    """Where the dumps of one session lie; all but `fresh` block. Raises OSError."""

    def fresh(self, kernel: Kernel) -> Path:
        """Where to write what this kernel holds now."""

    def keep(self, sleep: Sleep) -> None:
        """What was written there, and all that is known of it, is what counts now."""

    def used(self) -> None:
        """A kernel has the variables."""

    def drop(self) -> None:
        """The variables are not wanted any more."""


class Scratch:
    """One dump in a folder, which goes with its use."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DUMP_NAME

    def fresh(self, kernel: Kernel) -> Path:
        """See `Shelf`."""
        return self._path

    def keep(self, sleep: Sleep) -> None:
        """See `Shelf`."""

    def used(self) -> None:
        """See `Shelf`."""
        self._path.unlink(missing_ok=True)

    drop = used


@dataclass(frozen=True, slots=True)
class Sleep:
    """The state of a hibernated session. `idle_s` and `since` in seconds.

    `dump` is None when nothing was saved; `failure` is the reason, empty when there was nothing to
    save. `lost` maps names of lost variables to reasons, `changed` those that come back and are not
    as they were. `files` are paths that ended with the kernel. `kept` says when an
    earlier server, or kernel, had saved it, empty for one that was hibernated; `after` tells of
    cells since. `judge` says why a kernel may not load the dump, and what is not as it was.
    """

    since: float
    idle_s: float
    purpose: str = ""
    dump: Dump | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    kept: str = ""
    after: str = ""
    judge: Callable[[Kernel], tuple[str, str]] = lambda _kernel: ("", "")

    @property
    def gone(self) -> dict[str, str]:
        """Names of lost variables and paths of lost files, with reasons."""
        return {**self.lost, **dict.fromkeys(self.files, ENDED_WITH_KERNEL)}

    @property
    def size(self) -> int:
        """Bytes of the dump."""
        return self.dump.size if self.dump is not None else 0

    @property
    def names(self) -> list[str]:
        """Names of the saved variables, in order of definition."""
        names = self.dump.names if self.dump is not None else ()
        return [name for name in names if name not in self.lost]

    @property
    def back(self) -> list[str]:
        """Names of those that come back."""
        return [] if self.failure else self.names

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        """Descriptions of those that come back, as `snapshot.descriptions`."""
        described = self.dump.variables if self.dump is not None and not self.failure else ()
        return [item for item in described if item["name"] not in self.lost]

    def remark(self) -> str:
        """The state as sentences, for answers of a hibernated session."""
        text = "This session is hibernated: its next cell brings these variables back."
        if self.kept:
            names = described(self.back, self.variables)
            text = f"{self.began()}: its next cell brings back {names}."
        if self.failure and self.kept:
            text = f"{self.began()} without its variables: {self.failure}."
        elif self.failure:
            text = f"This session is hibernated without its variables: {self.failure}."
        elif self.kept and not self.back:
            text = f"{self.began()}: it had no variables."
        if self.lost:
            text += f" Not back: {reasons(self.lost)}."
        if self.files:
            text += f" Files that ended with its kernel: {listing(self.files)}."
        return f"{text} {self.after}".rstrip()

    def began(self) -> str:
        """The first words of every notice."""
        if self.kept:
            return f"Continued from {self.kept}"
        purpose = f" {self.purpose}" if self.purpose else ""
        return f"This session had been hibernated after {duration(self.idle_s)} idle{purpose}"


@dataclass(frozen=True, slots=True)
class Waking:
    """What loading brought back.

    `notice` is for the answer of the next cell, empty when there was nothing to save; `loss` is the
    cause of a loss in short. `back` names variables. `lost` maps names of variables and paths of
    files to reasons, uncut, and is empty when the names are lost too. `restored` says whether the
    kernel holds variables of an earlier one.
    """

    notice: str = ""
    loss: str | None = None
    back: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    restored: bool = False


class Hibernation:
    """Saves and loads one session's variables; has at most one dump, on `shelf`.

    `start` starts a second kernel.
    """

    def __init__(
        self, shelf: Shelf, *, max_bytes: int, start: Callable[[], Awaitable[Kernel]]
    ) -> None:
        self.sleep: Sleep | None = None
        self.shelf = shelf
        self._path = Path()
        self._max_bytes = max_bytes
        self._start = start

    async def prepare(self, kernel: Kernel | None, sleep: Sleep, *, forced: bool) -> Sleep:
        """Save the variables of `kernel`, which stays, and return `sleep` with the result.

        Raises HibernationError when something would be lost and it is not `forced`, or nothing can
        be saved of a kernel that is well, KernelMcpError or OSError when the server cannot save.
        """
        if kernel is None:
            return sleep
        self._path = self.shelf.fresh(kernel)
        try:
            dump, lost, files = await self._save(kernel, forced=forced)
        except HibernationError as error:
            await self._remove()
            if not forced or (kernel.exit is None and isinstance(error, UnsavableError)):
                raise
            return replace(sleep, failure=str(error))
        except BaseException:
            await self._remove()
            raise
        if not dump.stored:
            await self._remove()
        sleep = replace(
            sleep,
            dump=dump if dump.stored else None,
            lost=lost,
            changed=dump.changed,
            files=files,
        )
        await anyio.to_thread.run_sync(self.shelf.keep, sleep)
        return sleep

    async def bring_back(
        self, kernel: Kernel, leave: Mapping[str, str] = MappingProxyType({})
    ) -> Waking:
        """Load the dump into `kernel`, but for what to `leave`, with reasons.

        Raises HibernationError when that kernel is lost.
        """
        sleep = self.sleep
        if sleep is None:
            return Waking()
        unfit, changes = sleep.judge(kernel) if sleep.dump is not None else ("", "")
        failure = sleep.failure or unfit
        if sleep.dump is not None and not failure:
            failure = await damage(sleep.dump)
        if sleep.dump is None or failure:
            return nothing_back(sleep, failure)
        try:
            loaded = await give(kernel, sleep.dump, leave)
        except OSError as error:
            return nothing_back(sleep, UNREADABLE.format(error.strerror))
        files = tuple(path for path in sleep.files if path in loaded.missing)
        there = replace(sleep, files=files)
        return came_back(there, loaded.names, {**leave, **unread(loaded)}, changes)

    async def deadly(self) -> dict[str, str]:
        """Return what of the dump ends a kernel that loads it, and what is behind, with reasons.

        What does so twice: once may be the doing of others, as where the machine has no memory.
        After `TRIALS` kernels those that are left count, too. Raises KernelMcpError, OSError.
        """
        dump = self.sleep.dump if self.sleep is not None else None
        failed: dict[str, str] = {}
        if dump is None or not dump.groups:
            raise HibernationError("they end every kernel that reads them")
        suspect: tuple[str, ...] = ()
        for _ in range(TRIALS):
            group: tuple[str, ...] = ()
            left: tuple[str, ...] = ()
            async with aclosing(await self._start()) as trial:
                try:
                    async with handed_over(trial, dump):
                        for group in dump.groups:
                            left = tuple(name for name in group if name not in failed)
                            while left and group == suspect:  # one by one
                                if (await load(trial, dump, count=1, leave=failed)).lost:
                                    break
                                left = left[1:]
                            if left and group != suspect:
                                await load(trial, dump, count=len(left), leave=failed)
                except HibernationError as error:
                    if not group:
                        raise
                    if group == suspect:
                        failed |= dict.fromkeys(left, BEHIND)
                        failed[left[0]] = f"ended the kernel that read it: {error}"
                    suspect = group
                    continue
            return failed
        rest = dump.groups[dump.groups.index(suspect) :]
        untried = [name for group in rest for name in group if name not in failed]
        return failed | dict.fromkeys(untried, UNTRIED)

    async def end(self, *, used: bool = False) -> None:
        """Clear `sleep` and remove the dump, unless it was `used` and lasts."""
        self.sleep = None
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.shelf.used if used else self.shelf.drop)

    async def _save(self, kernel: Kernel, *, forced: bool) -> tuple[Dump, dict[str, str], Files]:
        """Write a dump that a kernel beside can load, and return what is lost, and the files.

        Forced, what cannot be read is left out of the next dump, so that it costs nothing that it
        shares objects with. What ends kernels, and what fails after `ROUNDS`, is left to waking.
        """
        lost: dict[str, str] = {}
        for _ in range(ROUNDS):
            dump = await take(kernel, self._path, max_bytes=self._max_bytes, leave=lost)
            lost |= dump.lost
            files = dump.files
            if forced or not lost:
                try:
                    loaded = await self._try(dump)
                except UnsavableError:
                    if not forced:
                        raise
                    break
                lost |= loaded.lost
                files = loaded.missing
                if not loaded.lost:
                    break
            if not forced:
                raise HibernationError(f"{len(lost)} of its variables would be lost")
        return dump, lost, files

    async def _try(self, dump: Dump) -> Loaded:
        async with aclosing(await self._start()) as trial:
            try:
                return await give(trial, dump)
            except HibernationError as error:
                raise UnsavableError(f"they could not be read back in a trial: {error}") from error

    async def _remove(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self._path.unlink(missing_ok=True))


def unread(loaded: Loaded) -> dict[str, str]:
    """The variables of a dump that were not loaded, with reasons."""
    behind = dict.fromkeys(loaded.behind, "was stored behind one that could not be read")
    return {**loaded.lost, **behind}


def came_back(
    sleep: Sleep, names: Sequence[str], failed: Mapping[str, str], changes: str = ""
) -> Waking:
    """The result for loaded `names`; `failed` maps names that could not be read to reasons.

    `changes` are those of what they were saved in.
    """
    parts = [sleep.began()]
    lost = {**sleep.lost, **failed}
    if sleep.kept:
        parts[0] += f": {described(names, sleep.variables) or 'no variables'}"
    elif names:
        parts.append(f"Back: {listing(names)} ({len(names)})")
    if lost:
        parts.append(
            f"Not back: {reasons(lost)}: create {'it' if len(lost) == 1 else 'them'} again"
        )
    if changed := {name: why for name, why in sleep.changed.items() if name not in lost}:
        parts.append(f"Not as before: {reasons(changed)}")
    if sleep.files:
        parts.append(
            f"Files that ended with the kernel, unlike those in the workspace: "
            f"{listing(sleep.files)} ({len(sleep.files)})"
        )
    if sleep.after:
        parts.append(sleep.after.removesuffix("."))
    if changes:
        parts.append(f"Packages that are not as they were: {changes}")
    parts.append(START_ANEW)
    gone = {**sleep.gone, **failed}
    loss = f"hibernation could not keep {listing(gone)}" if gone else sleep.after or None
    return Waking(". ".join(parts), loss, tuple(names), gone, restored=sleep.dump is not None)


def nothing_back(sleep: Sleep, failure: str) -> Waking:
    """The result for a session that lost all variables, or had none."""
    if failure:
        could = "brought back" if sleep.kept else "saved"
        text = f"{sleep.began()}, but its variables could not be {could}: {failure}. All variables"
        which = f": {listing(sleep.names)}" if sleep.names else ""
        return Waking(
            f"{text} of earlier cells are lost{which}; files in the workspace are kept",
            f"the session was hibernated, and {failure}",
            lost={**dict.fromkeys(sleep.names, failure), **sleep.gone},
        )
    return came_back(sleep, (), {}) if sleep.gone else Waking()


def duration(seconds: float) -> str:
    """Seconds as text: `40 s`, `12 min`, `1 h`, `1 h 30 min`, `3 days`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{minutes // (24 * 60)} days"


def described(names: Iterable[str], variables: Iterable[Mapping[str, Any]]) -> str:
    """Names with the shape of those that have one, as in `df (1.2 M \N{MULTIPLICATION SIGN} 7)`."""
    shapes = {each["name"]: each["shape"] for each in variables if each.get("shape")}
    return _joined(
        [
            shown(name) + (f" ({TIMES.join(map(rounded, shapes[name]))})" if name in shapes else "")
            for name in names
        ]
    )


def rounded(count: int) -> str:
    """A count in three characters or so: `7`, `950`, `1.2 M`."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= size:
            return f"{count / (1000 if unit == 'k' else size):.3g} {unit}"
    return str(count)


def listing(names: Iterable[str]) -> str:
    """Names with commas, up to `LISTED_CHARS`; the others are counted."""
    return _joined([shown(name) for name in names])


def shown(name: str) -> str:
    """A name on one line; in quotes where it could be taken for the words around it."""
    text = one_line(name)
    return text if _PLAIN.fullmatch(text) else repr(text)


def reasons(lost: Mapping[str, str]) -> str:
    """Names with reasons in brackets; more than `MAX_RESULTS` results of cells count as one."""
    results = [name for name in lost if _RESULT.fullmatch(name)]
    if len(results) > MAX_RESULTS:
        short = ", ".join([*results[:MAX_RESULTS], "…"])
        lost = {**{k: v for k, v in lost.items() if k not in results}, short: lost[results[0]]}
    return _joined([f"{shown(name)} ({_within(reason)})" for name, reason in lost.items()])


def _within(reason: str) -> str:
    """A reason for brackets, which it does not close."""
    text, depth = one_line(reason), 0
    for each in text:
        depth += (each == "(") - (each == ")")
        if depth < 0:
            return repr(text)
    return text


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
