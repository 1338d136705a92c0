"""The profiles: what each lets code do, which of them is in force, and how that is said."""

from __future__ import annotations

from kernel_mcp.config.settings import Settings


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


def in_force(profile: str, *, confined: bool) -> str:
    """The profile that holds: without a sandbox to be the boundary, that is a list of modules."""
    return profile if confined or profile == "strict" else "guarded"


def in_words(settings: Settings, sandbox: str) -> str:
    """What holds in sessions of this server, in two sentences; `sandbox` is the backend's name."""
    profile = in_force(settings.profile, confined=settings.confined)
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
