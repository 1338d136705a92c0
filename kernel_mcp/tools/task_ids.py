"""Ids of tasks, which only servers with the same key can make."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence

from kernel_mcp.records import dataclass


def sealed(key: bytes, principal: str, fields: Sequence[str]) -> str:
    """Return an id of these fields, which only servers with this key can make."""
    text = json.dumps([principal, *fields])
    mac = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]
    return ":".join([*fields, mac])


@dataclass(frozen=True, slots=True)
class CellTask:
    """The cell of a task. `created` is a time in milliseconds since 1970.

    `lasting` is the name by which later servers know the session of this handle; empty for none.
    """

    session: str
    lasting: str
    cell: int
    created: int

    def id(self, key: bytes, principal: str) -> str:
        """Return the id of the task, which only servers with this key can make."""
        fields = (f"cell-{self.cell}", self.session, self.lasting, f"{self.created:x}")
        return sealed(key, principal, fields)

    @classmethod
    def of(cls, text: str, key: bytes, principal: str) -> CellTask | None:
        """Return the task of an id; None unless it was made for this principal."""
        match text.split(":"):
            case [number, session, lasting, created, _]:
                try:
                    cell = int(number.removeprefix("cell-"))
                    found = cls(session, lasting, cell, int(created, 16))
                except ValueError:
                    return None
                made = found.id(key, principal)
                return found if hmac.compare_digest(made.encode(), text.encode()) else None
        return None
