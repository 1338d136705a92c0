"""`Source`: code as text, with positions that stay valid when lines are rewritten.

Also script metadata (PEP 723), and checks of text before it is parsed.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from kernel_mcp.config.requirements import parse_entry
from kernel_mcp.config.values import parse_toml
from kernel_mcp.errors import InputError
from kernel_mcp.policy import MAX_SOURCE_LINE, Diagnostic, Kind, Severity
from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_START = re.compile(r"# /// (?P<type>[a-zA-Z0-9-]+)\s*$")
_COMMENT = re.compile(r"#(?: .*)?$")
_TOML_LINE = re.compile(r"line (\d{1,9}), column")


@dataclass(frozen=True, slots=True)
class ScriptMetadata:
    """Content of the PEP 723 block of a script. `requires_python` is None if not given."""

    dependencies: tuple[Requirement, ...] = ()
    requires_python: str | None = None


class ScriptMetadataError(InputError):
    """A metadata block is not valid. `line` counts from 1 in the script."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line} of the script: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    lines: tuple[str, ...]

    def line_of(self, text: str) -> int:
        """Return the line of a quoted value in the script; the block's first if it is not found."""
        for number, line in enumerate(self.lines, start=self.start + 1):
            if f'"{text}"' in line or f"'{text}'" in line:
                return number
        return self.start


def script_metadata(script: str) -> ScriptMetadata | None:
    """Return the metadata of a script, or None if it has no block.

    Raises ScriptMetadataError for a block that is not closed, not TOML, repeated, or has invalid
    dependencies or an invalid Python version.
    """
    lines = _lines(script)
    block = _block(lines)
    return None if block is None else _metadata(block)


def line_of_key(script: str, key: str) -> int:
    """Return the line of a metadata key, or else of its block; 0 without a readable block."""
    try:
        block = _block(_lines(script))
    except ScriptMetadataError:
        return 0
    return 0 if block is None else _line_of_key(block, key)


def _lines(script: str) -> list[str]:
    return script.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _block(lines: list[str]) -> _Block | None:
    """Return the only script block, or None. Raises ScriptMetadataError.

    A block ends at the last `# ///` of the comment lines that follow its start.
    """
    found: _Block | None = None
    index = below = closing = 0
    while index < len(lines):
        start = _START.match(lines[index])
        if start is None:
            index += 1
            continue
        if index >= below:
            below, closing = _comments(lines, index + 1)
        end = closing if closing > index else 0
        if start["type"] == "script":
            if not end:
                raise _unclosed(lines, index, below)
            if found is not None:
                raise ScriptMetadataError(
                    index + 1,
                    f"a second `# /// script` block (the first is on line {found.start}); "
                    "merge them into one",
                )
            found = _Block(index + 1, tuple(line[2:] for line in lines[index + 1 : end]))
        index = (end or index) + 1
    return found


def _comments(lines: list[str], start: int) -> tuple[int, int]:
    """Return the index after the comments from `start` on, and that of their last `# ///`, or 0."""
    below, closing = start, 0
    while below < len(lines) and _COMMENT.match(lines[below]):
        closing = below if lines[below].rstrip() == "# ///" else closing
        below += 1
    return below, closing


def _unclosed(lines: list[str], start: int, below: int) -> ScriptMetadataError:
    if below < len(lines) and lines[below].startswith("#"):
        reason = "every line of the metadata block must be `#` alone or begin with `# `"
        return ScriptMetadataError(below + 1, reason)
    reason = "the metadata block that begins here has no closing line `# ///`"
    return ScriptMetadataError(start + 1, reason)


def _metadata(block: _Block) -> ScriptMetadata:
    table = _toml(block)
    dependencies = table.get("dependencies", [])
    if not isinstance(dependencies, list):
        raise ScriptMetadataError(
            _line_of_key(block, "dependencies"),
            "`dependencies` must be a list of strings, for example "
            'dependencies = ["pandas>=2", "matplotlib"]',
        )
    packages = tuple(_requirement(block, entry) for entry in dependencies)
    requires = table.get("requires-python")
    if requires is not None:
        _check_python(block, requires)
    return ScriptMetadata(packages, requires)


def _toml(block: _Block) -> dict[str, Any]:
    try:
        return parse_toml("\n".join(block.lines))
    except (RecursionError, ValueError) as error:
        said, found, place = str(error).rpartition(" (at ")
        if not found:
            reason = f"the metadata cannot be read: {type(error).__name__}"
            raise ScriptMetadataError(block.start, reason) from None
        told = _TOML_LINE.match(place)
        line = block.start + (int(told[1]) if told else len(block.lines))
        reason = f"the metadata is not valid TOML: {said}"
        raise ScriptMetadataError(line, reason) from None


def _requirement(block: _Block, entry: object) -> Requirement:
    if not isinstance(entry, str):
        raise ScriptMetadataError(
            _line_of_key(block, "dependencies"),
            f"`dependencies` holds {entry!r}, which is not a string",
        )
    try:
        return parse_entry(entry)
    except ValueError as error:
        raise ScriptMetadataError(
            block.line_of(entry), f"`dependencies` has what is not a valid requirement: {error}"
        ) from None


def _check_python(block: _Block, requires: object) -> None:
    line = _line_of_key(block, "requires-python")
    if not isinstance(requires, str):
        raise ScriptMetadataError(line, '`requires-python` must be a string such as ">=3.11"')
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(requires)
    except InvalidSpecifier:
        raise ScriptMetadataError(
            line, f'`requires-python` is {requires!r}; expected a form such as ">=3.11"'
        ) from None


def _line_of_key(block: _Block, key: str) -> int:
    for number, line in enumerate(block.lines, start=block.start + 1):
        if line.lstrip().lstrip("\"'").startswith(key):
            return number
    return block.start


MAX_CODE = 256 * 1024
"""Most characters in one cell. Parsing the densest code of this length takes under a second."""

STRING = (
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:"""|\\?\Z)'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'''|\\?\Z)"
    r'|"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\\?\Z)'
    r"|'(?:[^'\\\n]|\\.)*(?:'|(?=\n)|\\?\Z)"
)
"""Pattern of a string literal without its prefix, closed or not."""

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Source:
    """Code in two forms with the same number of lines.

    original  the lines as sent, with normalized line endings
    lines     the lines as plain Python
    shifts    line number → characters that were removed from the start of the line
    """

    original: tuple[str, ...]
    lines: tuple[str, ...]
    shifts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, code: str) -> Source:
        """Split code at LF, CR LF and CR."""
        lines = tuple(_lines(code))
        return cls(original=lines, lines=lines)

    @property
    def text(self) -> str:
        """The plain Python form, lines joined by LF."""
        return "\n".join(self.lines)

    def rewritten(self, changes: dict[int, tuple[str, int]]) -> Source:
        """Return the source with lines replaced.

        `changes` maps line numbers to the new text and the characters cut from its start.
        """
        lines = list(self.lines)
        shifts = dict(self.shifts)
        for number, (text, cut) in changes.items():
            lines[number - 1] = text
            shifts[number] = shifts.get(number, 0) + cut
        return replace(self, lines=tuple(lines), shifts=shifts)

    def column_of_byte(self, line: int, offset: int) -> int:
        """Return the column (from 1, in characters) of a UTF-8 offset into a line, as `ast` counts.

        1 for a line that does not exist.
        """
        if not 1 <= line <= len(self.lines):
            return 1
        text = self.lines[line - 1]
        if text.isascii():
            return offset + 1
        return len(text.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore")) + 1

    def diagnostic(
        self, kind: Kind, severity: Severity, message: str, line: int | None, column: int | None
    ) -> Diagnostic:
        """Return a diagnostic for a position in the plain form, converted to the original."""
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
    """Return the text with each character that cannot be shown or sent replaced."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def guard(source: Source, code: str) -> Diagnostic | None:
    """Return the first error for which the text cannot be parsed, or None."""
    if len(code) > MAX_CODE:
        return source.diagnostic(
            "size",
            "error",
            f"the code has {len(code):,} characters and one cell takes {MAX_CODE:,}; "
            "split it, or put data into a file and read it from there",
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
