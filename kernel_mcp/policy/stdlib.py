"""What may be imported without being asked for: the lists behind the profiles."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text as a set: a long list that stays readable."""
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
