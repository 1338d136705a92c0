"""Shell commands and magics: which of them a restrictive policy lets through."""

from __future__ import annotations

import re

_SAFE_MAGICS = frozenset(
    {"capture", "matplotlib", "pdoc", "pinfo", "pinfo2", "precision", "psource"}
    | {"reset", "reset_selective", "time", "timeit", "who", "who_ls", "whos", "xmode"}
)
"""Magics that stay within Python; every policy permits them."""
_PLOT_SETTING = re.compile(r"InlineBackend\.\w+ *= *[\w\s'\"{},.:\[\]-]*")
"""What follows `%config` under every policy: it holds no call."""


class CommandNotAllowedError(PermissionError):
    """A shell command or a magic that reaches beyond Python, refused by the policy."""

    __module__ = "builtins"  # shown to the user without the name of this file

    def __init__(self, what: str) -> None:
        """`what` names the command."""
        super().__init__(
            f"{what} is not available in this session: shell commands and magics that start "
            "processes are off. Start the server with --allow '*' to permit them, or use Python."
        )


def is_harmless(name: str, line: str = "") -> bool:
    """Whether every policy permits the magic `name`; `line` is what follows it."""
    if name == "config":
        return _PLOT_SETTING.fullmatch(line) is not None
    return name in _SAFE_MAGICS
