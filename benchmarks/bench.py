"""The context of every group of figures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.results import Results


@dataclass(frozen=True, slots=True)
class Bench:
    """One run. `scratch` is a folder that goes with it; `quick` asks for a rough answer."""

    results: Results
    scratch: Path
    quick: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def rounds(self, usual: int, quick: int = 2) -> int:
        """How often to measure."""
        return quick if self.quick else usual

    def folder(self) -> Path:
        """A fresh folder; its name is short, since sockets are made below it."""
        made = self.scratch / str(next(self._numbers))
        made.mkdir()
        return made
