"""Advice after exceptions: which module, file, host or permission was missing, and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

from kernel_mcp.config.values import close_to
from kernel_mcp.output.items import Failure
from kernel_mcp.policy import TOOL_MODULES, Policy, words
from kernel_specs.restricted.config import (
    FILE,
    HOST,
    INSTALLERS,
    NETWORK,
    NO_LOOP,
    READ_ONLY,
    TOO_LARGE,
)

GONE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(words("binhex"), "3.10")
    | dict.fromkeys(words("asynchat asyncore distutils imp smtpd"), "3.11")
    | dict.fromkeys(
        words(
            """
            aifc audioop cgi cgitb chunk crypt imghdr lib2to3 mailcap msilib nis nntplib
            ossaudiodev pipes sndhdr spwd sunau telnetlib uu xdrlib
            """
        ),
        "3.12",
    )
)
"""Modules removed from the standard library, and the last Python version that has them.

Sources: PEP 594, and the "Removed" sections of "What's New".
"""

NEW: Mapping[str, str] = MappingProxyType(
    {"tomllib": "3.11", "annotationlib": "3.14", "compression": "3.14"}
)
"""Modules that older Pythons do not have, and the first version that has them."""

_CHARS = 32 * 1024
"""Most characters that are searched; a kernel may send more."""
_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)
"""The name of a module, of at most 100 characters."""
_NO_PACKAGE = re.compile(r"No package metadata was found for ([A-Za-z][\w.-]{0,99})$", re.ASCII)
_USAGE = "UsageError: "
_NO_MAGIC = re.compile(
    rf"{_USAGE}(?:Line magic function|Cell magic) `(%{{1,2}}\w{{1,100}})` not found"
)
"""The message that IPython prints for an unknown magic, and for one of cells on a later line."""
_BELOW = "below "
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {"R": "rpy2.ipython", "lprun": "line_profiler", "sql": "sql", "watermark": "watermark"}
    | {"bigquery": "google.cloud.bigquery", "cython": "cython", "dotenv": "dotenv"}
    | dict.fromkeys(words("memit mprun"), "memory_profiler")
    | {"ipytest": "ipytest", "pyinstrument": "pyinstrument", "tensorboard": "tensorboard"}
    | dict.fromkeys(words("aimport autoreload"), "autoreload")
)
"""Common magics, and the extension that provides each."""


def missing(failure: Failure) -> str:
    """Return the missing module for which a cell failed, or a constant such as READ_ONLY.

    Empty if nothing was missing. The kernel reports it from the exception's objects. The report is
    trusted only if it is one of these constants, or a module that the traceback names.
    """
    if failure.name == "PackageNotFoundError" and (found := _NO_PACKAGE.match(failure.value)):
        return found[1]
    if failure.lacks in (READ_ONLY, FILE, TOO_LARGE, NO_LOOP, NETWORK, HOST):
        return failure.lacks
    if not _NAME.fullmatch(failure.lacks):
        return ""
    text = "\n".join(failure.traceback)[-_CHARS:] or f"{failure.name}: {failure.value}"[:_CHARS]
    told = f"No module named '{failure.lacks}'", f"import of '{failure.lacks}' is not allowed"
    return failure.lacks if any(each in text for each in told) else ""


def missing_magic(text: str, code: str) -> str:
    """Return the magic of `code` that IPython did not find, by its printed `text`; else empty.

    One of cells that is not at the beginning of its cell has `_BELOW` before it.
    """
    found = _NO_MAGIC.search(text[-_CHARS:]) if _USAGE in text else None
    if found is None:
        return ""
    asked = (line.rpartition("= ")[2].lstrip() for line in code.splitlines())
    if not any(line.startswith(found[1]) for line in asked):
        return ""
    is_below = found[1].startswith("%%") and "Line magic" in found[0]
    return f"{_BELOW}{found[1]}" if is_below else found[1]


def advice(missing: str, code: str, policy: Policy, python: str) -> str:
    """Return advice on a result of `missing` or `missing_magic`; empty if there is none.

    `python` is the version of the session's Python.
    """
    if missing == READ_ONLY:
        return _WRITE_STEP
    if missing == TOO_LARGE:
        return _SIZE_STEP
    if missing == NO_LOOP:
        return _LOOP_STEP
    if missing == FILE:
        others = "come by write_file, or " * ("files" in policy.tools)
        return f"{_FILE_STEP} Others {others}are made in the workspace." if policy.confined else ""
    if missing in (NETWORK, HOST):
        if not policy.confined:
            return ""
        return _OPEN_STEPS[missing] if policy.network else _NETWORK_STEP
    if missing.startswith(_BELOW):
        magic = missing.removeprefix(_BELOW)
        return f"{magic} has to begin its cell: only comments may stand above it."
    if missing.startswith("%"):
        return _of_extension(missing, policy)
    if missing in INSTALLERS:
        return f"There is no {missing} in sessions. {policy.step(missing, once=policy.once)}"
    wanted = _whole_name(missing, code)
    root = wanted.partition(".")[0]
    if root == missing and root in sys.stdlib_module_names | GONE.keys() | NEW.keys():
        return _of_python(root, policy, python)
    if not policy.allow_all and (policy.has(wanted) or root in (policy.installed or ())):
        return policy.step(wanted, once=policy.once)  # installed, but not allowed
    if policy.has(wanted) or policy.has(wanted.replace("-", "_")):
        return ""
    if root in TOOL_MODULES:
        return (
            f"{root} is no module of the workspace, and no tools of MCP servers are open to code "
            "here. Start the server with --tool-servers FILE; over HTTP with --tokens, a principal "
            "needs the door tools:NAME as well."
        )
    near = close_to(root, policy.installed or (), cutoff=0.8)
    sentences = [
        f"{root} is neither installed nor a module of the workspace.",
        f"Did you mean {near[0]}?" if near else "",
        policy.hint(root),
        policy.step(wanted, once=policy.once),
    ]
    return " ".join(filter(None, sentences))


_WRITE_STEP = (
    "Files can be written in the workspace of the session and in /tmp; of the host "
    "only in folders that info shows as mounted and changeable, which the operator names with "
    "--mount DIR:rw."
)
_SIZE_STEP = (
    "One file has reached --disk, the limit of a session's files, which info shows as "
    "limits.disk_mb. Remove it, and write less: in a compressed or columnar format, or fewer rows. "
    "The operator can start the server with a larger --disk."
)
_LOOP_STEP = (
    "No event loop runs while a cell awaits nothing: write `await main()` at top level, or call "
    "asyncio.run(main()). asyncio.create_task works in every cell."
)
_FILE_STEP = (
    "Sessions see files of the host only where the operator has mounted them (--mount DIR); info "
    "shows which."
)
_NETWORK_STEP = (
    "There is no network in this session. What works: data written in the cell, files in the "
    "workspace, data sets that are part of a package. The operator can open the network to hosts: "
    "the server is started with --network HOST."
)
_OPEN_STEPS = {
    NETWORK: (
        "Sessions reach the network by the proxy that HTTP_PROXY and HTTPS_PROXY name: requests, "
        "httpx, urllib, pandas, curl and git use it by themselves, aiohttp with trust_env=True. "
        "What speaks no HTTP, as a database, is reached where the operator has named HOST:PORT "
        "(--network). info shows the hosts that are open."
    ),
    HOST: (
        "info shows the hosts that are open to this session; use one of them, or ask for another, "
        "which the operator names with --network."
    ),
}


def _of_extension(magic: str, policy: Policy) -> str:
    extension = EXTENSIONS.get(magic.lstrip("%"))
    if extension is None:
        return (
            "`%lsmagic` lists the magics that are there; a package that has others is loaded with "
            "`%load_ext`."
        )
    load = f"`%load_ext {extension}`"
    if extension == "autoreload" or (policy.installed is not None and policy.has(extension)):
        return f"Run {load} first: it brings {magic}."
    step = policy.step(extension, once=policy.once)
    return f"{magic} is of an extension that is not installed. {step} Then {load} brings {magic}."


def _whole_name(missing: str, code: str) -> str:
    """Return the full name that `code` imports.

    For `google.cloud.storage` the exception names only `google`.
    """
    name = rf"(?:^[ \t]*(?:from|import)[ \t]+|['\"])({re.escape(missing)}\.[\w.]+)"
    match = re.search(name, code, re.MULTILINE | re.ASCII)  # parts: those above
    whole = match[1] if match else missing
    origin = rf"^[ \t]*from[ \t]+{re.escape(whole)}[ \t]+import[ \t]+(?:\(\s*)?(\w+)"
    part = re.search(origin, code, re.MULTILINE | re.ASCII)  # parts: those above
    return f"{whole}.{part[1]}" if part else whole


def _of_python(root: str, policy: Policy, python: str) -> str:
    if not policy.allow_all and not policy.allows(root):
        return ""  # the refusal has the advice already
    having = GONE.get(root) or NEW.get(root)
    running = ".".join(python.split(".")[:2])
    if having is None or running == having:
        return f"{root} is not part of the Python that runs here."
    call = "run_script" if policy.once else "create_session"
    return f'Python {running} has no {root}: {call}(python="{having}") takes one that has.'
