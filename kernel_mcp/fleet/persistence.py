"""Persistence of a node's sessions: all of them, by their handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.config.persist import Persist
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.fleet.session_table import SessionRow
from kernel_mcp.fleet.shared_store import SharedStore
from kernel_mcp.sessions.grants import grants_of
from kernel_mcp.sessions.manifest import OF_PRINCIPAL, SessionKey
from kernel_mcp.sessions.notifications import Loss, together
from kernel_mcp.sessions.persistence import DEFAULT_NAME, LookupResult, Persistence
from kernel_mcp.units import GIB

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FLEET = "fleet"
"""Subfolder of the state folder for nodes."""
DEFAULT_PERSIST = Persist(2 * GIB, 7 * 24 * 3600.0)
_CAUSE = "the node of this session was lost"
_LOST = (
    "The node that had this session was lost. Variables and files are as they were when it was "
    "last saved; what cells did after that is lost, and nothing was run again: run again what is "
    "still wanted"
)
_NOTHING = (
    "The node that had this session was lost before anything of it was saved: its variables, "
    "files and packages are gone, and nothing was run again"
)
_LEFT_OUT = (
    "Of its files {} had not been saved and are gone: pipes, sockets, what cannot be read, or "
    "what is beyond its disk limit ({})"
)


class FleetPersistence(Persistence):
    """Persists every session that has a row.

    `taken_over` maps handles to the rows of sessions that were taken over from other nodes.
    """

    store: SharedStore

    def __init__(
        self,
        store: SharedStore,
        settings: Settings,
        sandbox: str,
        permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
    ) -> None:
        super().__init__(
            store,
            folder="",
            bare=False,
            by_principal=True,
            grants=grants_of(settings, sandbox),
            settings=settings,
            permits=permits,
        )
        self.taken_over: dict[str, SessionRow] = {}

    def key(
        self, principal: str, name: str, *, default: bool, handle: str = ""
    ) -> SessionKey | None:
        """See `Persistence`. The key contains the handle."""
        return key_of(principal, handle or name or DEFAULT_NAME)

    def has(self, principal: str, name: str) -> bool:
        """Return False: names of sessions are looked up in the rows of the fleet."""
        return False

    def look_up(self, key: SessionKey, *, fresh: bool, resume: bool) -> LookupResult:
        """See `Persistence`. The result also reports what the previous node lost."""
        found = super().look_up(key, fresh=fresh, resume=resume)
        row = self.taken_over.pop(key.name, None)
        if row is None:
            return found
        notes, losses = [*row.unheard, *([found.note] if found.note else [])], [found.loss]
        if row.lost is not None:
            losses.append(Loss(**{**row.lost, "names": tuple(row.lost["names"])}))
        if not row.ended:
            notes.append(_LOST if row.saved is not None else _NOTHING)
            losses.append(Loss(_CAUSE, kept=row.saved is not None))
        if row.omitted:
            notes.append(_LEFT_OUT.format(row.omitted, ", ".join(row.left_out)))
        told = ". ".join(each.rstrip(".") for each in notes)
        return replace(found, note=told, loss=together(losses))


def key_of(principal: str, handle: str) -> SessionKey:
    """Return the key of a session on the disk of its node."""
    return SessionKey(f"{OF_PRINCIPAL}{principal}", handle)


def factory_with(
    make: Callable[[Path], SharedStore], kept: list[FleetPersistence]
) -> Callable[..., tuple[Persistence | None, str]]:
    """Return a function like `sessions.persistence_setup.persistence_of` for a node of a fleet.

    `make` makes its store in the state folder. The persistence object is appended to `kept`.
    """

    def keep(
        settings: Settings,
        state: Path,
        sandbox: str,
        permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
        /,
    ) -> tuple[Persistence | None, str]:
        store = make(state)
        try:
            store.make()
        except OSError as reason:
            raise KernelMcpError(f"sessions of a fleet cannot be kept here: {reason}") from reason
        kept.append(FleetPersistence(store, settings, sandbox, permits))
        return kept[0], ""

    return keep
