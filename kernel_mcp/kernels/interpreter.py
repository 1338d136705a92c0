"""Interpreters: what runs the cells of a session, and which tools it does not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kernel_mcp.errors import InputError
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
    lacking   what to do instead of a tool that is not available, by the name of the tool
    """

    name: str
    language: str
    place: str = ""
    external: bool = False
    saves: bool = False
    checks: bool = False
    lacking: Mapping[str, str] = field(default_factory=dict, compare=False)

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


PYTHON = Interpreter("", "Python", saves=True)
"""This server's own kernels, which support all tools."""
