"""Hibernation: save a session's variables, then end its kernel.

Before the kernel ends, a trial kernel loads the save. Unless it is forced, hibernation fails if a
variable would be lost. A forced one leaves out each variable that cannot be written or read, with a
reason. The restore also leaves out variables that crash a kernel which reads them.

A loss is reported twice: as text in a notice, and as data in the result of the next cell
(`RestoreResult.lost`, name to reason).
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.errors import HibernationError
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.forked_save import UnfitToFork
from kernel_mcp.sessions.snapshot import (
    UNREADABLE,
    Dump,
    Loaded,
    UnsavableError,
    damage,
    give,
    handed_over,
    load,
)
from kernel_mcp.sessions.words import described, duration, listing, reasons
from kernel_mcp.sessions.writer import ATTEMPTS, TOO_LARGE, write_forked, write_here

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.sessions.session_save import SessionSave

IDLE, MAKE_ROOM, QUOTA = "idle", "make_room", "quota"
"""Reasons of a hibernation: idle for `--idle-timeout`; room for another session on this server; the
principal's quota over all servers. The last two force it."""
ROUNDS = 4
"""Maximum number of dumps in one save, each without the variables that the last trial lost."""
TRIALS = 24
"""Maximum number of kernels that are started to find the variables which crash them."""
BEHIND = "shares objects with one that ended the kernel"
UNTRIED = "could not be tried: others had ended too many kernels"
ENDED_WITH_KERNEL = "a file in a folder that ends with its kernel; files in the workspace stay"


@dataclass(frozen=True, slots=True)
class SavedState:
    """The saved state of a session without a kernel, which its next kernel restores.

    It is that of a hibernated session, of one of an earlier server, or the last save of a kernel
    that has died.

    since       time of the hibernation, in seconds of the session's clock
    idle_s      seconds for which the session had been idle
    reason      one of the reasons above
    dump        the saved variables; None if nothing was saved
    lost        lost variables, name to reason
    failure     reason why nothing can be restored; empty for none
    changed     variables that come back with changes, name to reason
    files       paths of files that were removed with the kernel
    saved_when  time of a save by an earlier server or kernel, in words; empty for a hibernation
    after       sentence on the cells that ran after that save; empty for none
    judge       returns why a kernel cannot load the dump, and which packages have changed
    """

    since: float
    idle_s: float
    reason: str = IDLE
    dump: Dump | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    saved_when: str = ""
    after: str = ""
    judge: Callable[[Kernel], tuple[str, str]] = lambda _kernel: ("", "")

    @property
    def forced(self) -> bool:
        """True if the session is hibernated even if variables are lost."""
        return self.reason != IDLE

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
        """Names of the variables that will be restored."""
        return [] if self.failure else self.names

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        """Descriptions of the variables that will be restored, see `snapshot.descriptions`."""
        described = self.dump.variables if self.dump is not None and not self.failure else ()
        return [item for item in described if item["name"] not in self.lost]

    def remark(self) -> str:
        """Return the state as sentences, for answers of a hibernated session."""
        text = "This session is hibernated: its next cell brings these variables back."
        if self.saved_when:
            names = described(self.back, self.variables)
            text = f"{self.began()}: its next cell brings back {names}."
        if self.failure and self.saved_when:
            text = f"{self.began()} without its variables: {self.failure}."
        elif self.failure:
            text = f"This session is hibernated without its variables: {self.failure}."
        elif self.saved_when and not self.back:
            none = "none of its variables had been saved" if self.after else "it had no variables"
            text = f"{self.began()}: {none}."
        if self.lost:
            text += f" Not back: {reasons(self.lost)}."
        if self.files:
            text += f" Files that ended with its kernel: {listing(self.files)}."
        return f"{text} {self.after}".rstrip()

    def began(self) -> str:
        """Return the words with which every notice begins."""
        if self.saved_when:
            return f"Continued from {self.saved_when}"
        why = " to make room for another session" if self.forced else ""
        return f"This session had been hibernated after {duration(self.idle_s)} idle{why}"


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of restoring a hibernated session.

    `notice` is for the next answer, empty if there was nothing to save. `loss` is the short cause
    of a loss, None without one. `back` are the names of restored variables. `lost` maps names of
    variables and paths of files to reasons; it is empty if the names are unknown. `restored` is
    True if a dump was loaded.
    """

    notice: str = ""
    loss: str | None = None
    back: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    restored: bool = False


class Hibernation:
    """Saves the variables of one session to `session_save`, and loads them.

    `start` starts a second kernel for trials.
    """

    def __init__(
        self, session_save: SessionSave, *, start: Callable[[], Awaitable[Kernel]]
    ) -> None:
        self._session_save = session_save
        self._start = start

    async def prepare(
        self, kernel: Kernel, asked: SavedState, saved: SavedState | None = None
    ) -> SavedState:
        """Save the variables of `kernel` without ending it; return `asked` with the result.

        `saved` is an earlier save of the same state. It is used instead if a forced save would
        lose variables that it holds, or fails with OSError.

        Raises HibernationError if nothing can be saved, or if something would be lost and the save
        is not forced. Raises KernelMcpError or OSError if the server cannot save.
        """
        try:
            return await self._prepare(kernel, asked, saved)
        except OSError:
            if saved is None or not asked.forced:
                raise
            return _instead(saved, asked)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._session_save.entry.tidy)

    async def _prepare(
        self, kernel: Kernel, asked: SavedState, saved: SavedState | None
    ) -> SavedState:
        dump = await self._save(kernel, forced=asked.forced)
        if saved is not None and not dump.lost.keys().isdisjoint(saved.back):
            return _instead(saved, asked)
        return replace(
            asked,
            dump=dump if dump.stored else None,
            lost=dump.lost,
            changed=dump.changed,
            files=dump.files,
            judge=await anyio.to_thread.run_sync(self._session_save.commit_dump, dump),
        )

    async def wake(
        self, saved: SavedState, start: Callable[[], Awaitable[Kernel]]
    ) -> tuple[Kernel, RestoreResult]:
        """Start a kernel with `start`, and load the dump into it.

        If that ends the kernel, another one gets the variables that do not, or none. Raises
        KernelMcpError.
        """
        try:
            return await self._load(start, saved, {})
        except HibernationError as error:
            failure = str(error)
        with suppress(HibernationError):
            fatal = await self.find_fatal(saved)
            try:
                return await self._load(start, saved, fatal)
            except HibernationError as error:
                failure = str(error)
        return await start(), nothing_restored(saved, failure)

    async def _load(
        self,
        start: Callable[[], Awaitable[Kernel]],
        saved: SavedState,
        leave: Mapping[str, str],
    ) -> tuple[Kernel, RestoreResult]:
        kernel = await start()
        try:
            return kernel, await self.restore(kernel, saved, leave)
        except BaseException:
            await kernel.aclose()
            raise

    async def restore(
        self, kernel: Kernel, saved: SavedState, leave: Mapping[str, str]
    ) -> RestoreResult:
        """Load the dump into `kernel`, except the names in `leave`, which maps them to reasons.

        Raises HibernationError if that kernel is lost.
        """
        unfit, changes = saved.judge(kernel) if saved.dump is not None else ("", "")
        failure = saved.failure or unfit
        if saved.dump is not None and not failure:
            failure = await damage(saved.dump)
        if saved.dump is None or failure:
            return nothing_restored(saved, failure)
        try:
            loaded = await give(kernel, saved.dump, leave)
        except OSError as error:
            return nothing_restored(saved, UNREADABLE.format(error.strerror))
        files = tuple(path for path in saved.files if path in loaded.missing)
        there = replace(saved, files=files)
        failed = {**leave, **not_loaded(loaded)}
        return restored(there, loaded.names, failed, changes, kernel.starts_anew)

    async def find_fatal(self, saved: SavedState) -> dict[str, str]:
        """Return the names of variables that crash a kernel which loads them, with reasons.

        A first crash may have another cause, such as a lack of memory. So the next kernel loads the
        variables of that group one at a time. If it crashes too, the variable in progress counts,
        and so do those after it in the group. After `TRIALS` kernels all untried variables count.
        Raises KernelMcpError, OSError.
        """
        dump = saved.dump
        failed: dict[str, str] = {}
        if dump is None or not dump.groups:
            raise HibernationError("they end every kernel that reads them")
        suspect: tuple[str, ...] = ()
        for _ in range(TRIALS):
            group: tuple[str, ...] = ()
            left: tuple[str, ...] = ()
            async with aclosing(await self._start()) as trial:
                if trial.snapshots is not None:
                    raise HibernationError("its kernel reads them all or none")
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

    async def discard_save(self) -> None:
        """Discard the save of `prepare`, as the kernel is not ended after it."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._session_save.mark_unneeded)

    async def end(self, *, used: bool = False) -> None:
        """Remove the save; a persisted one that was `used` stays."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(
                self._session_save.mark_loaded if used else self._session_save.drop
            )

    async def _save(self, kernel: Kernel, *, forced: bool) -> Dump:
        """Write a dump, load it in a trial kernel, and return it with all losses.

        A `forced` save repeats this without the variables that could not be read, so that others
        which share objects with them can be read. Variables that crash kernels, or that still fail
        after `ROUNDS`, are left out by the restore.
        """
        lost: Mapping[str, str] = {}
        for _ in range(ROUNDS):
            dump = await self._write(kernel, forced=forced, leave=lost)
            lost, files = dump.lost, dump.files
            if forced or not lost:
                try:
                    loaded = await self._try(dump)
                except UnsavableError:
                    if not forced:
                        raise
                    break
                lost, files = {**lost, **loaded.lost}, loaded.missing
                if not loaded.lost:
                    break
            if not forced:
                raise HibernationError(f"{len(lost)} of its variables would be lost")
        return replace(dump, lost=lost, files=files)

    async def _write(self, kernel: Kernel, *, forced: bool, leave: Mapping[str, str]) -> Dump:
        """Write a dump without the names in `leave`. Raises OSError if the disk is too full."""
        room = await anyio.to_thread.run_sync(partial(self._session_save.room, hibernating=True))
        dump = await self._written(kernel, room.size, forced=forced, leave=leave)
        if room.free < room.bound and any(why.startswith(TOO_LARGE) for why in dump.lost.values()):
            raise OSError(errno.ENOSPC, "the disk has no room for the variables of a session")
        return dump

    async def _written(
        self, kernel: Kernel, max_bytes: int, *, forced: bool, leave: Mapping[str, str]
    ) -> Dump:
        """Write the dump by a forked child of the kernel, or by the kernel itself.

        The kernel writes it if it must not be forked, or if it is `forced` and the child failed.
        """
        try:
            written = await write_forked(
                kernel,
                self._session_save,
                _at_once,
                max_bytes=max_bytes,
                hurry=True,
                attempts=ATTEMPTS if forced else 1,
                leave=leave,
            )
        except HibernationError as error:
            if not (isinstance(error, UnfitToFork) or (forced and kernel.exit is None)):
                raise
            written = await write_here(kernel, self._session_save, max_bytes=max_bytes, leave=leave)
        assert written is not None
        return written[0]

    async def _try(self, dump: Dump) -> Loaded:
        async with aclosing(await self._start()) as trial:
            try:
                return await give(trial, dump)
            except HibernationError as error:
                raise UnsavableError(f"they could not be read back in a trial: {error}") from error


@asynccontextmanager
async def _at_once() -> AsyncIterator[bool]:
    """Yield True at once: the caller already holds the lock of the kernel."""
    yield True


def _instead(saved: SavedState, asked: SavedState) -> SavedState:
    """Return `asked` with the earlier save `saved` as its result."""
    return replace(
        saved,
        since=asked.since,
        idle_s=asked.idle_s,
        reason=asked.reason,
        saved_when="",
    )


def not_loaded(loaded: Loaded) -> dict[str, str]:
    """Return the names of a dump's variables that were not loaded, with reasons."""
    behind = dict.fromkeys(loaded.behind, "was stored behind one that could not be read")
    return {**loaded.lost, **behind}


def restored(
    saved: SavedState,
    names: Sequence[str],
    failed: Mapping[str, str],
    changes: str = "",
    starts_anew: str = "",
) -> RestoreResult:
    """Return the result for loaded `names`; `failed` maps names that were not loaded to reasons.

    `changes` lists packages whose versions differ from those at the save; empty for none.
    `starts_anew` is a sentence on what no kernel brings back.
    """
    parts = [saved.began()]
    lost = {**saved.lost, **failed}
    if saved.saved_when:
        parts[0] += f": {described(names, saved.variables) or 'no variables'}"
    elif names:
        parts.append(f"Back: {listing(names)} ({len(names)})")
    if lost:
        parts.append(
            f"Not back: {reasons(lost)}: create {'it' if len(lost) == 1 else 'them'} again"
        )
    if changed := {name: why for name, why in saved.changed.items() if name not in lost}:
        parts.append(f"Not as before: {reasons(changed)}")
    if saved.files:
        parts.append(
            f"Files that ended with the kernel, unlike those in the workspace: "
            f"{listing(saved.files)} ({len(saved.files)})"
        )
    if saved.after:
        parts.append(saved.after.removesuffix("."))
    if changes:
        parts.append(f"Packages that are not as they were: {changes}")
    if starts_anew:
        parts.append(starts_anew)
    gone = {**saved.gone, **failed}
    loss = f"hibernation could not keep {listing(gone)}" if gone else saved.after or None
    return RestoreResult(
        ". ".join(parts), loss, tuple(names), gone, restored=saved.dump is not None
    )


def nothing_restored(saved: SavedState, failure: str) -> RestoreResult:
    """Return the result for a session that lost all variables, or that had none.

    `failure` is the reason of the loss; empty if there were no variables.
    """
    if failure:
        could = "brought back" if saved.saved_when else "saved"
        began = saved.began()
        text = f"{began}, but its variables could not be {could}: {failure}. All variables"
        which = f": {listing(saved.names)}" if saved.names else ""
        return RestoreResult(
            f"{text} of earlier cells are lost{which}; files in the workspace are kept",
            f"the session was hibernated, and {failure}",
            lost={**dict.fromkeys(saved.names, failure), **saved.gone},
        )
    return restored(saved, (), {}) if saved.gone else RestoreResult()
