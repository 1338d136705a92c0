"""From what people write after `--allow` to requirements an installer understands."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernel_mcp.config.values import parse_entry
from kernel_mcp.environments.known import DISTRIBUTIONS, NAMESPACES
from kernel_mcp.errors import ConfigError

# Gone from the newest Python, still part of the oldest one that kernels run on.
_REMOVED_STDLIB = frozenset(
    {
        "aifc", "asynchat", "asyncore", "audioop", "binhex", "cgi", "cgitb", "chunk",
        "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis",
        "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
        "telnetlib", "uu", "xdrlib",
    }
)  # fmt: skip
_STDLIB = sys.stdlib_module_names | _REMOVED_STDLIB
_DISTRIBUTIONS_FOLDED = {name.casefold(): dist for name, dist in DISTRIBUTIONS.items()}


def packages_for(allow: Iterable[str]) -> tuple[str, ...]:
    """The requirements that bring the modules of `--allow` entries, sorted, without duplicates.

    Modules of the standard library and `*` need none. Raises ConfigError as `parse_entry` does.
    """
    found = set()
    for entry in allow:
        if entry.strip() in ("", "*"):
            continue
        try:
            requirement = requirement_for(entry)
        except ValueError as error:
            raise ConfigError(f"--allow: {error}") from None
        if requirement is not None:
            found.add(str(requirement))
    return tuple(sorted(found))


def requirement_for(entry: str) -> Requirement | None:
    """What to install for a module or package name, None when Python itself brings it.

    Raises ValueError as `parse_entry` does.
    """
    requirement = parse_entry(entry)
    name = distribution_for(requirement.name)
    if name is None:
        return None
    requirement.name = name
    return requirement


def distribution_for(name: str) -> str | None:
    """The normalised distribution that provides a module, or None for the standard library.

    A name nobody listed is taken to be a distribution's own, as it is for most packages.
    """
    parts = name.split(".")
    shared = parts[0] in NAMESPACES
    for count in range(len(parts), min(shared, len(parts) - 1), -1):
        known = _DISTRIBUTIONS_FOLDED.get(".".join(parts[:count]).casefold())
        if known is not None:
            return known
    if parts[0] in _STDLIB:
        return None
    return str(canonicalize_name(name if shared else parts[0]))


def normalise(requirements: Iterable[str]) -> tuple[str, ...]:
    """Requirements in one spelling and order, so that equal sets name one environment."""
    result = set()
    for text in requirements:
        requirement = parse_entry(text)
        requirement.name = str(canonicalize_name(requirement.name))
        result.add(str(requirement))
    return tuple(sorted(result))
