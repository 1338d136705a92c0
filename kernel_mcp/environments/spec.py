"""`EnvironmentSpec`: what an environment is asked to hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernel_mcp.environments.names import packages_for, requirement_for
from kernel_mcp.errors import InputError


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """A Python (version, path, or empty for the server's own) and packages.

    `packages` are PEP 508 requirements by name, without URLs.
    """

    python: str = ""
    packages: tuple[str, ...] = ()

    @classmethod
    def for_allow(
        cls, allow: Iterable[str], *, python: str = "", packages: Iterable[str] = ()
    ) -> EnvironmentSpec:
        """The operator's `--allow` entries and the packages one session asks for on top.

        Raises ConfigError for a bad entry, InputError for a bad package.
        """
        wanted = set(packages_for(allow))
        for text in packages:
            try:
                requirement = requirement_for(text)
            except ValueError as error:
                raise InputError(f"packages: {error}") from None
            if requirement is not None:
                wanted.add(str(requirement))
        return cls(python, tuple(sorted(wanted)))
