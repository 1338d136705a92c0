"""The last step of an installation: the live kernel gets the packages and imports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from packaging.requirements import Requirement

from kernel_mcp.errors import KernelMcpError, LaunchError
from kernel_mcp.output.terminal import clean
from kernel_mcp.packages.layer import Generation, versions
from kernel_mcp.packages.outcome import Outcome, Verdicts, judge, principal
from kernel_mcp.packages.present import Present
from kernel_mcp.sessions.session import Session

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

VERIFY_S = 60.0
DEATH_S = 1.0
DETAIL_CHARS = 500


async def take_in(
    session: Session,
    asked: Sequence[str],
    *,
    present: Present,
    generation: Generation,
    confined: bool,
) -> Outcome:
    """Allow the packages' modules in the session and see which of them its kernel can import.

    `confined` says whether the installer was in a sandbox.
    """
    names = {Requirement(text).name for text in asked}
    brought = versions(generation.packages)
    modules = {**present.modules, **(generation.modules or {})}
    found = {**present.versions, **brought}
    listed = [*sorted(names & found.keys()), *sorted(brought.keys() - names)]
    principals = {name: principal(name, modules.get(name, ())) for name in listed}
    wanted = [module for name in listed for module in principals[name]]
    verdicts, trouble = await _import(session, generation.permitted, wanted)
    packages = tuple(
        judge(
            name,
            found[name],
            previous=present.versions.get(name, ""),
            asked=name in names,
            modules=principals[name],
            verdicts=verdicts,
        )
        for name in listed
    )
    return Outcome(
        packages,
        unfit=tuple(sorted(names - found.keys())),
        permitted=generation.permitted,
        confined=confined,
        trouble=trouble,
    )


async def _import(
    session: Session, permitted: Sequence[str], modules: Sequence[str]
) -> tuple[Verdicts, str]:
    """What the kernel says about each module, or what kept it from saying anything."""
    try:
        kernel = await session.ensure_kernel()
    except KernelMcpError as error:
        return {}, f"No kernel could be started: {error}"
    before = kernel.policy.modules
    kernel.policy = kernel.policy.with_modules(permitted)
    request = {"allow": sorted(kernel.policy.modules - before), "modules": list(modules)}
    try:
        reply = await kernel.ask("kernel_mcp_packages_request", request, timeout=VERIFY_S)
    except LaunchError:
        return {}, await _why_silent(session, kernel)
    return _verdicts(reply), ""


async def _why_silent(session: Session, kernel: Kernel) -> str:
    with anyio.move_on_after(DEATH_S):
        await kernel.dead.wait()
    if kernel.exit is not None:
        return (
            f"{kernel.exit.story('The kernel')} during the imports: all variables are lost, "
            "the packages are installed. The next cell gets a fresh kernel."
        )
    if session.current is None:
        kernel.interrupt()
    return (
        f"The imports did not end within {VERIFY_S:g} s. The packages are installed; import them "
        "in a cell to see what happens."
    )


def _verdicts(reply: Mapping[str, Any]) -> Verdicts:
    """The kernel's word, as far as it has the right shape."""
    modules = reply.get("modules")
    if not isinstance(modules, dict):
        return {}
    return {
        str(name): (
            str(verdict.get("state", "")),
            clean(str(verdict.get("detail", ""))[:DETAIL_CHARS]),
        )
        for name, verdict in modules.items()
        if isinstance(verdict, dict)
    }
