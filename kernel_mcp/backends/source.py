"""Starts kernels of back-ends that other distributions offer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kernel_mcp import extensions
from kernel_mcp.backends.interface import Backend
from kernel_mcp.backends.loop import BackendLoop
from kernel_mcp.barriers import Barrier
from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.launch.base import START_TIMEOUT_S
from kernel_mcp.notebooks.metadata import notebook_of
from kernel_mcp.output.text import Masks, one_line
from kernel_mcp.policy import Policy

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

TEXT_CHARS = 200
CLOSE_S = 5.0
_BY_CODE = "Do it by code: it runs where that kernel runs."
_NO_COPIES = "Its kernel cannot be copied; run the cells again after reset."
LACKING = {
    "undo": _NO_COPIES,
    "branch": _NO_COPIES,
    "install": _BY_CODE,
    "list_packages": _BY_CODE,
    "list_variables": _BY_CODE,
    "check_syntax": "Run the code.",
    "write_file": _BY_CODE,
    "list_files": _BY_CODE,
}


def step(module: str, *, once: bool) -> str:
    """Return a sentence on a module that a kernel lacks."""
    return f"{module} is not installed where that kernel runs."


POLICY = Policy(frozenset(), allow_all=True, profile="default", step=step, confined=False)
"""Nothing is refused in kernels that do not run in this server's sandbox."""


def backend_of(named: NamedKernelspec) -> Backend:
    """Load and make the back-end that the operator has named. Raises ConfigError."""
    made: Backend = extensions.load(extensions.INTERPRETERS, named.backend)(named.options)
    return made


class BackendSource:
    """The `KernelSource` of one back-end, which runs in a thread of its own."""

    def __init__(self, name: str, backend: Backend, masks: Masks) -> None:
        self._backend = backend
        self._loop = BackendLoop(name)
        self._masks = masks
        self.interpreter = Interpreter(
            name,
            one_line(str(backend.language))[:TEXT_CHARS],
            place=one_line(str(backend.place))[:TEXT_CHARS],
            notebook=notebook_of(backend.language),
            lacking={**LACKING, **backend.lacking},
        )

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel. Raises KernelMcpError."""
        from kernel_mcp.backends.kernel import READY_S, BackendKernel

        language, place = self.interpreter.language, self.interpreter.place
        await progress(f"Starting {language} at {place}")
        try:
            work = partial(self._backend.start, request.session)
            running = await self._loop.call(work, START_TIMEOUT_S)
        except LaunchError as error:
            raise LaunchError(f"No kernel was started at {place}. {error}") from error
        if not callable(getattr(running, "execute", None)):
            kind = type(running).__name__
            raise LaunchError(f"No kernel was started at {place}: its back-end returned {kind}.")
        kernel = BackendKernel(
            running, self._loop, language, place, policy=POLICY, masks=self._masks
        )
        try:
            await kernel.ready(READY_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel

    async def aclose(self) -> None:
        """Release what the kernels share; a failure is logged."""
        with Barrier("closing a back-end"):
            await self._loop.call(self._backend.aclose, CLOSE_S)
        self._loop.close()
