"""Kernels of other languages that sessions may choose: the values of `--kernel`."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass

EXPECTED = "expected NAME=KERNELSPEC, such as r=ir, or NAME=KERNELSPEC+PATH with what it reads"
RESERVED = ("python", "attached")
_NAME = re.compile(r"[a-z][a-z0-9_+#.-]{0,31}")


@dataclass(frozen=True, slots=True)
class NamedKernelspec:
    """A kernel spec that the operator has named.

    name      by which `create_session` asks for it in `language`, in lower case
    spec      name of an installed kernel spec, or the path of its folder or of its kernel.json
    readonly  host paths that the kernel reads, besides its own program
    """

    name: str
    spec: str
    readonly: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}={'+'.join([self.spec, *map(str, self.readonly)])}"


def kernelspecs(given: object) -> tuple[NamedKernelspec, ...]:
    """Read `NAME=KERNELSPEC[+PATH...]`, one or a list. Raises ValueError."""
    found = tuple(_kernelspec(each.strip()) for each in texts(given, EXPECTED))
    names = [each.name for each in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is named twice")
    return found


def _kernelspec(text: str) -> NamedKernelspec:
    name, given, rest = text.partition("=")
    spec, *paths = (each.strip() for each in rest.split("+"))
    name = name.strip().lower()
    if not given or not spec or "\0" in rest:
        raise ValueError(EXPECTED)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no name of a language; {EXPECTED}")
    if name in RESERVED:
        raise ValueError(f"{name!r} is this server's own; choose another name")
    readonly = tuple(from_home(Path(each)) for each in paths)
    if not all(each.is_absolute() for each in readonly):
        raise ValueError(f"the paths after + must be absolute; {EXPECTED}")
    if "/" in spec:
        spec = str(from_home(Path(spec)).absolute())
    return NamedKernelspec(name, spec, readonly)
