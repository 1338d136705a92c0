"""A progress bar for `env build`, drawn from the lines in which uv tells how far it is."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TextIO

import anyio

WIDTH = 28
REDRAW_S = 0.2
_RESOLVED, _FETCHED, _INSTALLED = 0.08, 0.55, 0.65
"""Shares of the whole after which a stage is done; compiling takes the rest."""
_CRAWL_S = 12.0
"""In a stage that tells nothing of itself the bar goes half of what is left in this time."""
_STARTS = re.compile(r"\s*Downloading (\S+) \(([\d.]+)([KMG])iB\)")
_ENDS = re.compile(r"\s*Downloaded (\S+)")
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


class Bar:
    """How far a build is: `tell` takes uv's lines, `text` is the bar as of now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._stage_began = clock()
        self._stage = "Resolving"
        self._from, self._to = 0.0, _RESOLVED
        self._share = 0.0
        self._sizes: dict[str, float] = {}
        self._done: set[str] = set()

    async def tell(self, line: str) -> None:
        """Take in one line."""
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word == "Resolved":
            self._enter("Downloading", _RESOLVED, _FETCHED)
        elif match := _STARTS.match(line):
            self._sizes[match[1]] = float(match[2]) * _MIB[match[3]]
        elif match := _ENDS.match(line):
            self._done.add(match[1])
        elif word == "Prepared":
            self._enter("Installing", _FETCHED, _INSTALLED)
        elif word == "Installed":
            self._enter("Compiling", _INSTALLED, 1.0)
        elif word == "Bytecode":
            self._enter("Finishing", 1.0, 1.0)

    def share(self) -> float:
        """How much is done, from 0 to 1: never less than before, never 1 before the end."""
        whole = sum(self._sizes.values())
        if self._stage == "Downloading" and whole:
            part = sum(size for name, size in self._sizes.items() if name in self._done) / whole
        else:
            elapsed = self._clock() - self._stage_began
            part = elapsed / (elapsed + _CRAWL_S)
        self._share = max(self._share, self._from + (self._to - self._from) * part)
        return self._share

    def text(self) -> str:
        """One line: the bar, the stage, what is on its way, and the seconds so far."""
        filled = round(self.share() * WIDTH)
        bar = "█" * filled + "░" * (WIDTH - filled)
        waiting = [name for name in self._sizes if name not in self._done]
        names = f" {', '.join(waiting)}" if waiting and self._stage == "Downloading" else ""
        return f"{bar} {self._clock() - self._began:4.0f} s  {self._stage}{names}"

    def _enter(self, stage: str, start: float, end: float) -> None:
        self._stage, self._from, self._to = stage, start, end
        self._stage_began = self._clock()


@asynccontextmanager
async def drawn(bar: Bar, terminal: TextIO) -> AsyncIterator[None]:
    """Draw the bar over itself inside this block; afterwards its line is empty again."""

    def draw(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        terminal.write(f"\r\x1b[K{text[:width]}")
        terminal.flush()

    async def redraw() -> None:
        while True:
            draw(bar.text())
            await anyio.sleep(REDRAW_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(redraw)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            draw("")
