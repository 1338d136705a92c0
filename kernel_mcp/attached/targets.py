"""Resolve the kernel that a session asks to join; the operator must have named it.

The operator names connection files, which the server reads itself, or addresses of Jupyter
servers. A session may append a kernel or a notebook to such an address.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from kernel_mcp.config.attachments import Attachment
from kernel_mcp.errors import InputError, LaunchError
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.records import dataclass

MAX_FILE_BYTES = 64 * 1024
"""Largest connection file that is read; they have some 300 bytes."""
_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
_SCHEME = "hmac-sha256"
_ANY = ("0.0.0.0", "*", "::")
_DOCUMENT = re.compile(r"/?(?:lab/tree|notebooks|doc/tree|tree)/(.+)")
_KERNEL = re.compile(r"/?api/kernels/([^/]+)(?:/channels)?/?")


@dataclass(frozen=True, slots=True)
class AttachTarget:
    """The kernel that a session has asked for: one of the operator's attachments.

    For a Jupyter server either the id of the `kernel` or the path of its `notebook` may be given.
    """

    attachment: Attachment
    kernel: str = ""
    notebook: str = ""

    def __str__(self) -> str:
        """Return the text by which a session asks for the same kernel again."""
        if self.notebook:
            return f"{self.attachment}/lab/tree/{quote(self.notebook)}"
        return (
            f"{self.attachment}/api/kernels/{quote(self.kernel)}"
            if self.kernel
            else str(self.attachment)
        )


def target_of(asked: str, named: Iterable[Attachment]) -> AttachTarget:
    """Return the place that `asked` means. Raises InputError if the operator has not named it."""
    known = list(named)
    text = asked.strip()
    named_so = [each for each in known if not each.is_server and Path(each.place).name == text]
    if len(named_so) == 1:
        return AttachTarget(named_so[0])
    for each in known:
        found = _below(text, each) if each.is_server else _file(text, each)
        if found is not None:
            return found
    if not known:
        raise InputError(
            "attach: the operator has named no kernel that sessions may join. A server that is "
            "started with --attach FILE|URL can; leave `attach` out for a kernel of your own."
        )
    raise InputError(
        f"attach: {text[:200]!r} is not what the operator has named. Pass one of: "
        f"{', '.join(map(str, known))}; or leave it out for a kernel of your own."
    )


def _file(text: str, named: Attachment) -> AttachTarget | None:
    return AttachTarget(named) if named.place in (text, os.path.normpath(text)) else None


def _below(text: str, named: Attachment) -> AttachTarget | None:
    try:
        parts, base = urlsplit(text), urlsplit(named.place)
    except ValueError:
        return None
    if (parts.scheme, parts.netloc) != (base.scheme, base.netloc):
        return None
    prefix = base.path.rstrip("/")
    if parts.path != prefix and not parts.path.startswith(f"{prefix}/"):
        return None
    rest = parts.path[len(prefix) :]
    if (kernel := _KERNEL.fullmatch(rest)) is not None:
        return AttachTarget(named, kernel=unquote(kernel[1]))
    if (notebook := _DOCUMENT.fullmatch(rest)) is not None:
        return AttachTarget(named, notebook=unquote(notebook[1]).rstrip("/"))
    return AttachTarget(named) if rest in ("", "/", "/lab", "/tree", "/lab/") else None


@dataclass(frozen=True, slots=True)
class ConnectionFile(ConnectionInfo):
    """The sockets that an external kernel listens on."""

    @property
    def host(self) -> str:
        """The address to connect to."""
        return "127.0.0.1" if self.ip in _ANY else self.ip


def read_connection(path: Path) -> ConnectionFile:
    """Return the content of a connection file. Raises LaunchError."""
    try:
        found = _object(path)
        ports = [found[name] for name in _PORTS]
        ip, key, scheme = found["ip"], found["key"], found.get("signature_scheme", _SCHEME)
        transport = found.get("transport", "tcp")
    except FileNotFoundError:
        raise LaunchError(
            f"There is no connection file {path}: its kernel has ended, or was never there. Start "
            "one with that connection file, or ask the operator to name another with --attach."
        ) from None
    except (OSError, ValueError, KeyError, RecursionError) as reason:
        raise LaunchError(f"The connection file {path} cannot be used: {reason!r}.") from reason
    fit = isinstance(ip, str) and isinstance(key, str) and key and transport in ("tcp", "ipc")
    if not fit or not all(type(port) is int and 0 < port < 65536 for port in ports):
        raise LaunchError(
            f"The connection file {path} cannot be used: it needs an ip, a key, five ports, and "
            "tcp or ipc as its transport."
        )
    if scheme != _SCHEME:
        raise LaunchError(
            f"The connection file {path} cannot be used: its messages are signed by "
            f"{str(scheme)[:40]}, and only {_SCHEME} is known."
        )
    if "curve_publickey" in found:
        raise LaunchError(
            f"The connection file {path} cannot be used: its kernel takes CurveZMQ alone, which "
            "this server does not speak. Name the address of its Jupyter server with --attach."
        )
    shell, iopub, stdin, control, heart = ports
    return ConnectionFile(ip, key, shell, iopub, stdin, control, heart, transport=transport)


def _object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a small regular file. Raises OSError, ValueError."""
    with open(path, "rb", opener=_without_waiting) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
            raise ValueError("it is no small regular file")
        found = json.loads(file.read(MAX_FILE_BYTES))
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
