"""The objects that the tools of a server use."""

from __future__ import annotations

from kernel_mcp.config.settings import Settings
from kernel_mcp.instructions import instructions
from kernel_mcp.kernels.factory import KernelFactory
from kernel_mcp.launch.mounts import MountGrants
from kernel_mcp.launch.network import Network
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.requirements import ScriptReader
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox, SandboxReport
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.shared_context import Clock


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The objects that the tools of a server use.

    `report` lists the protections and limits in force. `resources` computes it for other limits,
    and `persistence_summary` describes what of the sessions outlives the server.
    """

    settings: Settings
    manager: SessionManager
    factory: KernelFactory
    installer: Installer
    scripts: ScriptReader
    sandbox: Sandbox
    resources: ResourceManager
    report: SandboxReport
    events: Events
    clock: Clock
    doors: MountGrants
    network: Network
    persistence_summary: str

    def instructions(self) -> str:
        """Return the present instructions for the model."""
        return instructions(self.settings, self.report, list(self.factory.missing))
