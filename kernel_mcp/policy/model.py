"""`Policy`: which modules code of a session may import; and what `check` answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from kernel_mcp.config.settings import PROFILES, Settings
from kernel_mcp.errors import ConfigError

Kind: TypeAlias = Literal[
    "syntax", "size", "encoding", "depth", "import", "builtin", "attribute", "magic", "name",
    "pep723",
]  # fmt: skip
Severity: TypeAlias = Literal["error", "warning"]

MAX_SOURCE_LINE = 300
_WINDOW = 100
_REFUSALS = frozenset({"size", "encoding", "depth", "import", "builtin", "attribute", "magic"})


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One remark about one place.

    `line` and `column` count from 1; `column` counts characters. `source_line` is that line of
    the code as it was sent, cut after 300 characters.
    """

    kind: Kind
    severity: Severity
    message: str
    line: int
    column: int
    source_line: str

    def render(self) -> str:
        """The remark, then the line with a caret under the place."""
        warning = "warning: " if self.severity == "warning" else ""
        text = f"line {self.line}, column {self.column}: {warning}{self.message}"
        if not self.source_line.strip() or self.column > len(self.source_line) + 1:
            return text
        start = max(0, self.column - 1 - _WINDOW // 2) if len(self.source_line) > _WINDOW else 0
        shown = self.source_line[start : start + _WINDOW]
        before = shown[: self.column - 1 - start]
        caret = "".join("\t" if char == "\t" else " " for char in before) + "^"
        return f"{text}\n    {shown}\n    {caret}"


@dataclass(frozen=True, slots=True)
class ImportUse:
    """A module that the code imports, and whether the policy allows it."""

    name: str
    allowed: bool
    line: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` finds in code that has not run.

    `valid` means that no diagnostic is an error. `note` says what is allowed, when something is
    not.
    """

    valid: bool
    diagnostics: tuple[Diagnostic, ...] = ()
    imports: tuple[ImportUse, ...] = ()
    note: str = ""

    @property
    def refusals(self) -> tuple[Diagnostic, ...]:
        """The errors for which the code must not run; empty when it may.

        Errors of syntax alone do not count, but they are told along with others. Errors of script
        metadata never count: a cell may hold such a block as text.
        """
        errors = [item for item in self.diagnostics if item.severity == "error"]
        if not any(item.kind in _REFUSALS for item in errors):
            return ()
        return tuple(item for item in errors if item.kind in _REFUSALS or item.kind == "syntax")

    @property
    def syntax_errors(self) -> tuple[Diagnostic, ...]:
        """Why the code could not be parsed, and so not be checked either."""
        return tuple(
            item for item in self.diagnostics if item.kind == "syntax" and item.severity == "error"
        )

    def render(self) -> str:
        """All diagnostics as text, errors first, or that there are none."""
        if not self.diagnostics:
            return "no problems found"
        ordered = sorted(self.diagnostics, key=lambda item: item.severity != "error")
        parts = [item.render() for item in ordered]
        return "\n".join([*parts, self.note] if self.note else parts)

    def to_json(self) -> dict[str, Any]:
        """The structured form for tool results."""
        return {
            "valid": self.valid,
            "diagnostics": [asdict(item) for item in self.diagnostics],
            "imports": [asdict(item) for item in self.imports],
        }


def words(text: str) -> frozenset[str]:
    """The words of a text as a set."""
    return frozenset(text.split())


STRICT_MODULES: frozenset[str] = words(
    """
    __future__ collections datetime itertools math queue random re stat statistics time
    unicodedata
    """
)
"""Pure computing: no files, no processes, no network.

`__future__` is an instruction to the compiler and gives nothing away.
"""

DEFAULT_MODULES: frozenset[str] = STRICT_MODULES | words(
    """
    abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath codecs
    colorsys compression concurrent.futures configparser contextlib contextvars copy csv
    dataclasses decimal difflib dis doctest email enum errno filecmp fnmatch fractions functools
    glob graphlib gzip hashlib heapq hmac html inspect io ipaddress json keyword linecache locale
    logging lzma mimetypes numbers operator pathlib plistlib pprint quopri reprlib sched secrets
    shlex sqlite3 string stringprep struct symtable tarfile tempfile textwrap threading timeit
    token tokenize tomllib traceback tracemalloc types typing unittest urllib.parse uuid warnings
    wave weakref xml zipfile zlib zoneinfo
    IPython.display
    """
)
"""A working notebook: the standard library that computes, parses, stores and formats.

Missing on purpose: everything that starts processes, opens sockets, loads native code or objects
that run code, changes the interpreter, or hands out modules that do (os, sys, subprocess, socket,
ctypes, shutil, importlib, signal, multiprocessing, http, pickle, builtins, gc, code, pty …).
"""

DATA_MODULES: frozenset[str] = words(
    """
    PIL matplotlib mpl_toolkits numpy openpyxl pandas polars pyarrow scipy seaborn sklearn sympy
    """
)
"""The packages most analyses begin with, by import name; the profile installs them."""

STRICT_DENIED_BUILTINS: frozenset[str] = words(
    "__import__ breakpoint compile eval exec globals input open vars"
)
"""What the strict profile takes away: files, and code made from text."""

HANDED_OUT: frozenset[str] = words(
    "builtins ctypes importlib nt os posix pty runpy shutil subprocess sys"
)
"""Modules that other modules keep as an attribute, so that `random._os` needs no import."""

HANDED_OUT_BY_STDLIB: frozenset[str] = HANDED_OUT | words(
    """
    _thread atexit fcntl gc grp http mmap multiprocessing pdb pkgutil pwd resource select
    selectors signal socket ssl
    """
)
"""As HANDED_OUT, with names that outside the standard library mean something else
(`scipy.signal`)."""

HINTS: dict[str, str] = {
    "os": "pathlib handles paths and files.",
    "shutil": "pathlib, zipfile and tarfile handle files.",
    "sys": "The `info` tool tells version and platform.",
    "platform": "The `info` tool tells version and platform.",
    "subprocess": "Sessions run Python only, without other programs.",
    "multiprocessing": "concurrent.futures.ThreadPoolExecutor and threading are allowed.",
    "importlib": "Write a plain import statement.",
    "pickle": "json, csv or sqlite3 keep data.",
    "requests": "Sandboxed sessions have no network.",
    "httpx": "Sandboxed sessions have no network.",
    "aiohttp": "Sandboxed sessions have no network.",
    "urllib.request": "Sandboxed sessions have no network.",
    "http": "Sandboxed sessions have no network.",
    "socket": "Sandboxed sessions have no network.",
}
"""What to do instead of the imports that are refused most."""


def profile_entries(settings: Settings) -> tuple[str, ...]:
    """All names the environment of the kernels has to serve, as `--allow` takes them."""
    if settings.profile != "data":
        return settings.allow
    return (*settings.allow, *sorted(DATA_MODULES))


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
