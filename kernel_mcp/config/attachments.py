"""Jupyter servers, and external kernels that sessions may join: the values of `--attach`."""

from __future__ import annotations

import os
import re
from dataclasses import field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass

MOST_TOKEN_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Attachment:
    """A running kernel, or a Jupyter server with kernels, which sessions may join.

    `place` is the path of a connection file, or the address of a server, without its `token`.
    """

    place: str
    token: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.place

    @property
    def is_server(self) -> bool:
        """True for a Jupyter server, False for a connection file."""
        return "://" in self.place


def attachments(given: object) -> tuple[Attachment, ...]:
    """Read connection files and `URL[?token=TOKEN]`, one or a list.

    The caller resolves paths of files.
    """
    found = texts(given, "expected a connection file, or http://localhost:8888/?token=TOKEN")
    return tuple(_attachment(each.strip()) for each in found)


def _attachment(text: str) -> Attachment:
    if not text or "\0" in text:
        raise ValueError("expected a connection file, or http://localhost:8888/?token=TOKEN")
    return jupyter_server(text) if "://" in text else Attachment(str(from_home(Path(text))))


def jupyter_server(text: str) -> Attachment:
    """Read the address of a Jupyter server.

    Its token follows as `?token=TOKEN`; or `token-env` names a variable, `token-file` a file that
    has it, and the command line stays without it. Raises ValueError.
    """
    parts = urlsplit(text)  # raises ValueError for an invalid address
    _ = parts.port
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("expected the address of a Jupyter server, http://HOST:PORT/?token=TOKEN")
    query = parse_qs(parts.query, keep_blank_values=True)
    token = _token(query)
    if query or parts.fragment:
        raise ValueError("an address of a Jupyter server has a path and a token, and nothing else")
    path = re.sub(r"/(lab|tree|notebooks|doc)(/.*)?$", "", parts.path).rstrip("/")
    return Attachment(f"{parts.scheme}://{parts.netloc}{path}", token)


def _token(query: dict[str, list[str]]) -> str:
    """Remove the token from a query, and return it; empty without one. Raises ValueError."""
    token = query.pop("token", [""])[-1]
    if (name := query.pop("token-env", [""])[-1]) and not (token := os.environ.get(name, "")):
        raise ValueError(f"the variable {name} of token-env is not set")
    if file := query.pop("token-file", [""])[-1]:
        try:
            with open(from_home(Path(file)), encoding="utf-8") as opened:
                token = opened.read(MOST_TOKEN_CHARS).strip()
        except OSError as reason:
            raise ValueError(f"token-file {file}: {reason.strerror}") from None
    return token
