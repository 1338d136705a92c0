"""Quotas of principals, from flags or a row of the tokens file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from kernel_mcp.records import dataclass
from kernel_mcp.units import count, number, size


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of one principal; None means the server's value, 0 no limit.

    sessions  sessions with a kernel at once
    asleep    hibernated sessions
    memory    bytes of all its kernels together
    disk      bytes of all its workspaces and added packages together
    cpu       processors of all its kernels together
    cells     cells that run or wait at once
    rate      calls a second, in bursts of at most as many
    body      bytes of its requests that are being read at once
    """

    sessions: int | None = None
    asleep: int | None = None
    memory: int | None = None
    disk: int | None = None
    cpu: float | None = None
    cells: int | None = None
    rate: float | None = None
    body: int | None = None

    def over(self, others: Quotas) -> Quotas:
        """Return these quotas, with those of `others` where they are None."""
        if self == _NONE:
            return others
        names = [entry.name for entry in fields(self)]
        own = {name: getattr(self, name) for name in names}
        return Quotas(
            **{name: getattr(others, name) if own[name] is None else own[name] for name in names}
        )


_NONE = Quotas()


def quotas(given: object) -> Quotas:
    """Read `sessions=4,memory=8G,cpu=1.5` or a table of these. Raises ValueError."""
    readers: dict[str, Callable[[object], Any]] = {
        "sessions": count,
        "asleep": count,
        "memory": size,
        "disk": size,
        "cpu": number,
        "cells": count,
        "rate": number,
        "body": size,
    }
    pairs = (
        [(str(name), value) for name, value in given.items()]
        if isinstance(given, Mapping)
        else [part.strip().partition("=")[::2] for part in str(given).split(",") if part.strip()]
    )
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name.strip() not in readers:
            raise ValueError(f"{name.strip()!r} is no quota; there are {', '.join(readers)}")
        found[name.strip()] = readers[name.strip()](value)
    return Quotas(**found)
