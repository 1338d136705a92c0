"""Inline script metadata (PEP 723): the `# /// script` block at the top of a script."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kernel_mcp.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_START = re.compile(r"# /// (?P<type>[a-zA-Z0-9-]+)\s*$")
_COMMENT = re.compile(r"#(?: .*)?$")
_TOML_PLACE = re.compile(r"(?P<reason>.*?) \(at (?:line (?P<line>\d+), column \d+|end of .*)\)$")


@dataclass(frozen=True, slots=True)
class ScriptMetadata:
    """What a script says it needs. `dependencies` are PEP 508 strings, each known to parse."""

    dependencies: tuple[str, ...] = ()
    requires_python: str | None = None


class ScriptMetadataError(InputError):
    """A metadata block that cannot be used. `line` counts from 1 in the script."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line} of the script: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    lines: tuple[str, ...]

    def line_of(self, text: str) -> int:
        """Where a quoted value stands in the script; the start of the block if it is not found."""
        for number, line in enumerate(self.lines, start=self.start + 1):
            if f'"{text}"' in line or f"'{text}'" in line:
                return number
        return self.start


def script_metadata(script: str) -> ScriptMetadata | None:
    """The metadata of a script, or None when it has no block.

    Raises ScriptMetadataError for a block that is not closed, not TOML, there twice, or holds
    dependencies or a Python version that cannot be read.
    """
    lines = script.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    block = _block(lines)
    return None if block is None else _metadata(block)


def _block(lines: list[str]) -> _Block | None:
    """The one script block. A block ends at the last `# ///` of the comments that follow it."""
    found: _Block | None = None
    index = 0
    while index < len(lines):
        start = _START.match(lines[index])
        if start is None:
            index += 1
            continue
        below = index + 1
        while below < len(lines) and _COMMENT.match(lines[below]):
            below += 1
        end = next((at for at in range(below - 1, index, -1) if lines[at].rstrip() == "# ///"), 0)
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
    for entry in dependencies:
        _check_requirement(block, entry)
    requires = table.get("requires-python")
    if requires is not None:
        _check_python(block, requires)
    return ScriptMetadata(tuple(dependencies), requires)


def _toml(block: _Block) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads("\n".join(block.lines))
    except tomllib.TOMLDecodeError as error:
        place = _TOML_PLACE.match(str(error))
        line = block.start
        reason = str(error)
        if place is not None:
            reason = place["reason"]
            line += int(place["line"] or len(block.lines))
        raise ScriptMetadataError(line, f"the metadata is not valid TOML: {reason}") from None
    except (RecursionError, ValueError) as error:
        reason = f"the metadata cannot be read: {type(error).__name__}"
        raise ScriptMetadataError(block.start, reason) from None
    return table


def _check_requirement(block: _Block, entry: object) -> None:
    if not isinstance(entry, str):
        raise ScriptMetadataError(
            _line_of_key(block, "dependencies"),
            f"`dependencies` holds {entry!r}, which is not a string",
        )
    try:
        Requirement(entry)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise ScriptMetadataError(
            block.line_of(entry), f"{entry!r} is not a valid requirement: {reason}"
        ) from None


def _check_python(block: _Block, requires: object) -> None:
    line = _line_of_key(block, "requires-python")
    if not isinstance(requires, str):
        raise ScriptMetadataError(line, '`requires-python` must be a string such as ">=3.11"')
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
