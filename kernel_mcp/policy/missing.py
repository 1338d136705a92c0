"""From an exception to the next step: what code wanted and is not there."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

from kernel_mcp.config.values import close_to
from kernel_mcp.output.items import Failure
from kernel_mcp.policy import Policy, words
from kernel_specs.restricted.config import INSTALLERS

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
"""Modules that the newest Python has no more, and the last that had them (PEP 594 and the "Removed"
sections of "What's New")."""

NEW: Mapping[str, str] = MappingProxyType(
    {"tomllib": "3.11", "annotationlib": "3.14", "compression": "3.14"}
)
"""Modules that the oldest Python does not have yet, and the first that has them."""

_CHARS = 32 * 1024
"""Characters that are searched: a kernel may send more."""
_NOT_FOUND = re.compile(r"No module named '([A-Za-z_][\w.]*)'", re.ASCII)
_NOT_ALLOWED = re.compile(r"NotAllowedError: import of '([A-Za-z_][\w.]*)'", re.ASCII)
_TOLD = re.compile(
    r"(?:\b(?:pip|conda)\b[^\n]{0,60}?\binstall (?:-\S+ )*(?:the )?['\"`]?"
    r"|requires '|dependency '|accessor requires )"
    r"([A-Za-z_][\w.-]*\w)(?![\w+/:]|\.\w)(?<!\.txt)",
    re.ASCII,
)
"""How libraries name what they lack."""
_CHILD = "ModuleNotFoundError: No module named '"
"""What a program that a cell started says of it."""
_READ_ONLY = re.compile(r"Read-only file system: '(/[^'\s]*)'")
_NO_FILE = re.compile(
    r"No such file or directory: '/(?!(?:workspace|tmp|proc|sys|dev|run|usr|opt|etc)/)[^'\n]*'"
)
"""A path that is none of the sandbox, and so meant on the host, as on clients that share it."""
_USAGE = "UsageError: "
_NO_MAGIC = re.compile(
    rf"{_USAGE}(?:Line magic function|Cell magic) `(%{{1,2}}\w{{1,100}})` not found"
)
"""IPython prints it."""
_NO_NETWORK = (
    "[Errno -2] Name or service not known",
    "[Errno -3] Temporary failure in name resolution",
    "[Errno -5] No address associated with hostname",
    "[Errno 101] Network is unreachable",
    "Failed to resolve '",
    "Could not resolve host",
    "unable to resolve host",
)
"""How Python, urllib3, curl, git and wget say that there is no way out."""
_REFUSED = (
    "the operator's --network does not permit",
    "CONNECT tunnel failed, response 403",
    "HTTP code 403 from proxy after CONNECT",
    "Proxy tunneling failed: the operator",
)
"""How the proxy, curl, git and wget say that a host is not open."""
NETWORK = "://"
"""What a cell missed that wanted to reach another machine."""
HOST = "://host"
"""What it missed where other machines are open."""
FILE = "file:///"
"""What it missed that opened a path of the host."""
EXTENSIONS: Mapping[str, str] = MappingProxyType(
    {"R": "rpy2.ipython", "lprun": "line_profiler", "sql": "sql", "watermark": "watermark"}
    | {"bigquery": "google.cloud.bigquery", "cython": "cython", "dotenv": "dotenv"}
    | dict.fromkeys(words("memit mprun"), "memory_profiler")
    | {"ipytest": "ipytest", "pyinstrument": "pyinstrument", "tensorboard": "tensorboard"}
    | dict.fromkeys(words("aimport autoreload"), "autoreload")
)
"""Magics that models use, and the extension that has each."""
_NAME_CHARS = 100


def missing(failure: Failure) -> str:
    """The module or package, or the path that cannot be written, for want of which a cell
    ended; NETWORK, HOST and FILE for those.

    Also a module behind another exception, as `ImportError: Missing optional dependency` of pandas.
    Empty for none.
    """
    text = "\n".join(failure.traceback)[-_CHARS:] or f"{failure.name}: {failure.value}"[:_CHARS]
    if found := [*_NOT_FOUND.findall(text), *_NOT_ALLOWED.findall(text)]:
        return str(found[-1])[:_NAME_CHARS]
    value = failure.value[:_CHARS]
    told = _TOLD.search(value) or _READ_ONLY.search(value)
    if told:
        return told[1][:_NAME_CHARS]
    if _NO_FILE.search(value):
        return FILE
    return _of_network(value) or (HOST if any(each in text for each in _REFUSED) else "")


def missing_in_words(text: str) -> str:
    """What a program or IPython missed that printed this text: a module, a %magic, NETWORK or
    HOST.

    Empty for none.
    """
    if _CHILD in text and (found := _NOT_FOUND.findall(text[-_CHARS:])):
        return str(found[-1])[:_NAME_CHARS]
    if _USAGE in text and (magic := _NO_MAGIC.search(text[-_CHARS:])):
        return str(magic[1])
    return _of_network(text)


def _of_network(text: str) -> str:
    if any(each in text for each in _REFUSED):
        return HOST
    return NETWORK if any(each in text for each in _NO_NETWORK) else ""


def advice(missing: str, code: str, policy: Policy, python: str) -> str:
    """What to do about what `code` missed on this Python; empty where nothing helps."""
    if missing.startswith("/"):
        return _WRITE_STEP
    if missing == FILE:
        others = "come by write_file, or " * ("files" in policy.tools)
        return f"{_FILE_STEP} Others {others}are made in the workspace." if policy.confined else ""
    if missing in (NETWORK, HOST):
        if not policy.confined:
            return ""
        return _OPEN_STEPS[missing] if policy.network else _NETWORK_STEP
    if missing.startswith("%"):
        return _of_extension(missing, policy)
    if missing in INSTALLERS:
        return f"There is no {missing} in sessions. {policy.step(missing, once=policy.once)}"
    wanted = _whole_name(missing, code)
    root = wanted.partition(".")[0]
    if root == missing and root in sys.stdlib_module_names | GONE.keys() | NEW.keys():
        return _of_python(root, policy, python)
    if not policy.allow_all and (policy.has(wanted) or root in (policy.installed or ())):
        return policy.step(wanted, once=policy.once)  # it is there, and not on the list
    if policy.has(wanted) or policy.has(wanted.replace("-", "_")):
        return ""
    near = close_to(root, policy.installed or (), cutoff=0.8)
    sentences = [
        f"{root} is neither installed nor a module of the workspace.",
        f"Did you mean {near[0]}?" if near else "",
        policy.hint(root),
        policy.step(wanted, once=policy.once),
    ]
    return " ".join(filter(None, sentences))


_WRITE_STEP = (
    "Files can be written in the workspace, which is the current folder, and in /tmp; of the host "
    "only in folders that info shows as mounted and changeable, which the operator names with "
    "--mount DIR:rw."
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
    """As code wrote it: of `google.cloud.storage` Python says that there is no `google`."""
    name = re.escape(missing)
    flags = re.MULTILINE | re.ASCII
    match = re.search(rf"(?:^\s*(?:from|import)\s+|['\"])({name}\.[\w.]+)", code, flags)
    whole = match[1] if match else missing
    part = re.search(rf"^\s*from\s+{re.escape(whole)}\s+import\s+\(?\s*(\w+)", code, flags)
    return f"{whole}.{part[1]}" if part else whole


def _of_python(root: str, policy: Policy, python: str) -> str:
    if not policy.allow_all and not policy.allows(root):
        return ""  # the refusal says it all
    having = GONE.get(root) or NEW.get(root)
    running = ".".join(python.split(".")[:2])
    if having is None or running == having:
        return f"{root} is not part of the Python that runs here."
    call = "run_script" if policy.once else "create_session"
    return f'Python {running} has no {root}: {call}(python="{having}") takes one that has.'
