"""The open sessions of a manager, and how their owners find them: by handle, name or default."""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import field
from functools import partial

from kernel_mcp.errors import InputError, SessionGone, SessionNotFound
from kernel_mcp.identity import LOCAL, Principal
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.losses import lost_names
from kernel_mcp.sessions.notifications import Loss, ResponseContext
from kernel_mcp.sessions.persistence import DEFAULT_NAME, Persistence
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.storage import SCRIPT
from kernel_mcp.sessions.tombstones import Tombstone, Tombstones

JUST_NOW_S = 0.5
"""Upper bound on the delay of file-system events, in seconds, on a busy machine too."""
NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")
"""Valid names of sessions; `--workspace` may have a folder of that name."""
HANDLE = re.compile(r"s-[A-Za-z0-9_-]{12}(\.[a-z0-9-]{1,32})?")
"""Valid handles of sessions; those of a fleet end with the name of a node."""
SHARED = (
    "default session, last used by another client{} {}; create_session for your own. Variables and "
    "files of this one are those of all clients of your principal"
)
OVERLAPS = (
    "this cell had to wait for cell {}, of another call{}: cells of one session run in order. "
    "Agents that work side by side take a session each, by create_session"
)
MOST_CLIENTS = 50
"""Clients of a default session that are distinguished; the least recent are forgotten."""
PROCESSORS = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a call: the owner of its sessions, and the key of its default session.

    `default` is empty if there is no default session, as over HTTP without a session id. `known` is
    False for a caller that cannot be distinguished from others; its answers name the handle to pass
    on. `client` identifies a client among those of its principal, empty if unknown. `request` is
    the id of the HTTP request. `response` is the context of the answer to the call. `program` is
    name and version of the client, as it says itself. `peer` is the address of an HTTP client.
    """

    principal: str = LOCAL
    default: str = "default"
    who: Principal = field(default_factory=Principal, compare=False)
    known: bool = field(default=True, compare=False)
    client: str = field(default="", compare=False)
    response: ResponseContext = field(default_factory=ResponseContext, compare=False)
    request: str = field(default="", compare=False)
    program: str = field(default="", compare=False)
    peer: str = field(default="", compare=False)


def _named(program: str) -> str:
    return f" ({program})" if program else ""


def ago(seconds: float) -> str:
    """Return a duration in words, such as `5 min ago`."""
    if seconds < 60:
        return "less than a minute ago"
    unit, count = ("min", seconds / 60) if seconds < 3600 else ("h", seconds / 3600)
    return f"{count:.0f} {unit} ago"


class SessionDirectory:
    """The open sessions of one manager, each of them visible only to its owner."""

    def __init__(
        self,
        clock: Callable[[], float],
        persistence: Persistence | None,
        tombstones: Tombstones,
        *,
        keeps_files: bool,
    ) -> None:
        """`clock` is that of sessions. With `keeps_files` their workspaces outlive them.

        `tombstones` are of ended sessions.
        """
        self._tombstones = tombstones
        self._clock = clock
        self._persistence = persistence
        self._keeps_files = keeps_files
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        """Number of calls that are opening a session."""
        self._ended_ran = -math.inf
        """Time at which code last ran in a session that has been closed since."""
        self._defaults: dict[tuple[str, str], str] = {}
        self._undelivered: dict[tuple[str, str], str] = {}
        """The last text for a default session that is not open, by its key."""
        self._clients: dict[str, OrderedDict[str, tuple[float, str]]] = {}
        """Time of the last use of a default session, and the program, by handle and client."""
        self._overlapped: dict[str, set[str]] = {}
        """Clients that know of overlapping calls in a default session, by its handle."""

    @property
    def sessions(self) -> list[Session]:
        """Every open session, oldest first."""
        return list(self._sessions.values())

    def owned_by(self, principal: str) -> list[Session]:
        """Return the open sessions of a principal, oldest first."""
        return [each for each in self._sessions.values() if each.owner == principal]

    def add(self, session: Session) -> None:
        """Add a session that is open from now on."""
        self._sessions[session.handle] = session

    def remove(self, session: Session) -> None:
        """Remove a session that has ended."""
        del self._sessions[session.handle]
        self._ended_ran = max(self._ended_ran, session.scheduler.last_ran)
        self._clients.pop(session.handle, None)
        self._overlapped.pop(session.handle, None)

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """Count a session that is opened inside this block."""
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    def busy(self) -> float:
        """Return the number of sessions, per processor, that run cells, start or are opened."""
        there = [each for each in self.sessions if each.state == "busy" or each.scheduler.starting]
        return (self._opening + len(there)) / PROCESSORS

    def at_work(self, age_s: float = 0.0) -> list[Session]:
        """Return the sessions in which code runs, or ran within `age_s` + `JUST_NOW_S` seconds."""
        last = self._clock() - JUST_NOW_S - age_s
        there = self.sessions
        return [s for s in there if s.state == "busy" or s.scheduler.last_ran > last]

    def was_at_work(self, age_s: float) -> bool:
        """Return True if code ran within that time in a session that has been closed since."""
        return self._ended_ran > self._clock() - JUST_NOW_S - age_s

    def remark(self, text: str) -> None:
        """Add a text to the next answer of every session."""
        for session in self.sessions:
            session.remark(text)

    def tell(self, caller: Caller, text: str) -> None:
        """Add a text to the next answer of the caller's default session, also one opened later."""
        if (session := self.default(caller)) is not None:
            session.remark(text)
        elif caller.default:
            self._undelivered[caller.principal, caller.default] = text

    def named(self, caller: Caller, name: str) -> Session | None:
        """Return the caller's session of this name, unless it is being closed; None without one."""
        if not NAME.fullmatch(name):
            return None
        found = (each for each in self.owned_by(caller.principal) if each.name == name)
        return next((each for each in found if not each.closing.is_set()), None)

    def own(self, caller: Caller, session: str) -> Session | None:
        """Return the caller's session with this handle or name; None without one."""
        found = self._sessions.get(session)
        own = found is not None and found.owner == caller.principal
        return found if own else self.named(caller, session)

    def default(self, caller: Caller) -> Session | None:
        """Return the caller's default session, unless it is being closed; None without one."""
        found = self._sessions.get(self._defaults.get((caller.principal, caller.default), ""))
        return None if found is None or found.closing.is_set() else found

    def closing(self, caller: Caller, name: str, *, default: bool) -> list[Session]:
        """Return the caller's sessions of this name, or the default one, that are being closed."""
        known = self._defaults.get((caller.principal, caller.default), "")
        return [
            each
            for each in self.owned_by(caller.principal)
            if each.closing.is_set()
            and (each.handle == known if default else name and each.name == name)
        ]

    def is_default(self, caller: Caller, name: str) -> bool:
        """Return True if this is the name of the caller's default session.

        If that is not persisted, a session that was created with this name comes first.
        """
        if name != DEFAULT_NAME or not caller.default:
            return False
        store = self._persistence
        if store is not None and store.key(caller.principal, "", default=True) is not None:
            return True
        named = self.named(caller, name) is not None
        return not (named or (store is not None and store.has(caller.principal, name)))

    def find(self, caller: Caller, session: str) -> Session | None:
        """Return the caller's open session; `""` is the default one. None without one."""
        if not session or self.is_default(caller, session):
            return self.default(caller)
        return self.own(caller, session)

    def check_name(self, caller: Caller, name: str, *, but_held_back: bool = False) -> None:
        """Raise InputError for a name that is malformed, or used by a session of this caller.

        With `but_held_back` a used name is allowed if that session's persisted state was held back.
        """
        if name in ("", SCRIPT):
            return
        if not NAME.fullmatch(name) or HANDLE.fullmatch(name):
            raise InputError(
                f"{name[:80]!r} cannot be the name of a session: it takes 1 to 64 letters, digits, "
                "dots, hyphens and underscores, and may not look like a handle."
            )
        there = self.named(caller, name)
        if there is not None and not (but_held_back and there.held_back):
            raise InputError(
                f"You have a session named {name!r} already. Use it by session={name!r}, end it "
                f"with close_session(session={name!r}), or choose another name."
            )

    def register(self, caller: Caller, session: Session, *, default: bool) -> None:
        """Register a session as the default one or by its name.

        If it replaces one whose end was not reported, a notice reports that end.
        """
        owner, name, ended = caller.principal, session.name, None
        if default:
            which, new = "default session", "default session"
            ended = self._tombstones.pop(owner, self._defaults.get((owner, caller.default), ""))
            if caller.default:
                self._defaults[owner, caller.default] = session.handle
            if text := self._undelivered.pop((owner, caller.default), ""):
                session.remark(text)
        elif name:
            which, new = f"session {name!r}", "one"
            ended = self._tombstones.find(owner, name) if name != SCRIPT else None
            self._tombstones.reassign_name(owner, name)
        if ended is not None:
            text = f"The {which} {self._end_in_words(ended)}"
            text += "" if ended.saved else f" This is a new {new}"
            session.notifications.add(text, ended.loss)

    def forget_default(self, principal: str, default: str) -> None:
        """Remove a session from the default ones; it stays open and is found by its handle."""
        self._defaults.pop((principal, default), None)

    def note_client(self, caller: Caller, session: Session) -> None:
        """Add a remark to a client's first answer if another client has used the session."""
        if not caller.client:
            return
        now, known = self._clock(), self._clients.setdefault(session.handle, OrderedDict())
        if caller.client not in known and known:
            last, program = next(reversed(known.values()))
            caller.response.remarks.append(SHARED.format(_named(program), ago(now - last)))
            forget = partial(known.pop, caller.client, None)
            caller.response.receipt.then(lambda: None, forget)
        known[caller.client] = now, caller.program
        known.move_to_end(caller.client)
        if len(known) > MOST_CLIENTS:
            known.popitem(last=False)

    def note_overlap(self, caller: Caller, session: Session, cell: Cell) -> None:
        """Tell a client, once, that a cell of its waits for that of another call or client.

        Only in a default session: who names a session has chosen it.
        """
        ahead, told = session.queue.before(cell), self._overlapped.setdefault(session.handle, set())
        if ahead is None or ahead.author or caller.client in told:
            return
        other = ahead.calls > 0 or ahead.origin.program != caller.program
        if other and self.default(caller) is session:
            cell.notice(OVERLAPS.format(ahead.number, _named(ahead.origin.program)))
            told.add(caller.client)

    def note_end(self, session: Session, why: str, *, saved: bool = False) -> None:
        """Record the end of a session and its losses, for the owner's next call.

        Nothing is lost of one that was `saved`, which comes back.
        """
        if session.handle in self._sessions:
            loss = Loss(f"it {why}") if saved else session.lost_state(f"it {why}")
            self._tombstones.add(
                Tombstone(session.owner, session.handle, session.name, why, loss, saved)
            )

    def missing(self, caller: Caller, session: str) -> SessionNotFound:
        """Return the error for a session that is not open.

        It is SessionGone for an ended session whose end was not reported yet. The text is the same
        for unknown, foreign and expired sessions.
        """
        if (ended := self._tombstones.find(caller.principal, session)) is not None:
            return SessionGone(
                f"Session {session!r} {self._end_in_words(ended)} Open another with "
                "create_session, or leave `session` empty for the default session.",
                handle=ended.handle,
                lost=ended.loss.names,
                more=ended.loss.more,
            )
        return SessionNotFound(
            f"There is no session {session[:64]!r}: it was never yours, was closed, or has "
            "expired. Open one with create_session, or leave `session` empty for the "
            "default session; variables of an expired session are gone."
        )

    def _end_in_words(self, ended: Tombstone) -> str:
        if ended.loss.kept:
            return f"{ended.why}; the kernel that it had joined goes on with its variables."
        if ended.saved:
            return f"{ended.why}, and saved."
        files = "" if self._keeps_files else " and files"
        return f"{ended.why}: its variables{files} are gone.{lost_names(ended.loss)}"
