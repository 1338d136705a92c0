"""Kernels besides this server's Python that sessions may choose: the values of `--kernel`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from kernel_mcp.config.attachments import Attachment, jupyter_server
from kernel_mcp.config.values import texts
from kernel_mcp.linux.folders import from_home
from kernel_mcp.records import dataclass

EXPECTED = (
    "expected NAME=KERNELSPEC, such as r=ir, or NAME=KERNELSPEC+PATH with what it reads, or "
    "NAME=URL of a Jupyter server"
)
RESERVED = ("python", "attached")
_NAME = re.compile(r"[a-z][a-z0-9_+#.-]{0,31}")


@dataclass(frozen=True, slots=True)
class NamedKernelspec:
    """A kernel spec that the operator has named.

    name      by which `create_session` asks for it in `language`, in lower case
    spec      name of an installed kernel spec, or the path of its folder or of its kernel.json; the
              address of a Jupyter server; or BACKEND:OPTIONS of another distribution
    readonly  host paths that the kernel reads, besides its own program
    server    the Jupyter server, with its token; None for another kind
    """

    name: str
    spec: str
    readonly: tuple[Path, ...] = ()
    server: Attachment | None = None

    @property
    def elsewhere(self) -> bool:
        """True if its code runs outside the sandbox."""
        return self.server is not None or bool(self.backend)

    @property
    def backend(self) -> str:
        """Name of a back-end of another distribution; empty for none."""
        name, colon, _ = self.spec.partition(":")
        return name if colon and self.server is None and "/" not in name else ""

    @property
    def options(self) -> str:
        """The text after the name of a back-end."""
        return self.spec.partition(":")[2]

    def below(self, base: Path) -> NamedKernelspec:
        """Return it with the path of its kernel spec, if that is one, resolved from `base`."""
        path = "/" in self.spec and not self.elsewhere
        return replace(self, spec=os.path.normpath(base / self.spec)) if path else self

    def __str__(self) -> str:
        return f"{self.name}={'+'.join([self.spec, *map(str, self.readonly)])}"


def kernelspecs(given: object) -> tuple[NamedKernelspec, ...]:
    """Read `NAME=KERNELSPEC[+PATH...]`, one or a list. Raises ValueError.

    The caller resolves paths of kernel specs.
    """
    found = tuple(_kernelspec(each.strip()) for each in texts(given, EXPECTED))
    names = [each.name for each in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is named twice")
    return found


def _kernelspec(text: str) -> NamedKernelspec:
    name, given, rest = text.partition("=")
    whole, server = NamedKernelspec(name.strip().lower(), rest.strip()), None
    if whole.spec.startswith(("http://", "https://")):
        server = jupyter_server(whole.spec)
        whole = replace(whole, spec=str(server), server=server)
    spec, *paths = [whole.spec] if whole.elsewhere else [each.strip() for each in rest.split("+")]
    if not given or not spec or "\0" in rest:
        raise ValueError(EXPECTED)
    if not _NAME.fullmatch(name := whole.name):
        raise ValueError(f"{name[:40]!r} is no name of a language; {EXPECTED}")
    if name in RESERVED:
        raise ValueError(f"{name!r} is this server's own; choose another name")
    readonly = tuple(from_home(Path(each)) for each in paths)
    if not all(each.is_absolute() for each in readonly):
        raise ValueError(f"the paths after + must be absolute; {EXPECTED}")
    if "/" in spec and not whole.elsewhere:
        spec = str(from_home(Path(spec)))
    return NamedKernelspec(name, spec, readonly, server)
