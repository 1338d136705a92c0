"""`Policy`: which modules code of a session may import."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.policy.stdlib import DATA_MODULES, DEFAULT_MODULES, STRICT_MODULES

PROFILES = ("strict", "default", "data", "open")

STRICT_DENIED_BUILTINS: frozenset[str] = frozenset(
    {
        "__import__",
        "breakpoint",
        "compile",
        "eval",
        "exec",
        "globals",
        "input",
        "open",
        "vars",
    }
)

_ENTRY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[[^\]]*\])?\s*(?:[<>=!~;@(].*)?$")


@dataclass(frozen=True, slots=True)
class Policy:
    """The import allow-list of a session: a guard rail for well-meaning code, not a boundary.

    modules        names with everything below them; a dotted name brings its parents as bare
                   packages only
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
        entries = tuple(allow)
        if profile not in PROFILES:
            raise ConfigError(
                f"there is no profile {profile!r}; choose one of {', '.join(PROFILES)}"
            )
        base = STRICT_MODULES if profile == "strict" else DEFAULT_MODULES
        if profile == "data":
            base |= DATA_MODULES
        policy = cls(
            modules=base,
            allow_all=profile == "open" or any(entry.strip() == "*" for entry in entries),
            profile=profile,
            deny_builtins=STRICT_DENIED_BUILTINS if profile == "strict" else frozenset(),
        )
        return policy.with_modules(entry for entry in entries if entry.strip() not in ("", "*"))

    def with_modules(self, names: Iterable[str]) -> Policy:
        """The same policy with more names allowed, each also as an identifier."""
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
            added |= {name, identifier, identifier.lower()}
        return replace(self, modules=self.modules | added)

    def allows(self, module: str) -> bool:
        """Whether `import module` passes: it, a package above it or a module below it is listed."""
        if self.allow_all:
            return True
        parts = module.split(".")
        if any(".".join(parts[:count]) in self.modules for count in range(1, len(parts) + 1)):
            return True
        prefix = module + "."
        return any(name.startswith(prefix) for name in self.modules)

    def refusal(self, module: str) -> str:
        """The sentence that refuses `module` and says which flag permits it."""
        root = module.partition(".")[0]
        return (
            f"import of {module!r} is not allowed in this session. "
            f"Start the server with --allow {root} (or --allow '*') to permit it."
        )

    def to_json(self) -> dict[str, Any]:
        """The form the kernel reads at boot."""
        return {
            "allow_all": self.allow_all,
            "modules": sorted(self.modules),
            "profile": self.profile,
            "deny_builtins": sorted(self.deny_builtins),
        }
