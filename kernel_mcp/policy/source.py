"""`Source`: code as text, with places that survive rewriting lines of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from kernel_mcp.policy.diagnostics import MAX_SOURCE_LINE, Diagnostic, Kind, Severity

MAX_CODE = 256 * 1024
"""Characters in one cell. Parsing the densest code of this length takes under a second."""

MAX_CHAIN = 10_000
"""Operators, calls and attributes in one expression.

Python 3.10 crashes on a syntax tree about 100 000 deep; later versions refuse a few thousand.
"""

STRING = (
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:"""|\\?\Z)'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'''|\\?\Z)"
    r'|"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\\?\Z)'
    r"|'(?:[^'\\\n]|\\.)*(?:'|(?=\n)|\\?\Z)"
)
"""A string literal, prefix left out, closed or not."""

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_CHAINS = re.compile(
    rf"(?:{STRING}|\#[^\n]*|\\\n)|(?P<open>[(\[{{])|(?P<close>[)\]}}])|(?P<end>[,;:])"
    r"|(?P<line>\n)|(?P<link>[.+\-*/%@&|^<>~!=])",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Source:
    """Code in two forms with the same number of lines.

    original  the lines as they were sent, every line ending alike
    lines     the same as plain Python
    shifts    line number → characters that were taken from the start of the line
    """

    original: tuple[str, ...]
    lines: tuple[str, ...]
    shifts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, code: str) -> Source:
        """Split code at the line ends Python knows."""
        lines = tuple(code.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
        return cls(original=lines, lines=lines)

    @property
    def text(self) -> str:
        """The plain Python form."""
        return "\n".join(self.lines)

    def rewritten(self, changes: dict[int, tuple[str, int]]) -> Source:
        """With lines replaced: line number → new text and how much was cut from its start."""
        lines = list(self.lines)
        shifts = dict(self.shifts)
        for number, (text, cut) in changes.items():
            lines[number - 1] = text
            shifts[number] = shifts.get(number, 0) + cut
        return replace(self, lines=tuple(lines), shifts=shifts)

    def column_of_byte(self, line: int, offset: int) -> int:
        """The column (from 1) of a UTF-8 offset into a line, as `ast` counts."""
        if not 1 <= line <= len(self.lines):
            return 1
        text = self.lines[line - 1]
        if text.isascii():
            return offset + 1
        return len(text.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore")) + 1

    def diagnostic(
        self, kind: Kind, severity: Severity, message: str, line: int | None, column: int | None
    ) -> Diagnostic:
        """A diagnostic at a place of the plain form, told in terms of the original."""
        number = min(max(line or 1, 1), len(self.original))
        shown = self.original[number - 1]
        place = (column or 1) + self.shifts.get(number, 0)
        return Diagnostic(
            kind=kind,
            severity=severity,
            message=_printable(message),
            line=number,
            column=min(max(place, 1), len(shown) + 1),
            source_line=_printable(shown[:MAX_SOURCE_LINE]),
        )


def _printable(text: str) -> str:
    """The text with what cannot be shown or sent replaced, character by character."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def guard(source: Source, code: str) -> Diagnostic | None:
    """The first reason not to hand the text to a parser at all, or None."""
    if len(code) > MAX_CODE:
        return source.diagnostic(
            "size",
            "error",
            f"the code has {len(code):,} characters and one cell takes {MAX_CODE:,}; "
            "split it, or put data into a file with write_file and read it from there",
            1,
            1,
        )
    for number, line in enumerate(source.original, start=1):
        match = _UNUSABLE.search(line)
        if match is not None:
            what = "a null byte" if match[0] == "\0" else "a lone surrogate, half a character"
            text = f"the code contains {what}, which Python source cannot hold"
            return source.diagnostic("encoding", "error", text, number, match.start() + 1)
    return None


def deepest_chain(text: str) -> tuple[int, int]:
    """The most links one expression can have in its syntax tree, and the line it ends on.

    An estimate from above for expressions that nest to the left: attributes, calls, subscripts
    and operators, added up over the brackets around them.
    """
    if len(text) < MAX_CHAIN:
        return 0, 1
    stack = [0]
    total = deepest = place = 0
    for match in _CHAINS.finditer(text):
        kind = match.lastgroup
        if kind == "link":
            stack[-1] += 1
            total += 1
        elif kind == "open":
            stack[-1] += 1
            stack.append(0)
            total += 1
        elif kind == "close" and len(stack) > 1:
            total -= stack.pop()
        elif kind == "end" or (kind == "line" and len(stack) == 1):
            total -= stack[-1]
            stack[-1] = 0
        if total > deepest:
            deepest, place = total, match.start()
    return deepest, text.count("\n", 0, place) + 1
