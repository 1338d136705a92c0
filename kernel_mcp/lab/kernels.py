"""The kernels of JupyterLab: sessions, which it can neither start nor end."""

# jupyter_server is an extra, and traitlets classes are untyped to mypy. jupyter_client declares
# methods as synchronous that it awaits.
# mypy: disable-error-code="misc, no-untyped-call, override"

from __future__ import annotations

import asyncio
from typing import Any

from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.services.sessions.sessionmanager import SessionManager
from tornado.web import HTTPError

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.lab.sessions import LabSession, Sessions

SPEC = "python3"
INTERRUPT_S = 10.0
_NOT_HERE = "The kernel of a session is started, reset and ended by its agent and its server."


class SessionKernel(AsyncIOLoopKernelManager):
    """The connection to one session, instead of a process that JupyterLab would have started."""

    sessions: Sessions
    joined: LabSession

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, owns_kernel=False, **options)

    async def start_kernel(self, **_: Any) -> None:
        """Connect to the session, which is already running. Raises HTTPError."""
        self._attempted_start, self.kernel_id = True, self.joined.kernel_id
        try:
            facts = await self.sessions.connection(self.joined.handle)
        except (KernelMcpError, OSError) as error:
            raise HTTPError(404, str(error)) from error
        self.load_connection_info(facts)
        self.connection_file = ""
        self.ready.set_result(None)

    async def interrupt_kernel(self) -> None:
        """Request an interrupt from the session, which decides which cell to stop."""
        client = self.client()
        client.start_channels(shell=False, iopub=False, stdin=False, hb=False, control=True)
        try:
            message = client.session.msg("interrupt_request", {})
            client.control_channel.send(message)
            await asyncio.wait_for(client.control_channel.get_msg(), INTERRUPT_S)
        finally:
            client.stop_channels()

    async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Do nothing: the session goes on without JupyterLab. Raises HTTPError for a restart."""
        if restart:
            raise HTTPError(409, _NOT_HERE)

    async def restart_kernel(self, now: bool = False, **_: Any) -> None:
        """Refuse. Raises HTTPError."""
        raise HTTPError(409, f"{_NOT_HERE} Ask the agent for reset.")


class SessionKernels(AsyncMappingKernelManager):
    """The kernels by their ids; each notebook has the kernel of its session."""

    sessions: Sessions

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._starting = asyncio.Lock()

    async def start_kernel(
        self, *, kernel_id: str | None = None, path: str | None = None, **_: Any
    ) -> str:
        """Return the id of the kernel for the notebook at `path`. Raises HTTPError."""
        try:
            joined = await self.sessions.find(path or "")
        except KernelMcpError as error:
            raise HTTPError(404, f"{error} JupyterLab starts no kernels here.") from error
        async with self._starting:
            if joined.kernel_id not in self:
                own = {"joined": joined, "sessions": self.sessions}
                self.kernel_manager_factory = type("Kernel", (SessionKernel,), own)
                await super().start_kernel(kernel_id=joined.kernel_id, kernel_name=SPEC)
        return joined.kernel_id

    def cwd_for_path(self, path: str, **_: Any) -> str:
        """Return any folder: no process is started in it."""
        return str(self.root_dir)


class NotebookSessions(SessionManager):
    """Mapping of notebooks to kernels; shared documents have an id in the place of a path."""

    async def start_kernel_for_session(
        self, session_id: str, path: str, name: str, *args: Any, **options: Any
    ) -> str:
        """Return the id of the kernel for the notebook `name`. Raises HTTPError."""
        found: str = await super().start_kernel_for_session(
            session_id, name or path, name, *args, **options
        )
        return found


class SessionSpecs(KernelSpecManager):
    """The only kernel spec, so that JupyterLab offers no other."""

    def find_kernel_specs(self) -> dict[str, str]:
        """Return the only name, without a folder."""
        return {SPEC: ""}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the only kernel spec. Raises NoSuchKernel for another name."""
        if kernel_name != SPEC:
            raise NoSuchKernel(kernel_name)
        return KernelSpec(display_name="kernel-mcp session", language="python", argv=[])

    def get_all_specs(self) -> dict[str, Any]:
        """Return the kernel specs that JupyterLab lists."""
        return {SPEC: {"resource_dir": "", "spec": self.get_kernel_spec(SPEC).to_dict()}}

    def remove_kernel_spec(self, name: str) -> str:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, "JupyterLab has the kernels of sessions and no others.")
