"""What `check` answers: diagnostics with their places, and the text a model reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "syntax", "size", "encoding", "depth", "import", "builtin", "attribute", "magic", "name",
    "pep723",
]  # fmt: skip
Severity: TypeAlias = Literal["error", "warning"]

MAX_SOURCE_LINE = 300
_WINDOW = 100
_REFUSALS = frozenset({"size", "encoding", "depth", "import", "builtin", "attribute", "magic"})


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One remark about one place.

    `line` and `column` count from 1; `column` counts characters. `source_line` is that line of
    the code as it was sent, cut after 300 characters.
    """

    kind: Kind
    severity: Severity
    message: str
    line: int
    column: int
    source_line: str

    def render(self) -> str:
        """The remark, then the line with a caret under the place."""
        warning = "warning: " if self.severity == "warning" else ""
        text = f"line {self.line}, column {self.column}: {warning}{self.message}"
        if not self.source_line.strip() or self.column > len(self.source_line) + 1:
            return text
        start = max(0, self.column - 1 - _WINDOW // 2) if len(self.source_line) > _WINDOW else 0
        shown = self.source_line[start : start + _WINDOW]
        before = shown[: self.column - 1 - start]
        caret = "".join("\t" if char == "\t" else " " for char in before) + "^"
        return f"{text}\n    {shown}\n    {caret}"


@dataclass(frozen=True, slots=True)
class ImportUse:
    """A module that the code imports, and whether the policy allows it."""

    name: str
    allowed: bool
    line: int


@dataclass(frozen=True, slots=True)
class Report:
    """What is known about code that has not run.

    `valid` means that no diagnostic is an error. `note` says what is allowed, when something is
    not.
    """

    valid: bool
    diagnostics: tuple[Diagnostic, ...] = ()
    imports: tuple[ImportUse, ...] = ()
    note: str = ""

    @property
    def refusals(self) -> tuple[Diagnostic, ...]:
        """The errors for which the code must not run; empty when it may.

        Errors of syntax alone do not count, but they are told along with others. Errors of script
        metadata never count: a cell may hold such a block as text.
        """
        errors = [item for item in self.diagnostics if item.severity == "error"]
        if not any(item.kind in _REFUSALS for item in errors):
            return ()
        return tuple(item for item in errors if item.kind in _REFUSALS or item.kind == "syntax")

    @property
    def syntax_errors(self) -> tuple[Diagnostic, ...]:
        """Why the code could not be parsed, and so not be checked either."""
        return tuple(
            item for item in self.diagnostics if item.kind == "syntax" and item.severity == "error"
        )

    def render(self) -> str:
        """All diagnostics as text, errors first, or that there are none."""
        if not self.diagnostics:
            return "no problems found"
        ordered = sorted(self.diagnostics, key=lambda item: item.severity != "error")
        parts = [item.render() for item in ordered]
        return "\n".join([*parts, self.note] if self.note else parts)

    def to_json(self) -> dict[str, Any]:
        """The structured form for tool results."""
        return {
            "valid": self.valid,
            "diagnostics": [asdict(item) for item in self.diagnostics],
            "imports": [asdict(item) for item in self.imports],
        }


# Plain Python → syntax tree and code object, with everything the compiler says on the way.
