"""What a cell produces while it runs, as typed values in the order they happened.

Events are built only from validated iopub messages (see `channels`), so every field has the type
stated here whatever the kernel sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Stream:
    """Text written to stdout or stderr."""

    name: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """A MIME bundle: display data, the update of an earlier one, or the cell's result.

    `data` maps MIME type to a string (base64 for binary types) or, for JSON types, a JSON value.
    """

    data: dict[str, Any]
    metadata: dict[str, Any]
    display_id: str | None = None
    update: bool = False
    result: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """`clear_output`: drop what is shown, now or (`wait`) when the next output arrives."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended the cell. `traceback` has one string a frame, with ANSI codes."""

    name: str
    value: str
    traceback: tuple[str, ...]


Event: TypeAlias = Stream | Display | Clear | Failure
