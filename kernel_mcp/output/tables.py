"""Tables of HTML as grids, by HTML's own rules for cells that span rows and columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from kernel_mcp.output.tags import Tag
from kernel_mcp.records import dataclass

MOST_COLSPAN = 1000
MOST_ROWSPAN = 65_534
"""The limits of browsers."""
MOST_FILLED = 50_000
"""Most places of a table that cells of other places span; rows beyond are counted."""
REPEATED_CHARS = 40
"""Characters of a cell's text that are repeated in each place that it spans."""


def span(tag: Tag, name: str) -> int:
    """Return `colspan` or `rowspan` of a cell, which is 1 unless it is a number."""
    text = tag.attribute(name).strip()[:10]
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    most = MOST_COLSPAN if name == "colspan" else MOST_ROWSPAN
    if name == "rowspan" and digits and not int(digits):
        return most
    return min(max(1, int(digits or 1)), most)


@dataclass(slots=True, eq=False)
class _Cell:
    """A cell from column `start` to before `end`, which covers `rows` more rows from `top` on."""

    top: int
    start: int
    end: int
    rows: int
    lines: Sequence[str]
    is_block: bool


class Grid:
    """A table in the making: cells are added from left to right, row by row."""

    def __init__(self) -> None:
        self.omitted = 0
        """Rows that are not kept, as their cells span too much."""
        self.heads = 0
        """Rows at the top that have the names of columns."""
        self._rows: list[list[_Cell]] = []
        self._new: list[tuple[int, int, Sequence[str], bool]] = []
        self._held: list[_Cell] = []
        self._filled = 0
        self._is_head = True
        self._in_row = False
        self._texts: list[list[str]] = []
        self._in_foot = False
        self._foot: list[int] = []
        """Places of rows of the foot, which are shown below all others."""

    def start_row(self) -> None:
        """Begin a row, which may stay empty."""
        self._in_row = True

    def add(self, tag: Tag, lines: Sequence[str], *, is_block: bool) -> None:
        """Add a cell to the current row; with `is_block` its lines must stay apart."""
        self._is_head = self._is_head and tag.name == "th"
        wide = high = 1
        if tag.text and "span" in tag.text.lower():
            wide, high = span(tag, "colspan"), span(tag, "rowspan")
        self._new.append((wide, high, lines, is_block))

    def end_row(self, *, in_head: bool) -> None:
        """End the current row, if there is one."""
        new, self._new = self._new, []
        is_head, self._is_head = in_head or self._is_head, True
        is_row, self._in_row = self._in_row or bool(new), False
        if not is_row:
            return
        self._filled += len(self._held)
        if self._filled > MOST_FILLED:
            self.omitted += 1
            return
        row = self._placed(new)
        if new and is_head and not self._in_foot and self.heads == len(self._rows):
            self.heads += 1
        if new:
            self._foot += [len(self._rows)] * self._in_foot
            self._rows.append(row)
        for cell in row:
            cell.rows -= 1
        self._held = [cell for cell in row if cell.rows]

    def end_group(self, *, begins_foot: bool) -> None:
        """End a group of rows, such as `<thead>`: no cell reaches beyond it."""
        self._held = []
        self._in_foot = begins_foot

    def end(self) -> None:
        """End the table: its foot moves below the other rows, wherever it stood."""
        foot = set(self._foot)
        order = [n for n in range(len(self._rows)) if n not in foot] + self._foot
        if self._foot and order != sorted(order):
            places = {old: new for new, old in enumerate(order)}
            self._rows = [self._rows[old] for old in order]
            for cell in {id(cell): cell for row in self._rows for cell in row}.values():
                cell.top = places[cell.top]

    def rows(self) -> list[list[str]]:
        """Return the text of each place; a cell that spans several is in each of them, shortened.

        Columns in which no cell begins are left out. A cell alone in its row is there once, unless
        it names columns.
        """
        if self._texts:
            return self._texts
        columns = sorted({cell.start for row in self._rows for cell in row})
        found: list[list[str]] = []
        room = MOST_FILLED
        for number, row in enumerate(self._rows):
            texts: list[str] = []
            is_alone = len(row) == 1 and number >= self.heads
            for cell in row:
                first, after = bisect_left(columns, cell.start), bisect_left(columns, cell.end)
                filled = max(0, first - len(texts))
                text = " ".join(cell.lines)
                short = text if len(text) <= REPEATED_CHARS else f"{text[:REPEATED_CHARS]}…"
                more = 0 if is_alone else max(0, after - len(texts) - filled - 1)
                room -= filled + more
                if room < 0:
                    break
                texts += [""] * filled
                if len(texts) < after:
                    texts += [text if cell.top == number else short, *[short] * more]
            if room < 0:
                self.omitted += len(self._rows) - len(found)
                break
            found.append(texts)
        self._texts = found
        return found

    def lines(self) -> list[str]:
        """Return a line for each row, ` | ` between cells; blocks have lines of their own."""
        found: list[str] = []
        for number, (row, texts) in enumerate(zip(self._rows, self.rows(), strict=False)):
            if any(cell.is_block for cell in row if cell.top == number):
                new = (cell for cell in row if cell.top == number)
                found += [line for cell in new for line in cell.lines if line.strip()]
            elif any(texts):
                found.append(" ".join(" | ".join(texts).split()))
        if self.omitted:
            found.append(f"[… {self.omitted:,} more rows, whose cells span too much …]")
        return found

    def _placed(self, new: Sequence[tuple[int, int, Sequence[str], bool]]) -> list[_Cell]:
        """Return the cells of a row by column: new ones go where none from above is."""
        row: list[_Cell] = list(self._held)
        column, above = 0, 0
        for wide, high, lines, is_block in new:
            while above < len(self._held) and self._held[above].start <= column:
                column = max(column, self._held[above].end)
                above += 1
            row.append(_Cell(len(self._rows), column, column + wide, high, lines, is_block))
            column += wide
        return sorted(row, key=attrgetter("start")) if self._held else row
