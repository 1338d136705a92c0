"""Starts kernels of the kernel specs that the operator has named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import ConfigError
from kernel_mcp.kernels.channels import Floods
from kernel_mcp.kernels.factory import KernelFactory, KernelRequest
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.kernelspecs.languages import language_of
from kernel_mcp.kernelspecs.spec import Kernelspec, read_kernelspec
from kernel_mcp.launch.base import START_TIMEOUT_S, LaunchRequest, Program
from kernel_mcp.launch.process import Launcher
from kernel_mcp.output.text import Masks
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

_KERNEL = "kernel_mcp.kernelspecs.kernel"
_NO_COPIES = "Its kernel cannot be copied; run the cells again after reset."
_BY_CODE = "Do it by code."


def step(module: str, *, once: bool) -> str:
    """Return a sentence on a module that a kernel lacks."""
    return f"{module} is not installed; the operator can install it on this machine."


POLICY = Policy(frozenset(), allow_all=True, profile="default", step=step)
"""The sandbox alone limits what code of other languages may load."""


def interpreter_of(spec: Kernelspec) -> Interpreter:
    """Return the interpreter of a kernel spec."""
    language = language_of(spec)
    lacking = {
        "undo": _NO_COPIES,
        "branch": _NO_COPIES,
        "install": language.packaging or "It has the packages that the operator has installed.",
    }
    if not spec.survives:
        lacking["interrupt"] = (
            "An interrupt ends its kernel, and so does a time limit: all variables are lost. Call "
            "wait, or reset to end it."
        )
    if not language.variables:
        lacking["list_variables"] = _BY_CODE
    if not language.packages:
        lacking["list_packages"] = _BY_CODE
    if not language.check:
        lacking["check_syntax"] = (
            "Run the code: most kernels report a syntax error before they run it."
        )
    return Interpreter(
        spec.name,
        spec.display_name,
        saves=language.dump is not None,
        checks=True,
        notebook=spec.notebook,
        lacking=lacking,
    )


class SpecSource:
    """The `KernelSource` of one kernel spec."""

    def __init__(
        self,
        named: NamedKernelspec,
        *,
        settings: Settings,
        factory: KernelFactory,
        launcher: Launcher,
        masks: Masks,
        sandbox: Sandbox,
        variables: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Raises ConfigError.

        `factory` has the environment of the program that starts the kernel. Kernels have
        `variables` besides those of the settings.
        """
        self._spec = read_kernelspec(named)
        if why := self._spec.hindrance(sandbox.name):
            raise ConfigError(
                f"--kernel {named}: it cannot start under --sandbox {sandbox.name}: {why}. Leave "
                "one of the two out, or use --sandbox bwrap."
            )
        self.interpreter = interpreter_of(self._spec)
        self._policy = replace(POLICY, network=bool(settings.network))
        self._settings = settings
        self._factory = factory
        self._launcher = launcher
        self._masks = masks
        self._sandbox = sandbox
        self._variables = tuple(variables)
        self._floods = Floods()

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Start a kernel. Raises KernelMcpError."""
        await anyio.to_thread.run_sync(import_module, _KERNEL)
        from kernel_mcp.kernelspecs.kernel import SpecKernel

        spec = self._spec
        program, *arguments = spec.argv
        known = language_of(spec).options
        options = [option for name, option in known if name == Path(program).name]
        await progress(f"Starting {spec.display_name}")
        own, _ = await self._factory.environment(replace(request, interpreter=PYTHON), progress)
        environment = replace(own, readonly=(*own.readonly, *spec.readonly), packages=())
        handle = await self._launcher.launch(
            LaunchRequest(
                session=request.session,
                environment=environment,
                policy=self._policy,
                limits=request.limits or self._settings.limits,
                workspace=request.workspace,
                variables=(*self._settings.kernel_environment, *self._variables),
                program=Program((program, *options, *arguments), spec.env),
            )
        )
        kernel = SpecKernel(
            handle,
            environment=environment,
            policy=self._policy,
            masks=self._masks,
            floods=self._floods,
            spec=spec,
            workspace=request.workspace,
            seen_at=self._sandbox.guest_paths(request.workspace, request.workspace).workspace,
        )
        try:
            await kernel.ready(START_TIMEOUT_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel

    async def aclose(self) -> None:
        """Release nothing: each kernel is that of one session."""
