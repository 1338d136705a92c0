"""Terminal emulation for output text: apply cursor movements, remove colours and titles.

A `Screen` follows one stream. Progress bars end up as their last state, however often they were
redrawn, and the work per character stays small whatever a hostile kernel prints.
"""

from __future__ import annotations

import re

from kernel_mcp.output.text import is_plain, revealed

LIVE_ROWS = 16
"""Rows at the end of a stream that cursor movements can still rewrite."""
LIVE_CHARS = 16 * 1024
"""Characters those rows may hold; longer ones become final."""
SEQUENCE_CHARS = 4096
"""Length above which an unfinished escape sequence is treated as text."""
MAX_COLUMN = 512
"""Cursor movements do not pad a row beyond this column."""

_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, erase
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC, DCS and the like: titles, links, images
    r"|\x1b[\]PX^_]"  # one that does not end must not swallow what follows
    r"|\x1b[ -/]*[0-Z\\^-~]"  # two characters: charsets, save and restore
    r"|\x1b"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_MOVES = re.compile(r"\x1b\[\d{0,9}[ABCDEFGJK]")
_REMOVED = re.compile(r"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x9f]+")
_LINE_FEEDS = re.compile("[\x0b\x0c]")
_TOKENS = re.compile(r"[^\n\r\x08\x1b]+|\n|\r|\x08+|\x1b\[(\d*)([A-Z])")


def clean(text: str) -> str:
    """Return `text` as a terminal shows it in the end."""
    if is_plain(text):
        return text
    screen = Screen()
    return screen.feed(text) + screen.flush()


class Screen:
    """A terminal for one stream: `feed` returns the text that has become final.

    The last rows stay in `live`, because a progress bar may yet rewrite them.
    """

    def __init__(self) -> None:
        self._rows = [""]
        self._row = 0
        self._column = 0
        self._redrawn: int | None = None
        self._unfinished = ""

    @property
    def live(self) -> str:
        """The rows that may still change."""
        if self._redrawn is not None:
            return "\n".join(self._rows[: self._redrawn] + self._redrawn_rows())
        return "\n".join(self._rows)

    @property
    def redrawing(self) -> bool:
        """True if the live rows belong to a progress bar that is being rewritten."""
        return self._redrawn is not None

    def feed(self, text: str) -> str:
        """Apply `text`; return the text that has scrolled out of the live rows and is final."""
        if not self._unfinished and is_plain(text):
            return self._append(text) if self._at_end() else self._type(text)
        text = self._unfinished + text
        self._unfinished = ""
        if tail := _UNFINISHED.search(text, max(0, len(text) - SEQUENCE_CHARS)):
            self._unfinished = tail.group()
            text = text[: tail.start()]
        return self._apply(text)

    def _apply(self, text: str) -> str:
        text = _reduce(text)
        if not self._at_end() or "\x08" in text or "\x1b" in text:
            return self._type(text)
        if "\r" in text:
            return self._type_lines(text)
        return self._append(text)

    def settle(self) -> str:
        """Make all rows final but those of a progress bar, as other output follows; return them."""
        if self._redrawn is None:
            return self.flush()
        return self._scroll(self._redrawn)

    def flush(self) -> str:
        """Make all rows final and return them; begin with an empty row."""
        rest, self._unfinished = self._unfinished, ""
        return self._apply(rest) + self._scroll(len(self._rows))

    def _at_end(self) -> bool:
        return self._row == len(self._rows) - 1 and self._column == len(self._rows[-1])

    def _append(self, text: str) -> str:
        """Add text that only moves forward, at the end of the last row."""
        if self._redrawn is not None and "\n" in text:
            row, text = text.split("\n", 1)
            self._rows[-1] += row
            text = f"{self.live}\n{text}"
            self._redrawn = None
        else:
            text = "\n".join(self._rows) + text
        start = len(text)
        for _ in range(LIVE_ROWS):
            start = text.rfind("\n", 0, start)
            if start < 0:
                break
        start += 1
        if len(text) - start > LIVE_CHARS:
            start = len(text)
            self._redrawn = None
        self._rows = text[start:].split("\n")
        self._row = len(self._rows) - 1
        self._column = len(self._rows[-1])
        return text[:start]

    def _type_lines(self, text: str) -> str:
        """Add text whose only movements are carriage returns, at the end of the last row."""
        head, *middle = text.split("\n")
        if not middle:
            return self._type(_overlaid(head))
        last = middle.pop()
        final = [self._type(_overlaid(head) + "\n")]
        if middle:
            final.append(self._append("".join(_row(line) + "\n" for line in middle)))
        final.append(self._type(_overlaid(last)))
        return "".join(final)

    def _type(self, text: str) -> str:
        """Add any text, token by token, wherever the cursor is."""
        final: list[str] = []
        rows = self._rows
        for match in _TOKENS.finditer(text):
            token = match.group()
            first = token[0]
            if first == "\n":
                self._column = 0
                self._row += 1
                if self._row == len(rows):
                    rows[:] = rows[: self._redrawn] + self._redrawn_rows()
                    rows.append("")
                    self._redrawn = None
                    if len(rows) > LIVE_ROWS:
                        final.append(self._scroll(1))
            elif first == "\r":
                self._column = 0
                self._mark_redrawn()
            elif first == "\x08":
                self._column = max(0, self._column - len(token))
            elif first == "\x1b":
                self._move(match.group(2), min(int(match.group(1) or -1), MAX_COLUMN))
            else:
                row = rows[self._row]
                if len(row) < self._column:
                    row = row.ljust(self._column)
                end = self._column + len(token)
                rows[self._row] = row[: self._column] + token + row[end:]
                self._column = end
                if end > LIVE_CHARS:
                    final.append(self._scroll(len(rows)))
                    rows = self._rows
        if sum(map(len, rows)) > LIVE_CHARS:
            final.append(self._scroll(len(rows)))
        return "".join(final)

    def _move(self, code: str, count: int) -> None:
        """Apply one cursor or erase sequence; `count` is -1 where the sequence gives none."""
        steps = max(1, count)
        row = self._rows[self._row]
        if code in "AF":
            self._row = max(0, self._row - steps)
            self._mark_redrawn()
        elif code in "BE":
            self._row = min(len(self._rows) - 1, self._row + steps)
        elif code == "C":
            self._column = min(self._column + steps, max(len(row), MAX_COLUMN))
        elif code == "D":
            self._column = max(0, self._column - steps)
        elif code == "G":
            self._column = steps - 1
        elif code == "K":
            start = 0 if count == 2 else self._column
            self._rows[self._row] = " " * self._column if count == 1 else row[:start]
            if count == 1:
                self._rows[self._row] += row[self._column :]
        elif code == "J" and count <= 0:
            self._rows[self._row] = row[: self._column]
            del self._rows[self._row + 1 :]
        if code in "EF":
            self._column = 0

    def _redrawn_rows(self) -> list[str]:
        """Return the rewritten rows, without the blanks that erased longer text."""
        if self._redrawn is None:
            return []
        return [row.rstrip(" ") for row in self._rows[self._redrawn :]]

    def _mark_redrawn(self) -> None:
        self._redrawn = self._row if self._redrawn is None else min(self._redrawn, self._row)

    def _scroll(self, count: int) -> str:
        """Make the first `count` rows final."""
        if count >= len(self._rows):
            text = self.live
            self._rows = [""]
            self._row = self._column = 0
            self._redrawn = None
            return text
        text = "".join(row + "\n" for row in self._rows[:count])
        del self._rows[:count]
        self._row = max(0, self._row - count)
        if self._redrawn is not None:
            self._redrawn = max(0, self._redrawn - count)
        return text


def _reduce(text: str) -> str:
    """Return `text` with only newline, tab, carriage return, backspace and known movements."""
    if "\x1b" in text:
        text = _ESCAPE.sub(_movement, text)
    text = text.replace("\r\n", "\n")
    text = _REMOVED.sub("", text)
    return revealed(_LINE_FEEDS.sub("\n", text))


def _movement(match: re.Match[str]) -> str:
    sequence = match.group()
    return sequence if _MOVES.fullmatch(sequence) else ""


def _final_row(line: str) -> str:
    """Return the row that a terminal shows after `line`, which moves by carriage returns only."""
    shown = ""
    for part in reversed(line.split("\r")):
        if len(part) > len(shown):
            shown += part[len(shown) :]
    return shown


def _row(line: str) -> str:
    return _final_row(line).rstrip(" ") if "\r" in line else line


def _overlaid(line: str) -> str:
    """Return a shorter equivalent of `line`, which moves by carriage returns only."""
    if line.count("\r") < 3:
        return line
    first, *others, last = line.split("\r")
    return f"{first}\r{_final_row(chr(13).join(others))}\r{last}"
