"""Persistence of sessions beyond the server's end: lookup, grants and the notices of a restore.

Loading variables runs code that the session left. So a session is restored automatically only if
the server grants nothing more than at the save. Otherwise the caller must request the restore.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from kernel_mcp.config.narrowing import no_more_or_unlimited
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.environments.own import own_version
from kernel_mcp.errors import EnvironmentBuildError, HibernationError, InputError
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.cell_journal import is_intact, read_journal
from kernel_mcp.sessions.compatibility import IMPLEMENTATION, minor
from kernel_mcp.sessions.grants import wider_grants
from kernel_mcp.sessions.manifest import OF_PRINCIPAL, Saved, SessionKey
from kernel_mcp.sessions.notifications import Loss
from kernel_mcp.sessions.snapshot import Dump, missing
from kernel_mcp.sessions.store import SessionStore
from kernel_mcp.sessions.store_entry import StoreEntry
from kernel_mcp.sessions.words import listing, moment

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter

logger = logging.getLogger(__name__)

DEFAULT_NAME = "default"
"""Name of the default session in the store."""


@dataclass(frozen=True, slots=True)
class PreviousSession:
    """A persisted session of an earlier server.

    when     time of the save, in words
    dump     its variables; None for none
    failure  reason why they cannot be restored; empty if they can
    cells    code of cells that began after the last save, by number
    """

    saved: Saved
    when: str
    dump: Dump | None = None
    failure: str = ""
    cells: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request for a session, with a decision on its persisted state.

    `fresh` discards that state. `resume` restores it, whatever the server grants now.
    """

    name: str
    default: bool = False
    fresh: bool = False
    resume: bool = False

    @property
    def decides(self) -> bool:
        """True if it decides on persisted state that was held back."""
        return self.fresh or self.resume

    def check(self) -> None:
        """Raise InputError if the arguments contradict each other."""
        if self.fresh and self.resume:
            raise InputError(
                "fresh=true forgets what was kept, resume=true brings it back: pass one of them. "
                "Nothing was done."
            )
        if self.resume and not self.name:
            raise InputError(
                "resume=true takes the name of what was kept: pass `name` "
                f"({DEFAULT_NAME!r} for the default session)."
            )


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Persisted state that was found for a new session.

    `entry` is its locked entry in the store, None if the session is not persisted. `previous` is
    the state to restore, None for none. `note` is for the first answer, empty for none, and `loss`
    is the loss that the note reports. With `held_back` there is state that is restored only on
    request.
    """

    entry: StoreEntry | None = None
    previous: PreviousSession | None = None
    note: str = ""
    held_back: bool = False
    loss: Loss | None = None


NOTHING_FOUND = LookupResult()


class Persistence:
    """Finds persisted sessions; `grants` are those of this server, by kind."""

    def __init__(
        self,
        store: SessionStore,
        *,
        folder: str,
        bare: bool,
        by_principal: bool = False,
        grants: Mapping[str, tuple[str, ...]],
        settings: Settings,
        permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
    ) -> None:
        """`folder` is the server's working directory; if `bare`, only named sessions are persisted.

        With `by_principal` sessions belong to principals, whatever the working directory.

        `permits` parses requested packages, and raises KernelMcpError for those not allowed.
        """
        self.store = store
        self.folder = folder
        self.bare = bare
        self.by_principal = by_principal
        self._grants = grants
        self._settings = settings
        self._permits = permits
        self.interpreters: dict[str, Interpreter] = {PYTHON.name: PYTHON}
        """The interpreters of this server, by name."""

    def key(
        self, principal: str, name: str, *, default: bool, handle: str = ""
    ) -> SessionKey | None:
        """Return the key of a principal's session in the store; None if it is not persisted."""
        if not name and (self.bare or not default):
            return None
        return SessionKey(self._owner_key(principal), name or DEFAULT_NAME)

    def has(self, principal: str, name: str) -> bool:
        """Return True if the principal has a persisted session of this name."""
        return self.store.has(SessionKey(self._owner_key(principal), name))

    def _owner_key(self, principal: str) -> str:
        return f"{OF_PRINCIPAL}{principal}" if self.by_principal else self.folder

    def look_up(self, key: SessionKey, *, fresh: bool, resume: bool) -> LookupResult:
        """Lock the entry of a key for a new session, and return what was found. Blocking.

        With `fresh` the entry is emptied first. With `resume` its state is restored, whatever is
        granted now. The `entry` of the result is None if another server has locked it, or if its
        state is held back: the session is not persisted then. Raises OSError.
        """
        entry = self.store.open(key)
        if entry is None:
            return LookupResult(note=_HELD.format("" if self.by_principal else " in this folder"))
        try:
            if fresh:
                entry.remove()
                entry.saved, entry.problem, entry.removed = None, "", None
                entry.make()
            found = self._to_restore(entry, resume=resume)
            if resume and found.previous is None and not found.note:
                found = LookupResult(entry, note=NOTHING_KEPT)
        except BaseException:
            entry.close()
            raise
        if found.entry is None:
            entry.close()
        return found

    def grants(
        self, network: tuple[str, ...] | None, tools: tuple[str, ...] | None = None
    ) -> dict[str, tuple[str, ...]]:
        """Return the grants of a session that has requested these hosts and tool servers, by kind.

        None stands for all that the server allows.
        """
        wanted = {"network": network, "tools": tools}
        return {**self._grants, **{kind: own for kind, own in wanted.items() if own is not None}}

    def request(self, request: KernelRequest, saved: Saved) -> KernelRequest:
        """Return `request`, completed by the former requests of the persisted session.

        Hosts and limits that are no longer allowed are left out. Raises KernelMcpError for packages
        that are not allowed, and for a Python that cannot load the variables. Blocking.
        """
        asked, then = saved.asked, minor(saved.python[0])
        request = self._former(request, saved)
        interpreter = self._interpreter(request, saved)
        if interpreter is not PYTHON:
            return dataclasses.replace(request, interpreter=interpreter)
        if saved.dump and request.python[:1].isdigit() and minor(request.python) != then:
            raise HibernationError(
                f"its variables are those of Python {then}, and this session is to have "
                f"{request.python}"
            )
        python = request.python or str(asked.get("python") or "")
        here = self._own_python() if python or saved.dump else ""
        if python and f"{here}.".startswith(f"{python}."):
            python = ""  # the server's own environment fits, and has the operator's packages
        if not python and saved.dump and here and then != minor(here):
            python = then
        packages = request.packages
        if not packages and asked.get("packages"):
            packages = self._permits([str(each) for each in asked["packages"]])
        return dataclasses.replace(request, python=python, packages=packages)

    def _interpreter(self, request: KernelRequest, saved: Saved) -> Interpreter:
        """Return the interpreter of a persisted session. Raises HibernationError for another one.

        A session that has no variables may get any.
        """
        name, wanted = str(saved.asked.get("interpreter") or ""), request.interpreter
        if name == wanted.name or (wanted is not PYTHON and not saved.dump):
            return wanted
        found = self.interpreters.get(name)
        if found is None:
            raise HibernationError(f"it ran the kernel {name!r}, which --kernel does not name now")
        if wanted is not PYTHON:
            raise HibernationError(
                f"it ran {found.language}, and this session is to have {wanted.language}"
            )
        return found

    def _former(self, request: KernelRequest, saved: Saved) -> KernelRequest:
        """Return the request with the hosts, tools and limits of a persisted session.

        Those that are no longer allowed are left out.
        """
        asked, network, tools, limits = saved.asked, request.network, request.tools, request.limits
        if network is None and asked.get("network") is not None:
            own = self._settings.network
            before = map(str, asked["network"])
            network = tuple(each for each in before if "*" in own or each in own)
        if tools is None and asked.get("tools") is not None:
            known = {each.name for each in self._settings.tool_servers}
            tools = tuple(each for each in map(str, asked["tools"]) if each in known)
        if limits is None and asked.get("limits") is not None:
            limits = _within(asked["limits"], self._settings.limits)
        return dataclasses.replace(request, network=network, tools=tools, limits=limits)

    def timeout_s(self, saved: Saved) -> float:
        """Return the time limit of cells that the session had requested, in seconds; 0 for none.

        It is at most the maximum of the settings.
        """
        asked = saved.asked.get("timeout_s")
        if not isinstance(asked, (int, float)) or not asked > 0:
            return 0.0
        return min(float(asked), self._settings.max_timeout_s)

    def _own_python(self) -> str:
        """Return the Python version of the server's own environment; empty if unknown. Blocking.

        Raises EnvironmentBuildError for an environment that cannot be used.
        """
        given = self._settings.python
        return own_version(given) if given else platform.python_version()

    def _python_changed(self, saved: Saved) -> str:
        """Return a text if the operator's environment has another Python now, else empty.

        It is the reason why the variables are held back.
        """
        own = not (saved.asked.get("python") or saved.asked.get("interpreter"))
        if "/" not in self._settings.python or not own:
            return ""
        try:
            version = self._own_python()
        except EnvironmentBuildError:
            return ""  # the start of a kernel reports it
        if not version or minor(version) == minor(saved.python[0]):
            return ""
        return _MOVED.format(minor(saved.python[0]), self._settings.python, version)

    def _to_restore(self, entry: StoreEntry, *, resume: bool) -> LookupResult:
        saved = entry.saved
        if entry.unknown is not None:
            logger.warning("what was kept of a session stays as it is: %s", entry.unknown)
            note = _NEWER.format(UNUSED, entry.unknown, entry.key.name)
            return LookupResult(note=note, held_back=True, loss=Loss.of(note, entry.unknown.names))
        if entry.other is not None:
            logger.warning("what was kept of a session stays as it is: %s", entry.other)
            note = _OTHERS.format(UNUSED, entry.other, entry.key.name)
            return LookupResult(note=note, held_back=True, loss=Loss(note))
        cells = read_journal(entry.journal_path, after=0 if saved is None else saved.through)
        problem = entry.problem
        if saved is None and not problem and (min(cells) > 1 if cells else entry.leftover):
            problem = "its manifest is missing"
        if problem:
            logger.warning("what was kept of a session cannot be read: %s", problem)
            note = f"What was kept of this session cannot be read: {problem}. {_FILES_STAY}"
            return LookupResult(entry, None, note, loss=Loss(note))
        if saved is None:
            if not cells and entry.removed is not None:
                why, names = entry.removed
                note = _REMOVED.format(why, listing(names) or "unknown")
                return LookupResult(entry, note=note, loss=Loss.of(note, names))
            if not cells:
                return LookupResult(entry)
            saved = Saved(entry.key.folder, entry.key.name)
        when = moment(saved.moment or entry.used, self.store.now())
        if saved.dump and not resume and (why := self._why_held_back(saved)):
            note = _held_back(saved, when, why, entry.key)
            return LookupResult(note=note, held_back=True, loss=Loss.of(note, saved.names))
        if saved.dump and saved.python[1:] != (IMPLEMENTATION, platform.machine()):
            of = f"{saved.python[1]} on {saved.python[2]}"
            note = f"{UNUSED}: its variables are those of {of}"
            return LookupResult(note=note, held_back=True, loss=Loss.of(note, saved.names))
        dump, failure = None, ""
        try:
            dump = entry.dump()
            failure = missing(dump) if dump is not None else ""
        except HibernationError as error:
            failure = str(error)
        notes = [_BRANCHES] * entry.branched
        if entry.repaired:
            logger.warning("the manifest of a session was replaced by its copy: %s", entry.repaired)
            notes.append(_REPAIRED.format(entry.repaired))
        loss = None
        if not is_intact(entry.journal_path):
            notes.append(_UNTRACED.format(saved.through))
            loss = Loss(notes[-1])
        if entry.overtaken is not None:
            notes.append(_OVERTAKEN.format(listing(entry.overtaken) or "none"))
            loss = Loss.of(notes[-1], entry.overtaken)
        if entry.adopted:
            notes.append(_ADOPTED)
            loss = Loss(notes[-1])
            entry.set_adopted(False)
        note = ". ".join(notes)
        if entry.branched:
            entry.set_branched(False)
        return LookupResult(
            entry, PreviousSession(saved, when, dump, failure, cells), note, loss=loss
        )

    def _why_held_back(self, saved: Saved) -> str:
        """Return the reason why variables are restored only on request; empty without one."""
        asked = (saved.asked.get("network"), saved.asked.get("tools"))
        now = self.grants(*(None if each is None else tuple(map(str, each)) for each in asked))
        if wider := wider_grants(now, saved.doors):
            return _OPENED.format("; ".join(wider))
        return _UNDONE.format(saved.cell) if saved.undone else self._python_changed(saved)


NOTHING_KEPT = "Nothing was kept of a session of this name: this one begins fresh"
UNUSED = "What was kept of this session cannot be used, and stays as it is; this one is not kept"
_NEWER = (
    "{}: {}. A server of that version still brings it back; to forget it, call "
    "create_session(name={!r}, fresh=true)"
)
_OTHERS = (
    "{}: {}. Put the folders below `kept` back as they were, or call "
    "create_session(name={!r}, fresh=true) to forget what is there"
)
_REPAIRED = (
    "The record of this session was not as it was written ({}), and its copy beside it was used: "
    "what is saved is whole"
)
_UNTRACED = (
    "The record of the cells since the last save is not whole: what cells after cell {} did to "
    "variables is lost, if there were any"
)
_REMOVED = "What was kept of this session, with its files, was removed, as {}. Its variables: {}"
_OVERTAKEN = (
    "An older version of kernel-mcp has begun this session anew since it was saved last. What it "
    "kept is not here, and a server of that version brings it back. Its variables: {}"
)
_ADOPTED = (
    "A branch was adopted after that was saved: what the cells of the branch did to variables is "
    "lost"
)
_FILES_STAY = "Its files and packages are there; its variables are not"
_BRANCHES = (
    "Branches end with their server: those of this session are gone with their variables. Files "
    "that they had for themselves are in .branches"
)
NOT_KEPT = "Nothing is kept of this session beyond the server's end, and nothing was (see `info`)"
HELD_HERE = (
    "Branches of the session that was here before still have its folder: this one begins fresh, in "
    "another, and nothing of it is kept when the server ends"
)
_HELD = (
    "Another server that runs{} has the kept state of this session: this one begins fresh, and "
    "nothing of it is kept when the server ends"
)


def saved_of(
    entry: StoreEntry,
    request: KernelRequest,
    timeout_s: float,
    grants: Mapping[str, tuple[str, ...]],
) -> Saved:
    """Return the manifest of a session before its first save."""
    limits = request.limits
    asked = {
        "python": request.python,
        "handle": request.session,
        "interpreter": request.interpreter.name,
        "packages": [str(each) for each in request.packages],
        "network": None if request.network is None else [*request.network],
        "tools": None if request.tools is None else [*request.tools],
        "limits": None if limits is None else dataclasses.asdict(limits),
        "timeout_s": timeout_s,
    }
    return Saved(entry.key.folder, entry.key.name, doors=grants, asked=asked)


def lost_with(saved: Saved, ran: Sequence[int]) -> str:
    """Return a sentence on the cells that ran after the save; empty without any."""
    since = [number for number in ran if number > saved.through]
    if not since:
        return ""
    first, last = since[0], since[-1]
    which = f"Cell {first}" if first == last else f"Cells {first}\N{EN DASH}{last}"
    they, them = ("it", "it") if first == last else ("they", "them")
    return (
        f"{which} ran after that was saved, and what {they} did to variables is lost: run {them} "
        "again (read the code in the notebook, or as kernel://…/cells/N)."
    )


_OPENED = "since then more was opened ({}), and loading runs what the session left"
_UNDONE = (
    "its variables are as after cell {}, to before which the session had gone back since, and the "
    "server ended before it was saved again"
)


_MOVED = (
    "its variables are those of Python {}, and the environment {} has Python {} now. With "
    "resume=true they come back in the former Python, without the packages of that environment"
)


def _held_back(saved: Saved, when: str, why: str, key: SessionKey) -> str:
    name = key.name
    return (
        f"A session of this name was kept {when}, with {listing(saved.names)}. It was not brought "
        f"back: {why}. "
        f"create_session(name={name!r}, resume=true) takes it all the same, "
        f"create_session(name={name!r}, fresh=true) forgets it. This session begins fresh, is not "
        "kept, and ends when one of them is called"
    )


def _within(asked: Mapping[str, Any], own: Limits) -> Limits | None:
    """Return limits that a session had requested; None if the operator now permits less."""
    try:
        wanted = Limits(**asked)
    except TypeError:
        return None
    pairs = (
        (wanted.memory_bytes, own.memory_bytes),
        (wanted.cpus, own.cpus),
        (wanted.cpu_seconds, own.cpu_seconds),
    )
    fits = all(no_more_or_unlimited(mine, most) for mine, most in pairs)
    rest = dataclasses.replace(
        own,
        memory_bytes=wanted.memory_bytes,
        cpus=wanted.cpus,
        cpu_seconds=wanted.cpu_seconds,
    )
    return rest if fits else None
