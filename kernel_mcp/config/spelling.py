"""Names of settings that were misspelt, removed, or are those of other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernel_mcp.config.settings import OPTIONS
from kernel_mcp.config.values import close_to

_REMOVED = {
    "strict": "--profile strict is what it was",
    "allow-weaker-sandbox": "--sandbox bwrap,landlock is what it was",
    "install-timeout": "an installation has five minutes",
    "uv": "the uv installed with the server builds environments",
    "profile data": "name packages with --allow, such as --allow numpy,pandas",
    "checkpoints always": "a cell asks for a checkpoint by execute(checkpoint=true)",
    "hibernate-sessions": "--quota asleep=N bounds hibernated sessions",
    "hibernate-size": "--persist SIZE,TIME bounds what sessions save",
    "hibernate-disk": "--persist SIZE,TIME bounds what sessions save",
}
"""Settings, and values, of earlier versions, by name, with the replacement of each."""
_HTTP = "--http 127.0.0.1:8000 serves MCP over HTTP; without it, MCP is on stdin and stdout"
_MEANT = {
    "port": _HTTP,
    "host": _HTTP,
    "transport": _HTTP,
    "stdio": _HTTP,
    "verbose": "--log-level debug reports more, and --version the version",
}
"""Flags and commands of other servers, by name, with what they do here."""
_NEVER_MEANT = frozenset({"none"})
"""Values that remove protection: a misspelt name is never corrected to one."""


def explained(name: str) -> str:
    """Return what to use in place of a flag or command that does not exist; empty if unknown."""
    return replacement(name) or (f": {does}" if (does := _MEANT.get(name)) else "")


def replacement(name: str) -> str:
    """Return what replaces a removed setting; empty for other names."""
    return f" any more: {now}" if (now := _REMOVED.get(name)) else ""


def spellings(form: Callable[[str], str], value: str) -> dict[str, str]:
    """Return corrections by misspelt name: `form` of each setting's name, and of fixed values.

    A value, such as `strict`, is corrected to its setting with that value.
    """
    words = {
        form(word): form(option.name) + value.format(word)
        for option in OPTIONS
        for word in option.metavar.split("|")
        if word.islower() and word not in _NEVER_MEANT
    }
    return words | {form(option.name): form(option.name) for option in OPTIONS}


def nearest(name: str, known: Mapping[str, str]) -> str:
    """Return `; did you mean X?` for the entry of `known` with the closest name; else ""."""
    close = close_to(name, known, cutoff=0.55)
    return f"; did you mean {known[close[0]]}?" if close else ""
