"""Starts kernels of back-ends that other distributions offer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kernel_mcp import extensions
from kernel_mcp.backends.interface import Backend
from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import KernelMcpError, LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.notebooks.metadata import notebook_of
from kernel_mcp.output.text import Masks
from kernel_mcp.policy import Policy

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

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
    """The `KernelSource` of one back-end."""

    def __init__(self, name: str, backend: Backend, masks: Masks) -> None:
        self._backend = backend
        self._masks = masks
        self.interpreter = Interpreter(
            name,
            backend.language,
            place=backend.place,
            notebook=notebook_of(backend.language),
            lacking={**LACKING, **backend.lacking},
        )

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel. Raises KernelMcpError."""
        from kernel_mcp.backends.kernel import READY_S, BackendKernel

        backend = self._backend
        await progress(f"Starting {backend.language} at {backend.place}")
        with Barrier("starting a kernel of a back-end") as barrier:
            running = await backend.start(request.session)
        if (failure := barrier.failure) is not None:
            if isinstance(failure, KernelMcpError):
                raise failure
            raise LaunchError(
                f"The kernel at {backend.place} failed to start: {reason_of(failure)}"
            )
        make = partial(BackendKernel, running, backend.language, backend.place)
        kernel = make(policy=POLICY, masks=self._masks)
        try:
            await kernel.ready(READY_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel

    async def aclose(self) -> None:
        """Release what the kernels share; a failure is logged."""
        with Barrier("closing a back-end"):
            await self._backend.aclose()
