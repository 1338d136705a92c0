"""A session's sleep: its variables put aside, proven to come back, and brought back.

A dump counts only after a fresh kernel has loaded it while the old kernel still lives. A variable
that cannot be written or read is left out with a reason; it never costs the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.errors import HibernationError
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.snapshot import Dump, give, take

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

DUMP_NAME = "variables.dump"
MAKE_ROOM = "to make room for another session"
ATTEMPTS = (True, False, True, False)
"""Shared objects stay shared if all that was written can be read. Otherwise all variables are
written apart, which finds every unreadable one, and then together again without those."""
LISTED_CHARS = 8000
"""Names in one notice; the rest is counted."""
START_ANEW = "Threads, library settings and the state of imported modules start anew"


@dataclass(frozen=True, slots=True)
class Sleep:
    """What a hibernated session is instead of having a kernel. `idle_s` and `since` in seconds.

    `dump` is None where there was nothing to save, or nothing could be saved: `failure` says why.
    `lost` maps the names of variables that will not come back to reasons.
    """

    since: float
    idle_s: float
    purpose: str = ""
    dump: Dump | None = None
    lost: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""

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
        return f"{text} Not back: {reasons(self.lost)}." if self.lost else text

    def began(self) -> str:
        """The start of every notice."""
        purpose = f" {self.purpose}" if self.purpose else ""
        return f"This session had been hibernated after {duration(self.idle_s)} idle{purpose}"


@dataclass(frozen=True, slots=True)
class Waking:
    """How a session came back.

    `notice` is for the answer of its first cell, empty when there had been nothing to save;
    `loss` says in short what is gone, None when nothing is. `back` and `lost` count variables.
    """

    notice: str = ""
    loss: str | None = None
    back: int = 0
    lost: int = 0

    @property
    def restored(self) -> bool:
        """Whether the kernel holds what an earlier one had made."""
        return self.back > 0


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

    async def prepare(self, kernel: Kernel | None, sleep: Sleep) -> Sleep:
        """Save the variables of `kernel`, which goes on living; `sleep` with what came of it.

        Raises KernelMcpError or OSError when it is not the kernel's fault that nothing was saved.
        """
        if kernel is None:
            return sleep
        try:
            dump, lost = await self._save(kernel)
        except HibernationError as error:
            await self._remove()
            return Sleep(sleep.since, sleep.idle_s, sleep.purpose, failure=str(error))
        except BaseException:
            await self._remove()
            raise
        if not dump.names:
            await self._remove()
        return Sleep(sleep.since, sleep.idle_s, sleep.purpose, dump if dump.names else None, lost)

    async def bring_back(self, kernel: Kernel) -> Waking:
        """Load what was saved into `kernel`. Raises HibernationError when that kernel is lost."""
        sleep = self.sleep
        if sleep is None:
            return Waking()
        if sleep.dump is None:
            return nothing_back(sleep, sleep.failure)
        try:
            loaded = await give(kernel, sleep.dump, leave=sleep.lost)
        except OSError as error:
            return nothing_back(sleep, f"they cannot be read from disk: {error.strerror}")
        behind = dict.fromkeys(loaded.behind, "was stored behind one that could not be read")
        return came_back(sleep, loaded.names, {**sleep.lost, **loaded.lost, **behind})

    async def end(self) -> None:
        """Forget the sleep and what it had saved."""
        self.sleep = None
        await self._remove()

    async def _save(self, kernel: Kernel) -> tuple[Dump, dict[str, str]]:
        lost: dict[str, str] = {}
        for shared in ATTEMPTS:
            dump = await take(
                kernel, self._path, max_bytes=self._max_bytes, shared=shared, leave=lost
            )
            failed = await self._try(dump)
            lost.update({**dump.lost, **failed})
            if not failed:
                break
        return dump, lost

    async def _try(self, dump: Dump) -> Mapping[str, str]:
        """Load a dump in a fresh kernel; what could not be read."""
        trial = await self._start()
        try:
            return (await give(trial, dump)).lost
        except HibernationError as error:
            raise HibernationError(f"they could not be read back in a trial: {error}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await trial.aclose()

    async def _remove(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(lambda: self._path.unlink(missing_ok=True))


def came_back(sleep: Sleep, names: Sequence[str], lost: Mapping[str, str]) -> Waking:
    """A notice that says exactly what is there again and what is not."""
    parts = [sleep.began()]
    if names:
        parts.append(f"Back: {listing(names)} ({len(names)})")
    if lost:
        parts.append(
            f"Not back: {reasons(lost)}: create {'it' if len(lost) == 1 else 'them'} again"
        )
    parts.append(START_ANEW)
    loss = f"hibernation could not keep {listing(lost)}" if lost else None
    return Waking(". ".join(parts), loss, len(names), len(lost))


def nothing_back(sleep: Sleep, failure: str) -> Waking:
    """A notice for a session whose variables are lost, or that had none."""
    if failure:
        text = f"{sleep.began()}, but its variables could not be saved: {failure}. All variables"
        return Waking(
            f"{text} of earlier cells are lost, files in the workspace are kept",
            f"the session was hibernated, and {failure}",
        )
    return came_back(sleep, (), sleep.lost) if sleep.lost else Waking()


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
    """Names with reasons in brackets."""
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
