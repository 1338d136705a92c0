"""One running kernel, however it was started: the face that sessions see of its process."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.launch.recorder import Recorder
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import ExitStatus, Usage


class LaunchedKernel:
    """One kernel that a launcher has started, with what has to be undone after it."""

    def __init__(
        self,
        *,
        connection: ConnectionInfo,
        boundary: tuple[str, ...],
        process: ConfinedProcess,
        limits: KernelLimits,
        recorder: Recorder,
        resources: AsyncExitStack,
    ) -> None:
        self.process = process
        self._connection = connection
        self._boundary = boundary
        self._limits = limits
        self._recorder = recorder
        self._resources = resources

    @property
    def pid(self) -> int:
        """Process id of the kernel itself, as the host sees it."""
        return self.process.pid

    @property
    def connection(self) -> ConnectionInfo:
        """Where its channels listen, in host paths."""
        return self._connection

    @property
    def boundary(self) -> tuple[str, ...]:
        """How it was started, and what the server has found of its boundary."""
        return self._boundary

    @property
    def exit(self) -> ExitStatus | None:
        """How it ended, or None while it lives."""
        return self.process.exit

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, so that it does nothing until it is continued."""
        return self.process.stopped

    @property
    def limits(self) -> KernelLimits:
        """What it may use."""
        return self._limits

    def usage(self) -> Usage:
        """What it uses, children included; zeros once it has ended."""
        return self._limits.usage() if self.exit is None else Usage()

    def unheard(self, characters: int) -> str:
        """What it printed after the first `characters`, as far as that is still known."""
        return self._recorder.unheard(characters)

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group; does nothing once it has ended."""
        self.process.interrupt()

    def signal(self, number: int) -> None:
        """Send any other signal to the kernel alone; does nothing once it has ended."""
        self.process.signal(number)

    def kill(self) -> None:
        """End every process of the sandbox with SIGKILL; does nothing once it has ended."""
        self.process.kill()

    async def wait(self) -> ExitStatus:
        """Return how it ended, at once after its death."""
        return await self.process.wait()

    async def aclose(self) -> None:
        """Kill what still runs, reap it, remove the socket directory, give the user id back."""
        await self._resources.aclose()
