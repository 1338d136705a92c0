"""Folders and files of the host that sessions see: the values of `--mount`."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass

MOUNT_MODES = ("ro", "rw")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of the host that sessions see, at the path `guest`.

    mode    ro, or rw
    strict  in folders that hold a secret, only files that existed at a kernel's start are readable
    here    True if it was named as `.`, the folder in which the server was started
    first   True if it was named before all others
    """

    host: Path
    guest: str
    mode: str = "ro"
    strict: bool = False
    here: bool = False
    first: bool = field(default=False, compare=False)

    @property
    def writable(self) -> bool:
        """True if sessions may change its content."""
        return self.mode == "rw"

    @property
    def start(self) -> bool:
        """True if sessions begin in it: it was named first, and is a writable folder."""
        return self.first and self.writable and self.host.is_dir()

    def __str__(self) -> str:
        where = "" if str(self.host) == self.guest else f":{self.guest}"
        return f"{self.host}{where}:{self.mode}{':strict' * self.strict}"


def mounts(given: object) -> tuple[Mount, ...]:
    """Read `HOST[:GUEST][:ro|rw][:strict]`, one or a list; the caller resolves host paths."""
    found = texts(given, "expected folders such as . or /srv/data:/data:rw")
    return tuple(_mount(each.strip(), first=not at) for at, each in enumerate(found))


def _mount(text: str, *, first: bool = False) -> Mount:
    host, *more = text.split(":")
    strict = more[-1:] == ["strict"]
    more = more[: len(more) - strict]
    mode = more.pop() if more and more[-1] in MOUNT_MODES else "ro"
    guest = more.pop() if more else ""
    if more or not host or "\0" in text or (guest and not guest.startswith("/")):
        raise ValueError(
            "expected HOST[:GUEST][:ro|rw][:strict], such as . or /srv/data:/data:rw; GUEST is an "
            "absolute path, and neither holds a colon"
        )
    path = from_home(Path(host))
    return Mount(path, guest, mode, strict, here=path == Path(), first=first)
