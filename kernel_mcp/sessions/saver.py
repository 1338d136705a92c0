"""Background saves of sessions, so that they survive any end of the server.

A changed session is saved after `IDLE_S` seconds without a cell. A session that is never idle for
so long is saved between two cells. Saves with a high cost are made less often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.errors import HibernationError
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.forked_save import pause_after
from kernel_mcp.units import MIB

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The size of a save in bytes, and the processor time that it used, in seconds."""

    size: int = 0
    cpu_s: float = 0.0


class Saveable(Protocol):
    """The part of a session that the saver uses. Times are seconds of the session's clock."""

    handle: str

    @property
    def last_used(self) -> float:
        """Time of its last use."""

    @property
    def state(self) -> str:
        """`busy` while a cell runs or packages are installed."""

    @property
    def changed(self) -> bool:
        """True if it has changed since its last save."""

    async def save(self, *, urgent: bool = False, most_bytes: int | None = None) -> SaveCost | None:
        """Save cells and variables and return the cost, or return None while it is in use.

        An `urgent` save waits for the running cell, and the next cell waits for the save. With
        `most_bytes` all variables are saved, or none if they do not fit. Raises HibernationError,
        OSError.
        """

    async def settle(self) -> bool:
        """Stop its cells and wait until it can be saved; return False if none was under way."""

    def unsaved(self, reason: str) -> None:
        """Note the reason why the last save failed; empty if it succeeded."""

    def rarely_saved(self, pause_s: float) -> None:
        """Report that it can be saved only every `pause_s` seconds; 0 means as often as others."""


IDLE_S = 2.0
"""Seconds without a cell after which a changed session is saved."""
LONGEST_S = 30.0
"""Seconds after the first unsaved change, when a session is saved even if it is not idle."""
RETRY_S = 60.0
RETRY_MOST_S = 3600.0
AT_ONCE = 2
"""Maximum number of concurrent saves. Urgent ones do not count: while they wait for a cell they
would block others."""
LAST_S = 30.0
"""Seconds for all saves at the server's end. Small ones come first, as many clients kill the server
after 4 s."""
SETTLE_S = 2.5
"""Seconds within which cells must stop at the server's end. This is shorter than `--grace`, after
which a kernel is killed: a session that stops later has no time left for its save."""
STOP_S = 15.0
"""Seconds for the save of a session that its operator stops, who waits for the answer."""
LAST_AT_ONCE = 8
SMALL_BYTES = 20 * MIB


class Saver:
    """Saves changed sessions. `clock` is that of sessions; `after` is called after each save."""

    def __init__(self, clock: Callable[[], float], after: Callable[[], object]) -> None:
        self._clock = clock
        self._after = after
        self._waiting: dict[str, Saveable] = {}
        self._since: dict[str, float] = {}
        """Time of the first unsaved change, by handle."""
        self._looks: dict[str, tuple[Saveable, float]] = {}
        """Time at which to check for changes that were made without a cell, by handle."""
        self._not_before: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._hurried: set[str] = set()
        self._saving: set[str] = set()
        self._wake = anyio.Event()

    def touch(self, session: Saveable, *, at_once: bool = False) -> None:
        """Plan a save of a session that has changed; `at_once` if its last save is obsolete."""
        if at_once:
            self._hurried.add(session.handle)
            self._not_before.pop(session.handle, None)
        if at_once or session.handle not in self._waiting:
            self._waiting[session.handle] = session
            self._since.setdefault(session.handle, self._clock())
            self._wake.set()

    def forget(self, session: Saveable) -> None:
        """Remove a session that has ended."""
        for known in (
            self._waiting,
            self._since,
            self._looks,
            self._not_before,
            self._failures,
        ):
            known.pop(session.handle, None)
        self._hurried.discard(session.handle)

    def due(self) -> dict[str, float]:
        """Return the time at which to save each changed session, by handle."""
        return {
            handle: max(self._wanted(session), self._not_before.get(handle, 0.0))
            for handle, session in self._waiting.items()
            if handle not in self._saving
        }

    def _wanted(self, session: Saveable) -> float:
        if session.handle in self._hurried:
            return session.last_used
        return min(session.last_used + IDLE_S, self._overdue(session))

    def _overdue(self, session: Saveable) -> float:
        return self._since[session.handle] + LONGEST_S

    async def run(self) -> None:
        """Save until cancelled."""
        limiter = anyio.CapacityLimiter(AT_ONCE)
        async with anyio.create_task_group() as tasks:
            while True:
                self._wake = anyio.Event()
                self._look()
                due, now = self.due(), self._clock()
                for handle, moment in due.items():
                    if moment <= now:
                        self._saving.add(handle)
                        tasks.start_soon(self._save, self._waiting[handle], limiter)
                later = [moment for moment in due.values() if moment > now]
                later += [moment for _, moment in self._looks.values()]
                with anyio.move_on_after(min(later) - now if later else None):
                    await self._wake.wait()

    def _look(self) -> None:
        """Plan saves of sessions that threads, tasks or timers have changed between cells."""
        now = self._clock()
        due = {name: each for name, (each, moment) in self._looks.items() if moment <= now}
        for handle, session in due.items():
            del self._looks[handle]
            if session.changed:
                self.touch(session)
            else:
                self._looks[handle] = (session, now + LONGEST_S)

    async def finish(self) -> None:
        """Save changed sessions at the server's end, within `LAST_S` seconds: small ones first."""
        found = dict(self._waiting)
        found |= {name: each for name, (each, _) in self._looks.items() if each.changed}
        left, self._waiting, self._looks = list(found.values()), {}, {}
        with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_S):
            for most_bytes in (SMALL_BYTES, None):
                limiter, sessions, left = anyio.CapacityLimiter(LAST_AT_ONCE), left, []
                async with anyio.create_task_group() as tasks:
                    for session in sessions:
                        tasks.start_soon(self._last, session, most_bytes, limiter, left)

    async def save_last(self, session: Saveable) -> str:
        """Stop the cells of a session that is to end, and save it within `STOP_S` seconds.

        Return why it was not saved, empty if it was.
        """
        unsaved = f"that took more than {STOP_S:.0f} s"
        with Barrier("keeping a session that is stopped", session.handle) as barrier:
            with anyio.move_on_after(STOP_S):
                unsaved = await stop_and_save(session, None, anyio.CapacityLimiter(1))
        return unsaved if barrier.failure is None else reason_of(barrier.failure)

    async def _save(self, session: Saveable, limiter: anyio.CapacityLimiter) -> None:
        handle, began = session.handle, self._clock()
        urgent = began >= self._overdue(session)
        try:
            with Barrier("keeping a session", handle) as barrier:
                try:
                    if urgent:
                        written = await session.save(urgent=True)
                    else:
                        async with limiter:
                            written = await session.save()
                    self._saved(session, began, written)
                except HibernationError as error:
                    logger.info("session %s could not be kept: %s", handle, error)
                    self._fail(session, began, str(error))
            if barrier.failure is not None:
                self._fail(session, began, reason_of(barrier.failure))
            with Barrier("making room for kept sessions"):
                await anyio.to_thread.run_sync(self._after)
        finally:
            self._saving.discard(handle)
            self._wake.set()

    def _saved(self, session: Saveable, began: float, written: SaveCost | None) -> None:
        handle = session.handle
        if written is None:  # the session is in use again
            self._not_before[handle] = self._clock() + IDLE_S
            return
        session.unsaved("")
        self._failures.pop(handle, None)
        self._hurried.discard(handle)
        pause = pause_after(written.size, written.cpu_s)
        self._not_before[handle] = began + pause
        session.rarely_saved(pause if pause > LONGEST_S else 0.0)
        if handle not in self._waiting:  # the session has ended
            return
        if session.changed:
            self._since[handle] = began
            return
        self._waiting.pop(handle, None)
        self._since.pop(handle, None)
        self._looks[handle] = (session, self._clock() + LONGEST_S)

    def _fail(self, session: Saveable, began: float, reason: str) -> None:
        handle = session.handle
        session.unsaved(reason)
        count = self._failures[handle] = self._failures.get(handle, 0) + 1
        self._not_before[handle] = began + min(RETRY_S * 2 ** (count - 1), RETRY_MOST_S)

    async def _last(
        self,
        session: Saveable,
        most_bytes: int | None,
        limiter: anyio.CapacityLimiter,
        left: list[Saveable],
    ) -> None:
        """Stop the cells of a session and save it; append it to `left` if its save fails.

        With `most_bytes` None a failure is only logged.
        """
        with Barrier("keeping a session at the end", session.handle):
            try:
                unsaved = await stop_and_save(session, most_bytes, limiter)
                if unsaved:
                    logger.warning("session %s was not kept: %s", session.handle, unsaved)
            except HibernationError as error:
                if most_bytes is None:
                    logger.warning("what has changed in a session was not kept: %s", error)
                else:
                    left.append(session)


async def stop_and_save(
    session: Saveable, most_bytes: int | None, limiter: anyio.CapacityLimiter
) -> str:
    """Stop the cells of a session and save it; return why it was not saved, empty if it was.

    See `Saveable.save` for `most_bytes` and what is raised.
    """
    with anyio.move_on_after(SETTLE_S) as settling:
        await session.settle()
    if settling.cancelled_caught and session.state == "busy":
        return "its cell did not stop"
    # Other work in progress is a checkpoint or a save, which ends by itself.
    async with limiter:
        while await session.save(most_bytes=most_bytes) is None:
            if not await session.settle():
                return ""
    return ""
