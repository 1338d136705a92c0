"""What a restrictive policy refuses in text that does not parse.

Such text normally cannot run either. It can when the session's Python is newer than the server's,
or when IPython finds a command in a ruin; so lines that look forbidden are refused all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kernel_mcp.policy import magics
from kernel_mcp.policy.diagnostics import Diagnostic
from kernel_mcp.policy.magics import command
from kernel_mcp.policy.model import Policy
from kernel_mcp.policy.source import Source

_COMMAND = re.compile(r"^\s*(?P<start>!|%{1,2}(?=\w))|=[ \t]*(?P<assigned>!(?!=)|%(?=[^\W\d]))")
_IMPORT = re.compile(
    r"(?:^|[;:])\s*(?:import\s+(?P<plain>[^\W\d][\w.]*)|from\s+(?P<source>[^\W\d][\w.]*)\s+import\b)"
)
_INSIDE = re.compile(
    r"\b(?P<name>get_ipython|__import__|__builtins__|__globals__|__subclasses__|__loader__)\b"
)


def salvage(source: Source, policy: Policy) -> tuple[Diagnostic, ...]:
    """The refusals, one for each line at most."""
    found = (_refusal(source, policy, number) for number in range(1, len(source.lines) + 1))
    return tuple(item for item in found if item is not None)


def _refusal(source: Source, policy: Policy, number: int) -> Diagnostic | None:
    line = source.lines[number - 1]
    match = _COMMAND.search(line)
    if match is not None:
        start = match.start(match.lastgroup or 0)
        magic = command(line[start:], number, start + 1)
        return None if magics.is_harmless(magic) else magics.refuse(source, magic)
    for module, column in _imports(line):
        if not policy.allows(module):
            return source.diagnostic("import", "error", policy.denial(module), number, column)
    match = _INSIDE.search(line)
    if match is not None:
        text = (
            f"{match['name']} reaches past the import policy and is not allowed in this session. "
            "Start the server with --allow '*' to permit it."
        )
        return source.diagnostic("attribute", "error", text, number, match.start() + 1)
    return None


def _imports(line: str) -> Iterator[tuple[str, int]]:
    for match in _IMPORT.finditer(line):
        group = match.lastgroup or "plain"
        yield match[group], match.start(group) + 1
