"""The streams of one cell as terminals show them: rows that may change yet, then final text."""

from __future__ import annotations

import time

from kernel_mcp.output.events import Stream
from kernel_mcp.output.items import StreamName
from kernel_mcp.output.terminal import Screen
from kernel_mcp.output.text import stripped, tail_of
from kernel_mcp.output.transcript import PIECE_CHARS, Transcript

WORK_S = 0.05
"""Time that one event may take; of what is left of it, control codes are dropped unread."""
LINE_CHARS = 500
"""A progress line is at most this long."""


class Streams:
    """The live rows of stdout and stderr; what becomes final goes to `transcript`."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._screens: dict[StreamName, Screen] = {"stdout": Screen(), "stderr": Screen()}
        self._current: StreamName = "stdout"

    @property
    def shown(self) -> tuple[str, str]:
        """The live rows of stdout and of stderr."""
        return self._screens["stdout"].live, self._screens["stderr"].live

    @property
    def newest_line(self) -> str:
        """The newest line that is not blank."""
        live = self._screens[self._current].live
        return tail_of(live.rstrip().rpartition("\n")[2].strip(), LINE_CHARS)

    def live(self, name: StreamName) -> str:
        """The live rows of one stream."""
        return self._screens[name].live

    def order(self) -> list[StreamName]:
        """The streams in the order their live rows are shown: progress bars come last."""
        names: list[StreamName] = ["stdout", "stderr"]
        return sorted(names, key=lambda name: self._screens[name].redrawing)

    def write(self, event: Stream) -> None:
        """Add what the cell printed."""
        if event.name != self._current:
            self._transcript.write(self._current, self._screens[self._current].settle())
            self._current = event.name
        screen, text = self._screens[event.name], event.text
        end = time.perf_counter() + WORK_S
        for start in range(0, len(text), PIECE_CHARS):
            if start and time.perf_counter() > end:
                self._transcript.write(event.name, screen.flush())
                self._transcript.write(event.name, stripped(text[start:]))
                break
            self._transcript.write(event.name, screen.feed(text[start : start + PIECE_CHARS]))

    def settle(self, *, force: bool) -> None:
        """Make the live rows final, with `force` even those of a progress bar."""
        for name in self.order():
            screen = self._screens[name]
            self._transcript.write(name, screen.flush() if force else screen.settle())

    def clear(self) -> None:
        """Forget the live rows."""
        self._screens = {"stdout": Screen(), "stderr": Screen()}
