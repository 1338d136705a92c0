"""The objects that the tools of a server use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernel_mcp.config.settings import Settings
from kernel_mcp.instructions import instructions
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.requirements import ScriptReader
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The objects that the tools of a server use.

    `assembly` has the sandbox, its limits and the grants. `interpreters` are those of
    other languages, by name. `persistence_summary` describes what of the sessions outlives the
    server. `task_key` returns the secret by which ids of tasks are made.
    """

    settings: Settings
    shared: SharedContext[Session]
    assembly: KernelAssembly
    manager: SessionManager
    factory: KernelFactory
    installer: Installer
    scripts: ScriptReader
    interpreters: Mapping[str, Interpreter]
    persistence_summary: str
    task_key: Callable[[], bytes]

    def instructions(self) -> str:
        """Return the present instructions for the model."""
        report = self.assembly.report(self.settings.limits)
        return instructions(self.settings, report, list(self.factory.missing))
