"""Quarantine new entries below writable mounts that programs of the host execute or obey."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kernel_mcp.host_folders.exposed import MOST_REPORTS, ExposedMount
from kernel_mcp.host_folders.makers import CODE, HOST, NAMED, by_code, counts_as_code, user_of
from kernel_mcp.host_folders.open_files import OpenFileHolder
from kernel_mcp.host_folders.secrets import FIXED, Parts, quoted, readable
from kernel_mcp.records import dataclass

MOST_QUARANTINED = 10
MOST_NAMES = 40
WITHIN_S = 60.0
"""Interval in seconds for the limits above, beyond which a kernel is killed.

`MOST_QUARANTINED` counts entries of one path, `MOST_NAMES` all entries. If several sessions may
have made them, both limits are multiplied by the number of these sessions.
"""

logger = logging.getLogger(__name__)


class ActiveSession(Protocol):
    """A session with a kernel."""

    @property
    def user(self) -> int:
        """User id on the host of the owner of its workspace."""

    def remark(self, text: str) -> object:
        """Include this text in its next answer."""

    def end_kernel(self, cause: str) -> object:
        """Kill its kernel."""


@dataclass(frozen=True)
class _Quarantined:
    """A quarantined entry: time, path, and the number of sessions that may have made it."""

    moment: float
    sign: Parts
    among: int


class NewFileQuarantine:
    """Renames entries that code has made, and reports them; `audit` writes audit events."""

    def __init__(
        self, audit: Callable[[str, Mapping[str, Any]], None], fixed: Sequence[Path]
    ) -> None:
        self._audit = audit
        self._fixed = fixed
        self._recent: WeakKeyDictionary[ActiveSession, deque[_Quarantined]] = WeakKeyDictionary()
        self._last: WeakKeyDictionary[ActiveSession, str] = WeakKeyDictionary()
        self.active_sessions: Callable[[float], Sequence[ActiveSession]] = lambda _age_s: []
        """Returns the sessions in which code runs, or ran within the given number of seconds."""
        self.ended_sessions: Callable[[float], bool] = lambda _age_s: False
        """Returns True if code ran within the given number of seconds in a session that is gone."""
        self.running_sessions: Callable[[], Sequence[ActiveSession]] = list
        """Returns the sessions with a kernel, where cells may have left processes and threads."""

    def _suspects(self, maker: str, age_s: float = 0.0) -> Sequence[ActiveSession]:
        """Return the sessions that may have made an entry `age_s` seconds ago.

        If the maker's user is known, only the sessions of that user are returned.
        """
        running = self.running_sessions()
        user = user_of(maker)
        if user is not None and (known := [each for each in running if each.user == user]):
            return known
        return running if counts_as_code(maker) else self.active_sessions(age_s) or running

    def _code_ran(self, age_s: float) -> bool:
        """Return True if code ran `age_s` seconds ago, in a session that is open or gone."""
        return bool(self.active_sessions(age_s)) or self.ended_sessions(age_s)

    def note(
        self, shown: ExposedMount, covers: Mapping[Parts, str], makers: Mapping[Parts, str]
    ) -> list[Parts]:
        """Quarantine new entries that the host executes; return the paths that need no cover.

        Entries that code has made are renamed. Entries of an unknown maker are renamed if code was
        running. Entries that a program of the host has made stay.
        """
        moved = []
        for parts, kind in covers.items():
            wanted = kind == FIXED or (shown.mount.writable and shown.executes(parts))
            maker = makers[parts]
            if not wanted or maker == HOST or shown.in_read_only_folder(parts):
                continue
            if shown.is_another_name(parts) and not self._fixes(shown, parts):
                continue
            if shown.is_original(parts) and not by_code(maker):
                continue
            signs = shown.executed_entries(parts)
            if not signs and self._fixes(shown, parts):
                signs = [parts]
            if not signs:
                moved.append(parts)  # quarantined before: a later entry there is new
            elif self._handle(shown, parts, signs, maker):
                moved.append(parts)
        return moved

    def _fixes(self, shown: ExposedMount, parts: Parts) -> bool:
        return shown.mount.host.joinpath(*parts) in self._fixed

    def _handle(
        self, shown: ExposedMount, parts: Parts, signs: Sequence[Parts], maker: str
    ) -> bool:
        """Rename the entries `signs` if code may have made them, and report them.

        Return True if nothing is left at the path.
        """
        age_s = max(0.0, time.time() - max(shown.changed_at(sign) for sign in signs))
        suspects = self._suspects(maker, age_s)
        sure = counts_as_code(maker) or (maker != NAMED and self._code_ran(age_s))
        gone = False
        for sign in signs:
            now = ""
            if sure:
                with contextlib.suppress(OSError):  # in a folder that this server cannot write
                    now = shown.quarantine(sign)
                gone = gone or bool(now) or not os.path.lexists(shown.mount.host.joinpath(*parts))
                if not now and readable(sign) in shown.new_entries and not shown.holds(sign):
                    continue  # quarantined when it was made; this is a later write
            if shown.record_entry(readable(sign), now):
                self._report(shown, readable(sign), now, suspects)
            if now:
                self._count(suspects, sign)
        return gone

    def _report(
        self, shown: ExposedMount, name: str, now: str, suspects: Sequence[ActiveSession]
    ) -> None:
        self._audit("appeared", {"mount": str(shown.mount), "path": name, "now": now or name})
        found = (
            f"{quoted(name)} has appeared, which programs of the host execute or take commands from"
        )
        more = f". No more than {MOST_REPORTS} an hour are told." if shown.rate_limited else ""
        outcome = (
            f"it was renamed to {quoted(now)}. If it is the user's own, rename it back on the host"
        )
        asks = "it stays as it is: unless the user made what is there, a session did"
        logger.warning("--mount %s: %s; %s%s", shown.mount, found, outcome if now else asks, more)
        for each in suspects:
            words = f"In {shown.mount.guest} {found}; {outcome if now else asks}"
            each.remark(f"{words}. Tell the user{more or '.'}")

    def _count(self, suspects: Sequence[ActiveSession], sign: Parts) -> None:
        """Count a quarantined entry; kill the kernel of a session at the limit."""
        now = time.monotonic()
        for each in suspects:
            moved = self._recent.setdefault(each, deque())
            moved.append(_Quarantined(now, sign, len(suspects)))
            while moved[0].moment < now - WITHIN_S:
                moved.popleft()
            among = max(one.among for one in moved)
            same = sum(one.sign == sign for one in moved)
            if len(moved) >= MOST_NAMES * among or same >= MOST_QUARANTINED * among:
                moved.clear()
                each.end_kernel(_PLANTED + (_BY_ONE_OF.format(among) if among > 1 else ""))

    def note_held(self, shown: ExposedMount, parts: Parts, holder: OpenFileHolder) -> None:
        """Report a process that was killed because it held a path open."""
        name = quoted(readable(parts))
        found = _CHANGES if holder.covered.kind == FIXED else _READS
        self._audit("held", {"mount": str(shown.mount), "path": readable(parts)})
        logger.warning("--mount %s: %s: %s", shown.mount, name, found)
        for each in self._suspects(f"{CODE}:{holder.uid}"):
            each.remark(f"In {shown.mount.guest} {name}: {found}. Tell the user.")

    def note_changed(self, shown: ExposedMount, changed: Sequence[tuple[Parts, str]]) -> None:
        """Report files that agents or build servers obey, and that code may have changed."""
        for parts, writer in changed:
            age_s = max(0.0, time.time() - shown.changed_at(parts))
            if writer == HOST or not (counts_as_code(writer) or self._code_ran(age_s)):
                continue
            name = readable(parts)
            if name not in shown.changed_files:
                if len(shown.changed_files) >= MOST_REPORTS:
                    continue
                shown.changed_files[name] = None
                self._audit("changed", {"mount": str(shown.mount), "path": name})
                logger.warning("--mount %s: %s was changed, %s", shown.mount, quoted(name), _OBEYED)
            for each in self._suspects(writer, age_s):
                if self._last.get(each) != name:
                    self._last[each] = name
                    each.remark(
                        f"In {shown.mount.guest} {quoted(name)} was changed while code ran, "
                        f"{_OBEYED}. Tell the user."
                    )


_PLANTED = (
    f"{MOST_QUARANTINED} times within {WITHIN_S:g} s the same name, or {MOST_NAMES} names, "
    "appeared in a mounted folder that programs of the host execute; leave such names alone, or "
    "work in the workspace"
)
_BY_ONE_OF = (
    ". Which of {} sessions made them is not known, so the kernels of all that were at work all "
    "the while are ended"
)
_CHANGES = (
    "a process of a session held that open from before it became read-only, so that it could have "
    "changed what programs of the host execute, and was ended"
)
_READS = (
    "a process of a session held that open from before it was covered, so that it could have read "
    "what is put there, and was ended"
)
_OBEYED = "which agents or build servers of the host obey"
