"""The seam between a session and whatever makes kernels for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Demand:
    """What a session asks of its kernels: python and packages empty for the server's own.

    `beside` asks for a kernel in a workspace that another kernel is using. `layer` is the folder of
    the packages that the session adds, None where it can add none.
    """

    session: str
    workspace: Path
    python: str = ""
    packages: tuple[str, ...] = ()
    beside: bool = False
    layer: Path | None = None

    @property
    def ordinary(self) -> bool:
        """Whether any kernel of the server will do."""
        return not (self.python or self.packages or self.beside)


class KernelSource(Protocol):
    """Makes kernels that are ready to run cells."""

    async def start(self, demand: Demand, tell: Callable[[str], None]) -> Kernel:
        """Start a kernel, telling what is being done meanwhile. Raises KernelMcpError."""
