"""Windows of lines out of text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """Some lines of a text.

    `first` is the number of the first line, from 0; `total` counts the lines of the whole text.
    `cut` characters at the end of the last line were left out because it is too long.
    """

    text: str
    first: int
    lines: int
    total: int
    cut: int = 0

    @property
    def next(self) -> int | None:
        """The offset at which to read on, or None at the end."""
        after = self.first + self.lines
        return after if after < self.total else None


def page_of(pieces: Iterable[str], *, offset: int, limit: int, characters: int) -> Page:
    """At most `limit` lines (0: as many as fit) from line `offset` on, in `characters` characters.

    Whole lines only, but for one that is too long on its own. Reads all pieces to count the lines.
    """
    window: list[str] = []
    size = skipped = found = total = after = 0
    line_open = ends_line = True
    for piece in filter(None, pieces):
        breaks = piece.count("\n")
        total += breaks
        ends_line = piece.endswith("\n")
        start = 0
        if skipped < offset:
            if skipped + breaks < offset:
                skipped += breaks
                continue
            start = _after_breaks(piece, offset - skipped)
            skipped = offset
        if size <= characters and not (limit and found >= limit):
            window.append(piece[start:])
            size += len(piece) - start
            found += piece.count("\n", start)
        elif line_open:
            end = piece.find("\n")
            after += len(piece) if end < 0 else end
            line_open = end < 0
    text = "".join(window)
    if limit:
        text = text[: _after_breaks(text, limit)]
    cut = 0
    if len(text) > characters:
        line_end = text.find("\n")
        whole = text.rfind("\n", 0, characters) + 1
        if not whole:
            cut = (len(text) + after if line_end < 0 else line_end) - characters
        text = text[: whole or characters]
    lines = text.count("\n") + (bool(text) and not text.endswith("\n"))
    return Page(text, offset, lines, total + (not ends_line), cut)


def _after_breaks(text: str, count: int) -> int:
    """Where the line begins that follows `count` line ends; the end of the text when too few."""
    position = 0
    for _ in range(count):
        position = text.find("\n", position) + 1
        if not position:
            return len(text)
    return position
