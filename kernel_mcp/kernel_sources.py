"""The sources of kernels that `--kernel` names: kernel specs, Jupyter servers, back-ends."""

from __future__ import annotations

from typing import Protocol

from kernel_mcp.attached.source import RemoteSource
from kernel_mcp.backends.source import BackendSource, backend_of
from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.kernel_context import KernelContext
from kernel_mcp.kernels.factory import KernelSource
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.kernelspecs.source import SpecSource


class NamedSource(KernelSource, Protocol):
    """The source of one interpreter."""

    interpreter: Interpreter

    async def aclose(self) -> None:
        """Release what its kernels share."""


def named_sources(context: KernelContext) -> list[NamedSource]:
    """Return the sources of the kernels that the operator has named. Raises ConfigError."""
    return [_source(named, context) for named in context.settings.kernels]


def _source(named: NamedKernelspec, context: KernelContext) -> NamedSource:
    if named.server is not None:
        return RemoteSource(named.name, named.server, context.masks)
    if named.backend:
        return BackendSource(named.name, backend_of(named), context.masks)
    return SpecSource(
        named,
        settings=context.settings,
        factory=context.factory,
        launcher=context.cold,
        masks=context.masks,
        sandbox=context.assembly.sandbox,
        variables=[*context.assembly.network.variables.items()],
    )
