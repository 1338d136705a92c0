"""Interpreters: what runs the cells of a session, and which tools it does not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Protocol

from kernel_mcp.errors import InputError
from kernel_mcp.notebooks.metadata import PYTHON_METADATA
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The kind of kernel that a session has.

    name      by which requests choose it; empty for this server's own Python
    language  language of its cells, as people write it
    place     where code runs, if not in a sandbox of this server; else empty
    external  True if the kernel and its variables outlive the session
    saves     True if variables can be saved, so that a session can be hibernated and kept
    checks    True if a kernel checks syntax itself; else this server does, as Python's
    state     what ends with a kernel, in words
    notebook  the fields `kernelspec` and `language_info` of its notebooks
    lacking   what to do instead of a tool that is not available, by the name of the tool
    """

    name: str
    language: str
    place: str = ""
    external: bool = False
    saves: bool = False
    checks: bool = False
    state: str = "variables, functions and loaded packages"
    notebook: Mapping[str, Any] = field(default_factory=lambda: PYTHON_METADATA, compare=False)
    lacking: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> frozenset[str]:
        """Names of the kernel and its language in notebooks and requests, in lower case."""
        spec, info = self.notebook["kernelspec"], self.notebook["language_info"]
        known = (self.name, spec["name"], spec["language"], info["name"])
        return frozenset(each.lower() for each in known if each)

    @property
    def remark(self) -> str:
        """A sentence that every answer of a session includes; empty for none."""
        if not self.place:
            return ""
        kind = "an external" if self.external else f"a {self.language}"
        return f"outside the sandbox, in {kind} kernel: {self.place}"

    @property
    def description(self) -> str:
        """A clause that describes the sessions."""
        if self.external:
            return f"this session is attached to an external kernel ({self.place})"
        return f"this session runs {self.language}"

    def offers(self, tool: str) -> bool:
        """Return True if a tool is available."""
        return tool not in self.lacking

    def require(self, tool: str) -> None:
        """Raise InputError if a tool is not available, with what to do instead."""
        if not self.offers(tool):
            raise InputError(f"{tool} is not available: {self.description}. {self.lacking[tool]}")


PYTHON_STATE = "variables, imports and definitions"
PYTHON = Interpreter("", "Python", saves=True, state=PYTHON_STATE)
"""This server's own kernels, which support all tools."""


class Snapshots(Protocol):
    """Dumps of variables by kernels that do not support this server's own requests."""

    async def write(
        self, path: Path, *, max_bytes: int, leave: Iterable[str], seconds: float
    ) -> tuple[Mapping[str, Any], int, str]:
        """Write the variables but those in `leave` to `path`.

        Returns the kernel's description, which is hostile data, and size and checksum of the file.
        Raises HibernationError, OSError.
        """

    async def read(self, path: Path, *, leave: Iterable[str], seconds: float) -> Mapping[str, Any]:
        """Load the variables in `path` but those in `leave`; return the kernel's description.

        Raises HibernationError, OSError.
        """
