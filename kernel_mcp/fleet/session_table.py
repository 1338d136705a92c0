"""Table of a fleet's sessions: one row for each, written by the node that has the session.

A row has the node, its incarnation (`life`), and what was saved. Its epoch counts how often a node
has taken the session. Methods of `SessionTable` are blocking and raise OSError and NotOurs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from kernel_mcp.fleet.signed import NOTHING, Overtaken, Signed, StoredVersion
from kernel_mcp.records import dataclass

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Digest (SHA-256) and size in bytes of one saved part."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as all nodes know it.

    default   key by which its owner's default session is found; empty if it is not one
    node      node that has it, `life` its incarnation; both empty if no node has it
    epoch     number of times that a node has taken it
    ended     True if the last node released it in order, with everything saved
    since     when the last node released it, in seconds since 1970; 0 while a node has it
    saved     its manifest, as `sessions.store.Saved`; None before the first save
    parts     the saved ones of `workspace`, `layer`, `records` and `dump`
    branched  True if it had branches when it was last saved
    left_out  names of some files that were not saved; `omitted` is the number of all
    unheard   notices that were not delivered yet; `lost` is the loss in them, as `Loss`
    """

    handle: str
    principal: str
    name: str = ""
    default: str = ""
    node: str = ""
    life: str = ""
    epoch: int = 1
    ended: bool = False
    since: float = 0.0
    saved: Mapping[str, Any] | None = None
    parts: Mapping[str, SavedPart] = field(default_factory=dict)
    branched: bool = False
    left_out: tuple[str, ...] = ()
    omitted: int = 0
    unheard: tuple[str, ...] = ()
    lost: Mapping[str, Any] | None = None

    def left(self, moment: float, *, ended: bool) -> SessionRow:
        """Return the row as released at `moment`; `ended` is True if everything was saved."""
        return replace(self, node="", life="", ended=ended, since=moment)

    def value(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> SessionRow:
        """Return the row from the output of `value`. Raises ValueError for another format."""
        if value.get("format") != FORMAT:
            raise ValueError(
                f"the row of a session has format {value.get('format')!r}, this node knows {FORMAT}"
            )
        parts = {name: SavedPart(**part) for name, part in value["parts"].items()}
        rest = {name: each for name, each in value.items() if name not in ("format", "parts")}
        for name in ("left_out", "unheard"):
            rest[name] = tuple(rest[name])
        return cls(**rest, parts=parts)


@dataclass(frozen=True, slots=True)
class VersionedRow:
    """A row, and the version of its value when it was read."""

    version: StoredVersion
    row: SessionRow


class SessionTable:
    """The rows of a fleet, for reading and writing by one incarnation of a node."""

    def __init__(self, signed: Signed, node: str, life: str) -> None:
        self.signed = signed
        self.node = node
        self.life = life

    def find(self, handle: str, *, foreign: bool = False) -> VersionedRow | None:
        """Return the row of a session, or None if there is none or it has ended.

        With `foreign`, also if it was not written with a key of the fleet.
        """
        version = self.signed.latest(_session(handle), foreign=foreign)
        return (
            None if version.value is None else VersionedRow(version, SessionRow.of(version.value))
        )

    def find_by_name(self, principal: str, kind: str, name: str) -> VersionedRow | None:
        """Return the row of the session with a name; `kind` is NAMED or DEFAULT. See `find`."""
        version = self.signed.latest(_name(principal, kind, name))
        if version.value is None:
            return None
        found = self.find(str(version.value["handle"]))
        return found if found is not None and found.row.principal == principal else None

    def open(self, row: SessionRow) -> VersionedRow:
        """Add the row of a new session on this node, and its name.

        Names that were not written with a key of the fleet are free.
        Raises Overtaken if another session has taken the name meanwhile.
        """
        row = replace(row, node=self.node, life=self.life)
        known = VersionedRow(self.signed.advance(_session(row.handle), NOTHING, row.value()), row)
        for kind, name in _names(row):
            place = _name(row.principal, kind, name)
            before = self.signed.latest(place, foreign=True)
            there = None
            if before.value is not None:
                there = self.find(str(before.value["handle"]), foreign=True)
            try:
                if there is not None:
                    raise Overtaken(f"session {there.row.handle} has that name")
                self.signed.advance(place, before, {"handle": row.handle})
            except Overtaken:
                self.signed.advance(_session(row.handle), known.version, None)
                raise
        return known

    def take(self, known: VersionedRow) -> VersionedRow:
        """Assign a session to this node and return its new row.

        Raises Overtaken if another node was first.
        """
        row = replace(
            known.row,
            node=self.node,
            life=self.life,
            epoch=known.row.epoch + 1,
            ended=False,
            since=0.0,
        )
        return self.write(VersionedRow(known.version, row))

    def write(self, known: VersionedRow) -> VersionedRow:
        """Write a row, if its version is still the newest. Raises Overtaken."""
        name = _session(known.row.handle)
        return VersionedRow(self.signed.advance(name, known.version, known.row.value()), known.row)

    def forget(self, known: VersionedRow) -> None:
        """Remove the row and names of a session that has ended for good. Raises Overtaken."""
        row = known.row
        self.signed.advance(_session(row.handle), known.version, None)
        for kind, name in _names(row):
            place = _name(row.principal, kind, name)
            before = self.signed.latest(place)
            if before.value is not None and before.value["handle"] == row.handle:
                self.signed.advance(place, before, None)

    def is_mine(self, row: SessionRow) -> bool:
        """Return True if this incarnation of this node has the session."""
        return (row.node, row.life) == (self.node, self.life)


SESSIONS, NAMES, DATA = "sessions", "names", "data"
"""Folders of the store. The data of a session has the same name as its row."""


def _session(handle: str) -> str:
    return f"{SESSIONS}/{_digest(handle)}"


def _name(principal: str, kind: str, name: str) -> str:
    return f"{NAMES}/{_digest(json.dumps([principal, kind, name]))}"


def data_of(handle: str, digest: str = "") -> str:
    """Return the path in the store of a session's data, or of one part by its digest."""
    folder = f"{DATA}/{_digest(handle)}"
    return f"{folder}/{digest}" if digest else folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


NAMED, DEFAULT = "name", "default"


def _names(row: SessionRow) -> list[tuple[str, str]]:
    """Return kind and name of each name by which a session is found, beside its handle."""
    given = ((NAMED, row.name), (DEFAULT, row.default))
    return [(kind, name) for kind, name in given if name]
