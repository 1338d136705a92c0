"""Prints a conversation with the server as a person wants to read it."""

from __future__ import annotations

import textwrap
from typing import TextIO


class Transcript:
    """Writes titles, code and answers; in colour on a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colour = out.isatty()
        self._number = 0

    def note(self, text: str) -> None:
        """A line about what goes on."""
        self._line(self._paint("2", text))

    def title(self, tool: str, text: str) -> None:
        """The head of one call."""
        self._number += 1
        self._line("")
        self._line(self._paint("1", f"{self._number}. {text}") + self._paint("2", f"  ({tool})"))

    def code(self, text: str) -> None:
        """What was sent."""
        self._line(self._paint("36", textwrap.indent(text, "   > ", lambda _: True)))

    def answer(self, text: str, seconds: float) -> None:
        """What came back and after how long."""
        for line in text.rstrip("\n").splitlines():
            self._line(f"   {line}")
        shown = f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
        self._line(self._paint("2", f"   [{shown}]"))

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _paint(self, style: str, text: str) -> str:
        return f"\033[{style}m{text}\033[0m" if self._colour else text
