"""What a fleet knows of its sessions: a row for each, which the node that has the session writes.

A row says which node that is, in which life of it, and what was saved. Its epoch counts how often
another node has gone on with the session. All methods block, and raise OSError, NotOurs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from kernel_mcp.fleet.signed import NOTHING, Overtaken, Signed, Version
from kernel_mcp.records import dataclass

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that was saved: SHA-256 of its bytes, and how many there are."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Row:
    """A session as all nodes know it.

    default   where its owner's default session is looked up; empty for one that is none
    node      the node that has it, and in `life` which life of that; empty for none
    epoch     how many times a node has taken it
    ended     whether the last one has let go of it in order: all of it was saved
    since     since when no node has had it, in seconds since 1970; 0 for one that a node has
    saved     its manifest, as `sessions.store.Saved`; None before anything was saved
    parts     `workspace`, `layer`, `records` and `dump`, as far as they are there
    left_out  some of the files that were not saved, `omitted` are all
    unheard   notices that no delivered answer has carried, and the loss that is in them, as `Loss`
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
    parts: Mapping[str, Part] = field(default_factory=dict)
    branched: bool = False
    left_out: tuple[str, ...] = ()
    omitted: int = 0
    unheard: tuple[str, ...] = ()
    lost: Mapping[str, Any] | None = None

    def left(self, moment: float, *, ended: bool) -> Row:
        """The row of a session that no node has from a moment on."""
        return replace(self, node="", life="", ended=ended, since=moment)

    def value(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Row:
        """What `value` has made. Raises ValueError for another format."""
        if value.get("format") != FORMAT:
            raise ValueError(
                f"the row of a session has format {value.get('format')!r}, this node knows {FORMAT}"
            )
        parts = {name: Part(**part) for name, part in value["parts"].items()}
        rest = {name: each for name, each in value.items() if name not in ("format", "parts")}
        for name in ("left_out", "unheard"):
            rest[name] = tuple(rest[name])
        return cls(**rest, parts=parts)


@dataclass(frozen=True, slots=True)
class Known:
    """A row, and the version that it was read in."""

    version: Version
    row: Row


class Rows:
    """The rows of a fleet, as one life of one node sees and writes them."""

    def __init__(self, signed: Signed, node: str, life: str) -> None:
        self.signed = signed
        self.node = node
        self.life = life

    def find(self, handle: str) -> Known | None:
        """The row of a session; None where there is none, or it has ended."""
        version = self.signed.latest(_session(handle))
        return None if version.value is None else Known(version, Row.of(version.value))

    def named(self, principal: str, kind: str, name: str) -> Known | None:
        """The row of the session that has a name, as `names` or as a default one; see `find`."""
        version = self.signed.latest(_name(principal, kind, name))
        if version.value is None:
            return None
        found = self.find(str(version.value["handle"]))
        return found if found is not None and found.row.principal == principal else None

    def open(self, row: Row) -> Known:
        """Enter a new session, and the name that it has.

        Raises Overtaken where another session has got the name meanwhile.
        """
        row = replace(row, node=self.node, life=self.life)
        known = Known(self.signed.advance(_session(row.handle), NOTHING, row.value()), row)
        for kind, name in _names(row):
            place = _name(row.principal, kind, name)
            before = self.signed.latest(place)
            there = None if before.value is None else self.find(str(before.value["handle"]))
            try:
                if there is not None:
                    raise Overtaken(f"session {there.row.handle} has that name")
                self.signed.advance(place, before, {"handle": row.handle})
            except Overtaken:
                self.signed.advance(_session(row.handle), known.version, None)
                raise
        return known

    def take(self, known: Known) -> Known:
        """Have this node go on with a session; one node alone can. Raises Overtaken."""
        row = replace(
            known.row,
            node=self.node,
            life=self.life,
            epoch=known.row.epoch + 1,
            ended=False,
            since=0.0,
        )
        return self.write(Known(known.version, row))

    def write(self, known: Known) -> Known:
        """Replace the row that was read in a version by another. Raises Overtaken."""
        name = _session(known.row.handle)
        return Known(self.signed.advance(name, known.version, known.row.value()), known.row)

    def forget(self, known: Known) -> None:
        """A session has ended for good. Raises Overtaken."""
        row = known.row
        self.signed.advance(_session(row.handle), known.version, None)
        for kind, name in _names(row):
            place = _name(row.principal, kind, name)
            before = self.signed.latest(place)
            if before.value is not None and before.value["handle"] == row.handle:
                self.signed.advance(place, before, None)

    def is_mine(self, row: Row) -> bool:
        """Whether this life of this node has a session."""
        return (row.node, row.life) == (self.node, self.life)


SESSIONS, NAMES, DATA = "sessions", "names", "data"
"""Folders of the store. What was saved of a session has the name of its row."""


def _session(handle: str) -> str:
    return f"{SESSIONS}/{_digest(handle)}"


def _name(principal: str, kind: str, name: str) -> str:
    return f"{NAMES}/{_digest(json.dumps([principal, kind, name]))}"


def data_of(handle: str, digest: str = "") -> str:
    """Where what was saved of a session is, or one part of that."""
    folder = f"{DATA}/{_digest(handle)}"
    return f"{folder}/{digest}" if digest else folder


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:40]


NAMED, DEFAULT = "name", "default"


def _names(row: Row) -> list[tuple[str, str]]:
    """What leads to a session besides its handle."""
    given = ((NAMED, row.name), (DEFAULT, row.default))
    return [(kind, name) for kind, name in given if name]
