"""`Policy`: which modules code of a session may import."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.policy.stdlib import (
    DATA_MODULES,
    DEFAULT_MODULES,
    HINTS,
    STRICT_DENIED_BUILTINS,
    STRICT_MODULES,
)

PROFILES = ("strict", "default", "data", "open")

_ENTRY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[[^\]]*\])?\s*(?:[<>=!~;(].*)?$", re.ASCII)
_FAMILIAR = ("json", "math", "pathlib", "re", "statistics")


@dataclass(frozen=True, slots=True)
class Policy:
    """The import allow-list of a session: a guard rail for well-meaning code, not a boundary.

    modules        names allowed with everything below them; a dotted name brings the packages
                   above it, but nothing else that is in them
    allow_all      nothing is refused
    profile        the name of the list it began from
    deny_builtins  builtins that code may not use
    """

    modules: frozenset[str]
    allow_all: bool = False
    profile: str = "default"
    deny_builtins: frozenset[str] = frozenset()

    @classmethod
    def for_allow(cls, allow: Iterable[str], profile: str = "default") -> Policy:
        """The policy of a profile with the operator's `--allow` entries added.

        An entry is a module or distribution name, optionally with extras and a version
        specifier; `*` allows everything. Raises ConfigError for anything else.
        """
        if profile not in PROFILES:
            raise ConfigError(
                f"there is no profile {profile!r}; choose one of {', '.join(PROFILES)}"
            )
        entries = [entry.strip() for entry in allow if entry.strip()]
        allow_all = profile == "open" or "*" in entries
        base = STRICT_MODULES if profile == "strict" else DEFAULT_MODULES
        if profile == "data":
            base |= DATA_MODULES
        denied = STRICT_DENIED_BUILTINS if profile == "strict" and not allow_all else frozenset()
        policy = cls(modules=base, allow_all=allow_all, profile=profile, deny_builtins=denied)
        return policy.with_modules(entry for entry in entries if entry != "*")

    def with_modules(self, names: Iterable[str]) -> Policy:
        """The same policy with more names allowed, each also as an identifier in lower case.

        Raises ConfigError for an entry that is not a name with an optional version specifier.
        """
        added: set[str] = set()
        for entry in names:
            match = _ENTRY.match(entry)
            if match is None:
                raise ConfigError(
                    f"cannot read {entry!r} in the allow-list: expected a module or package name, "
                    "for example numpy, urllib.request or 'pandas>=2'"
                )
            name = match[1].rstrip(".-")
            identifier = name.replace("-", "_")
            added |= {name, identifier, name.lower(), identifier.lower()}
        return replace(self, modules=self.modules | added)

    def allows(self, module: str) -> bool:
        """Whether `import module` passes: listed itself, below a listed name, or above one."""
        return self.allows_members(module) or self._above_listed(module)

    def allows_members(self, module: str) -> bool:
        """Whether everything in `module` may be used; false for a package above a listed name."""
        if self.allow_all:
            return True
        parts = module.split(".")
        return any(".".join(parts[:count]) in self.modules for count in range(1, len(parts) + 1))

    def refusal(self, module: str) -> str:
        """The whole text that refuses `module`: as `denial`, and what is allowed."""
        return f"{self.denial(module)} Allowed: {self.summary()}."

    def denial(self, module: str) -> str:
        """The text that refuses `module`: what to do instead, and the flag that permits it."""
        hint = HINTS.get(module) or HINTS.get(module.partition(".")[0], "")
        if not hint and module.partition(".")[0] not in sys.stdlib_module_names:
            hint = "The `install` tool adds packages where the operator permits it."
        sentences = [
            f"import of {module!r} is not allowed in this session.",
            hint,
            f"Start the server with --allow {self.flag(module)} (or --allow '*') to permit it.",
        ]
        return " ".join(filter(None, sentences))

    def flag(self, module: str) -> str:
        """The shortest name that would allow `module` without allowing more than its package."""
        parts = module.removesuffix(".*").split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            if not self._above_listed(name):
                return name
        return ".".join(parts)

    def summary(self) -> str:
        """The allow-list in few words: what the operator added, and how much of the rest."""
        if self.allow_all:
            return "everything"
        base = STRICT_MODULES if self.profile == "strict" else DEFAULT_MODULES
        added = sorted(name for name in self.modules - base if name.isidentifier() or "." in name)
        familiar = ", ".join(name for name in _FAMILIAR if name in self.modules)
        count = len(self.modules & base)
        rest = f"{count} modules of the standard library, such as {familiar} (see `info`)"
        return f"{', '.join(added)} and {rest}" if added else rest

    def to_json(self) -> dict[str, Any]:
        """The form the kernel reads at boot."""
        return {
            "allow_all": self.allow_all,
            "modules": sorted(self.modules),
            "profile": self.profile,
            "deny_builtins": sorted(self.deny_builtins),
        }

    def _above_listed(self, module: str) -> bool:
        prefix = module + "."
        return any(name.startswith(prefix) for name in self.modules)
