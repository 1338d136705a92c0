"""External kernels that sessions may join: the values of `--attach`."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass


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
    if "://" not in text:
        return Attachment(str(from_home(Path(text))))
    parts = urlsplit(text)  # raises ValueError for an invalid address
    _ = parts.port
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("expected the address of a Jupyter server, http://HOST:PORT/?token=TOKEN")
    query = parse_qs(parts.query, keep_blank_values=True)
    token = query.pop("token", [""])[-1]
    if query or parts.fragment:
        raise ValueError("an address of a Jupyter server has a path and a token, and nothing else")
    path = re.sub(r"/(lab|tree|notebooks|doc)(/.*)?$", "", parts.path).rstrip("/")
    return Attachment(f"{parts.scheme}://{parts.netloc}{path}", token)
