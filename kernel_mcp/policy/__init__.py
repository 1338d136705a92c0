"""The import policy: the modules that code may import, and reports about code before it runs.

It guides well-meaning code. The security boundary is the sandbox.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from kernel_mcp.config.requirements import parse_entry
from kernel_mcp.config.settings import PROFILES, TOOL_GROUPS, Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.records import dataclass

# The profiles: modules and builtins of each, the effective one, and its description.


def words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


STRICT_MODULES: frozenset[str] = words(
    """
    __future__ collections datetime itertools math queue random re stat statistics time
    unicodedata
    """
)
"""Modules of the strict profile: computation without files, processes or network.

`__future__` is an instruction to the compiler: it allows no access to anything.
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
"""Modules of the guarded profile: the standard library that computes, parses, stores and formats.

Left out on purpose: modules that start processes, open sockets, load native code, load objects that
run code, or change the interpreter. So are modules that expose such modules. Examples: os, sys,
subprocess, socket, ctypes, shutil, importlib, signal, multiprocessing, http, pickle, builtins, gc,
code, pty.
"""

DATA_MODULES: frozenset[str] = words(
    """
    PIL altair jinja2 lxml matplotlib mpl_toolkits numpy openpyxl pandas plotly polars pyarrow
    scipy seaborn sklearn statsmodels sympy tabulate tqdm
    """
)
"""Packages of data analysis by import name: templates import those of an operator's environment."""

STRICT_DENIED_BUILTINS: frozenset[str] = words(
    "__import__ breakpoint compile eval exec globals input open vars"
)
"""Builtins that the strict profile denies: they open files, or run code from text."""

HANDED_OUT: frozenset[str] = words(
    "builtins ctypes importlib nt os posix pty runpy shutil subprocess sys"
)
"""Modules that are reachable as attributes of other modules without an import: `random._os`."""

HANDED_OUT_BY_STDLIB: frozenset[str] = HANDED_OUT | words(
    """
    _thread atexit fcntl gc grp http mmap multiprocessing pdb pkgutil pwd resource select
    selectors signal socket ssl
    """
)
"""As HANDED_OUT, for attributes of the standard library.

Elsewhere these additional names mean something else (`scipy.signal`).
"""

TOOL_MODULES = ("mcp_tools", "tools")
"""Modules by which code calls tools of MCP servers, where the operator opens any."""

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
"""Alternatives to the modules that are refused most often."""

NETWORK_MODULES: frozenset[str] = words(
    "aiohttp ftplib http httpx requests smtplib socket ssl urllib.request urllib3 websockets"
)
"""Modules whose only purpose is the network."""


def profile_in_force(profile: str, *, confined: bool) -> str:
    """Return the effective profile: without a sandbox at least `guarded`, a list of modules."""
    return profile if confined or profile == "strict" else "guarded"


def profile_in_words(settings: Settings, sandbox: str) -> str:
    """Return a description of the policy in two sentences; `sandbox` is the backend's name."""
    profile = profile_in_force(settings.profile, confined=settings.confined)
    everything = "*" in settings.allow or profile == "default"
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
    """One error or warning about a position in the code.

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
        """Return the message, then the source line with a caret under the column."""
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
    """A module that the code imports; `allowed` is True if the policy permits it."""

    name: str
    allowed: bool
    line: int


@dataclass(frozen=True, slots=True)
class Report:
    """Result of `check`, for code that has not run.

    valid  True if no diagnostic is an error
    note   the modules that are allowed, if an import is refused; else empty
    """

    valid: bool
    diagnostics: tuple[Diagnostic, ...] = ()
    imports: tuple[ImportUse, ...] = ()
    note: str = ""

    @property
    def refusals(self) -> tuple[Diagnostic, ...]:
        """The errors for which the code must not run; empty if it may.

        Syntax errors are included only together with others. Errors of script metadata never
        count: a cell may contain such a block as text.
        """
        errors = [item for item in self.diagnostics if item.severity == "error"]
        if not any(item.kind in _REFUSALS for item in errors):
            return ()
        return tuple(item for item in errors if item.kind in _REFUSALS or item.kind == "syntax")

    @property
    def syntax_errors(self) -> tuple[Diagnostic, ...]:
        """The errors for which the code could not be parsed, and therefore not be checked."""
        return tuple(
            item for item in self.diagnostics if item.kind == "syntax" and item.severity == "error"
        )

    def with_error(self, kind: Kind, message: str, line: int, code: str, column: int = 1) -> Report:
        """Return the report with an additional error, by default about a whole line of the code."""
        text = "".join(code.splitlines()[line - 1 : line])[:MAX_SOURCE_LINE]
        found = Diagnostic(kind, "error", message, line, column, text)
        every = sorted((*self.diagnostics, found), key=lambda each: (each.line, each.column))
        return replace(self, valid=False, diagnostics=tuple(every))

    def render(self) -> str:
        """Return all diagnostics as text, errors first; `no problems found` without any."""
        if not self.diagnostics:
            return "no problems found"
        ordered = sorted(self.diagnostics, key=lambda item: item.severity != "error")
        parts = [item.render() for item in ordered]
        return "\n".join([*parts, self.note] if self.note else parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, for tool results."""
        return {
            "valid": self.valid,
            "diagnostics": [asdict(item) for item in self.diagnostics],
            "imports": [asdict(item) for item in self.imports],
        }


_FAMILIAR = ("json", "math", "pathlib", "re", "statistics")


class NextStep(Protocol):
    """Function that describes how to get a module that is missing or not allowed."""

    def __call__(self, module: str, *, once: bool) -> str:
        """Return a sentence with a call or flag that works here; empty for the standard library.

        `once` is True for code of `run_script`, to whose session no package can be added.
        """


def operators_step(module: str, *, once: bool) -> str:
    """Return a sentence that names the flag `--allow`; empty for the standard library.

    This `NextStep` does not depend on the packages that could be installed.
    """
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return ""
    return f"Start the server with --allow {root} to have it."


@dataclass(frozen=True, slots=True)
class Policy:
    """The modules and builtins that code of a session may use.

    It guides well-meaning code; the security boundary is the sandbox.

    modules        allowed modules, with all their submodules; a dotted name also permits importing
                   its parent packages, but no other members of them
    allow_all      True if nothing is refused, and no code is checked before it runs
    profile        name of the profile that the list is based on
    deny_builtins  builtins that code may not use
    installed      modules of the session's packages; None if they are not known
    step           describes how to get a missing module
    once           True for code of `run_script`
    tools          groups of tools that are available (`--tools`)
    confined       True if the session has a sandbox
    network        True if the operator permits network access (`--network`)
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
        """Return the policy of an effective profile, with the operator's `--allow` entries added.

        `*` allows everything. Raises ConfigError for an unknown profile or invalid entry.
        """
        if profile not in PROFILES:
            raise ConfigError(
                f"there is no profile {profile!r}; choose one of {', '.join(PROFILES)}"
            )
        entries = [entry.strip() for entry in allow if entry.strip()]
        allow_all = profile == "default" or "*" in entries
        base = STRICT_MODULES if profile == "strict" else GUARDED_MODULES
        denied = STRICT_DENIED_BUILTINS if profile == "strict" and not allow_all else frozenset()
        policy = cls(base, allow_all, profile, denied, step=step, tools=tools)
        try:
            return policy.with_modules(parse_entry(each).name for each in entries if each != "*")
        except ValueError as error:
            raise ConfigError(f"--allow: {error}") from None

    def with_modules(self, names: Iterable[str]) -> Policy:
        """Return the policy with more names allowed, each also as a lower-case identifier."""
        added: set[str] = set()
        for name in names:
            identifier = name.replace("-", "_")
            added |= {name, identifier, name.lower(), identifier.lower()}
        return replace(self, modules=self.modules | added)

    def with_installed(self, names: Iterable[str]) -> Policy:
        """Return the policy for a session whose packages also provide these modules."""
        return replace(self, installed=(self.installed or frozenset()) | frozenset(names))

    def allows(self, module: str) -> bool:
        """Return True if `import module` is allowed: a listed name, or one below or above it."""
        return self.allows_members(module) or _above(module, self.modules)

    def allows_members(self, module: str) -> bool:
        """Return True if all members of `module` may be used; False if only submodules may be."""
        return self.has(module) if self.allow_all else _listed(module, self.modules)

    def has(self, module: str) -> bool:
        """Return True if a module is in the standard library or an installed package.

        Also True if the installed packages are not known.
        """
        if self.installed is None or module.partition(".")[0] in sys.stdlib_module_names:
            return True
        return any(
            _listed(module, names) or _above(module, names)
            for names in (self.installed, self.modules)
        )

    def refusal(self, module: str) -> str:
        """Return the text of `denial`, followed by the modules that are allowed."""
        return f"{self.denial(module)} Allowed: {self.summary()}."

    def denial(self, module: str) -> str:
        """Return the error for `module`, with an alternative and the step that would permit it."""
        what = "import of {!r} is not allowed in this session."
        sentences = [
            ("{!r} is not installed here." if self.allow_all else what).format(module),
            self.hint(module),
            self.next_step(module),
        ]
        return " ".join(filter(None, sentences))

    def hint(self, module: str) -> str:
        """Return what to use instead of a module; empty if nothing is known."""
        root = module.partition(".")[0]
        if NETWORK_MODULES.isdisjoint({module, root}):
            return HINTS.get(module) or HINTS.get(root, "")
        closed = self.confined and not self.network
        return "Sandboxed sessions have no network, unless the operator opens it." if closed else ""

    def next_step(self, module: str) -> str:
        """Return a sentence with the step that would permit a module: by `step`, or a flag."""
        flag = f"Start the server with --allow {self.flag(module)} (or --allow '*') to permit it."
        return self.step(module, once=self.once) or flag

    def flag(self, module: str) -> str:
        """Return the shortest prefix of `module` that is no parent of an allowed module.

        It is meant for `--allow`: `urllib.request` and not `urllib`, which would allow more.
        """
        parts = module.removesuffix(".*").split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            if not _above(name, self.modules):
                return name
        return ".".join(parts)

    def summary(self) -> str:
        """Return the allow-list in short: the operator's additions and the number of others."""
        if self.allow_all:
            return "the standard library and all that is installed (list_packages shows it)"
        base = STRICT_MODULES if self.profile == "strict" else GUARDED_MODULES
        added = sorted(name for name in self.modules - base if name.isidentifier() or "." in name)
        familiar = ", ".join(name for name in _FAMILIAR if name in self.modules)
        count = len(self.modules & base)
        rest = f"{count} modules of the standard library, such as {familiar} (see `info`)"
        return f"{', '.join(added)} and {rest}" if added else rest

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON values, as the kernel reads it at boot."""
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
