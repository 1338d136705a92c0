"""One setting of the operator: its flag, its reader, and what a file that no flag names may do."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_mcp.config.narrowing import Narrows, never
from kernel_mcp.records import dataclass

ENV_PREFIX = "KERNEL_MCP_"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its name, its reader and its text in `--help` and docs/flags.md.

    `default` is the text that `read` turns into the default or, with `in_words`, a description of
    it. `narrows` is the rule for values from a file in the current folder that no flag names. Such
    a value is accepted only if it permits no more than the operator's.
    """

    name: str
    read: Callable[[Any], object]
    group: str
    metavar: str
    default: str
    help: str
    narrows: Narrows
    in_words: bool
    field: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return variable_of(self.name)


def variable_of(name: str) -> str:
    """Return the name of a setting's environment variable."""
    return ENV_PREFIX + name.upper().replace("-", "_")


_UNSET = object()


def flag(
    name: str,
    read: Callable[[Any], object],
    group: str,
    metavar: str,
    default: str,
    help: str,  # noqa: A002  # argparse calls it so
    *,
    value: object = _UNSET,
    narrows: Narrows = never,
) -> Any:
    """Return a dataclass field with a flag; its default is `value`, else `read(default)`."""
    in_words = value is not _UNSET
    option = Option(name, read, group, metavar, default, help, narrows, in_words)
    return dataclasses.field(
        default=value if in_words else read(default), metadata={"option": option}
    )


@dataclass(frozen=True, slots=True)
class IgnoredKeys:
    """Keys that were ignored in a file in the current folder that no flag names.

    Such a file may narrow what the operator permits, never widen it or name a path or a program.
    """

    file: Path
    keys: tuple[str, ...]

    def __str__(self) -> str:
        it = "it" if len(self.keys) == 1 else "them"
        flags = ", ".join(f"--{key}" for key in self.keys)
        return (
            f"{', '.join(self.keys)} in {self.file} ignored: a file that was found in the current "
            "folder may narrow what code may do, but not widen it, nor choose places and programs. "
            f"If you trust it, start the server with --config {shlex.quote(str(self.file))}; or "
            f"set {it} yourself: {flags}."
        )
