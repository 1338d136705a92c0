"""The policy: what code may import, and what is said about code before it runs.

A guard rail for well-meaning code. The boundary is the sandbox.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from kernel_mcp.config.settings import PROFILES, TOOL_GROUPS, Settings
from kernel_mcp.config.values import parse_entry
from kernel_mcp.errors import ConfigError
from kernel_mcp.records import dataclass

# The profiles: what each lets code do, which of them is in force, and how that is said.


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

GUARDED_MODULES: frozenset[str] = STRICT_MODULES | words(
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
"""A working notebook with no boundary but this list: the standard library that computes, parses,
stores and formats.

Missing on purpose: everything that starts processes, opens sockets, loads native code or objects
that run code, changes the interpreter, or hands out modules that do (os, sys, subprocess, socket,
ctypes, shutil, importlib, signal, multiprocessing, http, pickle, builtins, gc, code, pty …).
"""

DATA_MODULES: frozenset[str] = words(
    """
    PIL altair jinja2 lxml matplotlib mpl_toolkits numpy openpyxl pandas plotly polars pyarrow
    scipy seaborn sklearn statsmodels sympy tabulate tqdm
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
}
"""What to do instead of the imports that are refused most."""

NETWORK_MODULES: frozenset[str] = words(
    "aiohttp ftplib http httpx requests smtplib socket ssl urllib.request urllib3 websockets"
)
"""Modules that are for nothing else than to connect."""


def profile_entries(settings: Settings) -> tuple[str, ...]:
    """All names the environment of the kernels has to serve, as `--allow` takes them."""
    if settings.profile != "data":
        return settings.allow
    return (*settings.allow, *sorted(DATA_MODULES))


def profile_in_force(profile: str, *, confined: bool) -> str:
    """The profile that holds: without a sandbox to be the boundary, that is a list of modules."""
    return profile if confined or profile == "strict" else "guarded"


def profile_in_words(settings: Settings, sandbox: str) -> str:
    """What holds in sessions of this server, in two sentences; `sandbox` is the backend's name."""
    profile = profile_in_force(settings.profile, confined=settings.confined)
    everything = "*" in settings.allow or profile in ("default", "data")
    if not settings.confined:
        role = "There is no sandbox (--sandbox none): code may do all that the server's user may"
        if not everything and profile != settings.profile:
            profile = f"guarded, which --sandbox none makes of {settings.profile}"
    else:
        role = f"It steers; the boundary is the sandbox ({sandbox})"
    if everything:
        holds = "the whole standard library, shell commands, magics and all that is installed"
    elif profile == "strict":
        holds = "a few modules, no files, no eval, no shell commands"
    else:
        holds = "listed modules only, no shell commands"
    return f"{profile}: {holds}. {role}."


Kind: TypeAlias = Literal[
    "syntax", "size", "encoding", "depth", "import", "builtin", "attribute", "magic", "name",
    "pep723", "install",
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

    def with_error(self, kind: Kind, message: str, line: int, code: str) -> Report:
        """With one more error, about a whole line of the code."""
        text = code.splitlines()[line - 1][:MAX_SOURCE_LINE] if code else ""
        found = Diagnostic(kind, "error", message, line, 1, text)
        every = sorted((*self.diagnostics, found), key=lambda each: (each.line, each.column))
        return replace(self, valid=False, diagnostics=tuple(every))

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


_FAMILIAR = ("json", "math", "pathlib", "re", "statistics")


class NextStep(Protocol):
    """How a model gets a module that it does not have."""

    def __call__(self, module: str, *, once: bool) -> str:
        """A sentence with a call or a flag that works here; empty for the standard library.

        `once` is for code of `run_script`, whose session nobody can add to.
        """


def operators_step(module: str, *, once: bool) -> str:
    """The flag alone: nothing is known of what may be installed."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return ""
    return f"Start the server with --allow {root} to have it."


@dataclass(frozen=True, slots=True)
class Policy:
    """What code of a session may import: it steers well-meaning code, the boundary is the sandbox.

    modules        names allowed with everything below them; a dotted name brings the packages
                   above it, but nothing else that is in them
    allow_all      nothing is refused, and no code is read before it runs
    profile        the name of the list it began from
    deny_builtins  builtins that code may not use
    installed      modules of the session's packages; None where that is not known
    step           how to get a module that is not there
    once           whether it is for code of `run_script`
    tools          groups of tools that a model has (`--tools`)
    confined       whether a sandbox is around it
    network        whether the operator has opened that to the network (`--network`)
    """

    modules: frozenset[str]
    allow_all: bool = False
    profile: str = "guarded"
    deny_builtins: frozenset[str] = frozenset()
    installed: frozenset[str] | None = None
    step: NextStep = field(default=operators_step, compare=False)
    once: bool = False
    tools: tuple[str, ...] = TOOL_GROUPS
    confined: bool = True
    network: bool = False

    @classmethod
    def for_allow(
        cls,
        allow: Iterable[str],
        profile: str = "guarded",
        step: NextStep = operators_step,
        tools: tuple[str, ...] = TOOL_GROUPS,
    ) -> Policy:
        """The policy of a profile that is in force, with the operator's `--allow` entries added.

        `*` allows everything. Raises ConfigError for what `parse_entry` cannot read.
        """
        if profile not in PROFILES:
            raise ConfigError(
                f"there is no profile {profile!r}; choose one of {', '.join(PROFILES)}"
            )
        entries = [entry.strip() for entry in allow if entry.strip()]
        allow_all = profile in ("default", "data") or "*" in entries
        base = STRICT_MODULES if profile == "strict" else GUARDED_MODULES
        denied = STRICT_DENIED_BUILTINS if profile == "strict" and not allow_all else frozenset()
        policy = cls(base, allow_all, profile, denied, step=step, tools=tools)
        try:
            return policy.with_modules(parse_entry(each).name for each in entries if each != "*")
        except ValueError as error:
            raise ConfigError(f"--allow: {error}") from None

    def with_modules(self, names: Iterable[str]) -> Policy:
        """The same policy with more names allowed, each also as an identifier in lower case."""
        added: set[str] = set()
        for name in names:
            identifier = name.replace("-", "_")
            added |= {name, identifier, name.lower(), identifier.lower()}
        return replace(self, modules=self.modules | added)

    def with_installed(self, names: Iterable[str]) -> Policy:
        """The same policy for a session whose packages bring these modules, too."""
        return replace(self, installed=(self.installed or frozenset()) | frozenset(names))

    def allows(self, module: str) -> bool:
        """Whether `import module` passes: listed itself, below a listed name, or above one."""
        return self.allows_members(module) or _above(module, self.modules)

    def allows_members(self, module: str) -> bool:
        """Whether everything in `module` may be used; false for a package above a listed name."""
        return self.has(module) if self.allow_all else _listed(module, self.modules)

    def has(self, module: str) -> bool:
        """Whether a module is Python's own, or of an installed package, as far as is known."""
        if self.installed is None or module.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(
            _listed(module, names) or _above(module, names)
            for names in (self.installed, self.modules)
        )

    def refusal(self, module: str) -> str:
        """The whole text that refuses `module`: as `denial`, and what is allowed."""
        return f"{self.denial(module)} Allowed: {self.summary()}."

    def denial(self, module: str) -> str:
        """The text that refuses `module`: what to do instead, and the step that permits it."""
        what = "import of {!r} is not allowed in this session."
        sentences = [
            ("{!r} is not installed here." if self.allow_all else what).format(module),
            self.hint(module),
            self.step(module, once=self.once) or self._operators_step(module),
        ]
        return " ".join(filter(None, sentences))

    def hint(self, module: str) -> str:
        """What to do instead of a module; empty for nothing."""
        root = module.partition(".")[0]
        if NETWORK_MODULES.isdisjoint({module, root}):
            return HINTS.get(module) or HINTS.get(root, "")
        closed = self.confined and not self.network
        return "Sandboxed sessions have no network, unless the operator opens it." if closed else ""

    def _operators_step(self, module: str) -> str:
        return f"Start the server with --allow {self.flag(module)} (or --allow '*') to permit it."

    def flag(self, module: str) -> str:
        """The shortest name that would allow `module` without allowing more than its package."""
        parts = module.removesuffix(".*").split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            if not _above(name, self.modules):
                return name
        return ".".join(parts)

    def summary(self) -> str:
        """The allow-list in few words: what the operator added, and how much of the rest."""
        if self.allow_all:
            return "the standard library and all that is installed (list_packages shows it)"
        base = STRICT_MODULES if self.profile == "strict" else GUARDED_MODULES
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


def _listed(module: str, names: frozenset[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts) + 1))


def _above(module: str, names: frozenset[str]) -> bool:
    prefix = module + "."
    return any(name.startswith(prefix) for name in names)
