"""What agents ask to have installed, and the operator's say on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from packaging.requirements import Requirement

from kernel_mcp import profiles
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.names import requirement_for
from kernel_mcp.errors import ConfigError, InputError, InstallError

MAX_PACKAGES = 50
_SHOWN = 30


@dataclass(frozen=True, slots=True)
class InstallRules:
    """Which packages agents may add: by `install`, `create_session` and `run_script`.

    permitted   names of packages, each with the version specifier the operator gave or ""
    everything  whether all others may be added too
    """

    permitted: MappingProxyType[str, str]
    everything: bool = False

    @classmethod
    def of(cls, settings: Settings) -> InstallRules:
        """The rules of `--allow-install`; packages of `--allow` are permitted as well.

        Raises ConfigError.
        """
        found: dict[str, str] = {}
        for entry in (*profiles.entries(settings), *settings.allow_install):
            if entry == "*":
                continue
            try:
                requirement = requirement_for(entry)
            except ValueError as error:
                raise ConfigError(f"--allow-install: {error}") from None
            if requirement is not None:
                found[requirement.name] = str(requirement.specifier)
        return cls(MappingProxyType(found), everything="*" in settings.allow_install)

    @property
    def constraints(self) -> tuple[str, ...]:
        """The operator's version specifiers as requirements."""
        return tuple(f"{name}{spec}" for name, spec in self.permitted.items() if spec)

    def admit(self, packages: Iterable[str], *, standard_library: bool = True) -> tuple[str, ...]:
        """The requirements behind what was asked for, modules turned into their packages.

        With `standard_library` its modules are passed over, else refused. Raises InputError for
        what is not the name of a package, InstallError for what the operator does not permit.
        """
        texts = list(packages)
        if len(texts) > MAX_PACKAGES:
            raise InputError(
                f"{len(texts)} packages at once are too many: pass at most {MAX_PACKAGES}."
            )
        admitted: dict[str, str] = {}
        refused: list[str] = []
        for text in texts:
            requirement = _read(text)
            if requirement is None:
                if not standard_library:
                    raise InputError(
                        f"{text.strip()!r} is part of Python itself and needs no installation; "
                        "whether code may import it is up to the operator (--allow)."
                    )
                continue
            if not self.everything and requirement.name not in self.permitted:
                refused.append(requirement.name)
            admitted[requirement.name] = str(requirement)
        if refused:
            raise InstallError(self._refusal(refused))
        return tuple(admitted.values())

    def describe(self) -> str:
        """What may be installed, in few words."""
        if self.everything:
            return "any package"
        names = sorted(self.permitted)
        shown = ", ".join(names[:_SHOWN])
        return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown

    def _refusal(self, names: list[str]) -> str:
        listed = ", ".join(names)
        permitted = self.describe()
        return (
            f"This server does not permit installing {listed}: nothing was changed. "
            f"Permitted: {permitted or 'nothing'}. The operator can start the server with "
            f"--allow-install {','.join(names)} (or --allow-install '*')."
        )


def _read(text: str) -> Requirement | None:
    """Raises InputError for options, URLs, paths and anything that is not PEP 508."""
    try:
        return requirement_for(text)
    except ValueError as error:
        raise InputError(
            f"{error}. Packages are given by name, such as polars or 'pandas>=2,<3'; nothing was "
            "changed."
        ) from None
