"""Choose a backend and make sure that it really works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

from kernel_mcp.errors import ConfigError, SandboxUnavailable
from kernel_mcp.sandbox.base import ContainerOptions, Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.none import NoSandbox
from kernel_mcp.sandbox.probe import require_boundary, run_confined
from kernel_mcp.sandbox.remedies import AT_OWN_RISK, diagnose

logger = logging.getLogger(__name__)

AUTOMATIC = ("bwrap",)
"""Backends that `auto` may choose, best first."""
WEAKER = ("landlock",)
"""Backends that `auto` may choose only where the operator has accepted their gaps."""
WEAKER_FLAG = "--allow-weaker-sandbox"


def _landlock() -> Sandbox:
    from kernel_mcp.sandbox.landlock import LandlockSandbox

    return LandlockSandbox.detect()


def _container(options: ContainerOptions | None = None) -> Sandbox:
    from kernel_mcp.sandbox.container import ContainerSandbox

    return ContainerSandbox.detect(options)


BACKENDS: Mapping[str, Callable[[], Sandbox]] = MappingProxyType(
    {
        "bwrap": BwrapSandbox.detect,
        "landlock": _landlock,
        "container": _container,
        "none": NoSandbox,
    }
)
"""Every backend by the name that `--sandbox` takes."""


def select_sandbox(
    name: str = "auto",
    *,
    allow_weaker: bool = False,
    container: ContainerOptions | None = None,
    prove: Callable[[Sandbox], None] = lambda _sandbox: None,
) -> Sandbox:
    """The backend of that name, proven by a process that ran in it; blocks for some 10 ms.

    `auto` is the strongest that works, one of `WEAKER` only with `allow_weaker` and with a warning
    in the log. `container` is for the backend of that name, which takes half a second. `prove` may
    ask more of a backend and raise SandboxUnavailable. Raises SandboxUnavailable with the remedy,
    ConfigError for an unknown name.
    """
    if name == "auto":
        return _first_that_works(prove, allow_weaker=allow_weaker)
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no sandbox {name!r}; choose one of {known}")
    sandbox = _container(container) if name == "container" and container else BACKENDS[name]()
    _probe(sandbox)
    prove(sandbox)
    return sandbox


def _first_that_works(prove: Callable[[Sandbox], None], *, allow_weaker: bool) -> Sandbox:
    refusals: list[str] = []
    for name in (*AUTOMATIC, *WEAKER) if allow_weaker else AUTOMATIC:
        found = _try(name, prove)
        if not isinstance(found, SandboxUnavailable):
            if refusals:
                logger.warning(
                    "kernels get the weaker %s sandbox (%s), with the gaps that `info` lists, "
                    "because a stronger one cannot be used. %s",
                    name,
                    WEAKER_FLAG,
                    " ".join(refusals),
                )
            return found
        refusals.append(f"{name}: {found}")
    if not allow_weaker:
        refusals += [
            f"The {name} sandbox works here: {WEAKER_FLAG} takes it instead, with the gaps that "
            f"`kernel-mcp doctor --sandbox {name}` lists."
            for name in WEAKER
            if not isinstance(_try(name, prove), SandboxUnavailable)
        ]
    raise SandboxUnavailable("\n".join(refusals))


def _try(name: str, prove: Callable[[Sandbox], None]) -> Sandbox | SandboxUnavailable:
    try:
        return select_sandbox(name, prove=prove)
    except SandboxUnavailable as refusal:
        return refusal


def _probe(sandbox: Sandbox) -> None:
    """Run a process that does nothing. Raises SandboxUnavailable."""
    done = run_confined(sandbox, ["/bin/sh", "-c", "exit 0"])
    if done.returncode == 0:
        return
    if isinstance(sandbox, BwrapSandbox):
        raise SandboxUnavailable(diagnose(done.stderr))
    said = " ".join(done.stderr.split())[-400:] or f"nothing, exit code {done.returncode}"
    raise SandboxUnavailable(
        f"the {sandbox.name} sandbox cannot start a process here (it said: {said}). {AT_OWN_RISK}"
    )


# The sandbox a server is going to use, chosen and proven while the rest is still being loaded.

UNCONFINED = "none"


def proven_sandbox(
    name: str, *, allow_weaker: bool = False, container: ContainerOptions | None = None
) -> Sandbox:
    """The backend `name`, after its promises were checked; blocks for some 40 ms.

    A container takes a second. `none` promises nothing. `auto` goes on to a weaker backend only
    where that is allowed. Raises SandboxUnavailable, ConfigError.
    """
    return select_sandbox(name, allow_weaker=allow_weaker, container=container, prove=_prove)


def _prove(sandbox: Sandbox) -> None:
    if sandbox.name != UNCONFINED:
        require_boundary(sandbox)


def begin_proof(
    name: str, *, allow_weaker: bool = False, container: ContainerOptions | None = None
) -> Future[Sandbox]:
    """Start `proven_sandbox` in a thread of its own. Raises SandboxUnavailable."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="sandbox-proof")
    try:
        return executor.submit(proven_sandbox, name, allow_weaker=allow_weaker, container=container)
    except RuntimeError as reason:
        raise SandboxUnavailable(
            "The system lets the server start no thread, and so no kernel either: raise its limit "
            "of processes and threads (ulimit -u, or pids.max of its control group)."
        ) from reason
    finally:
        executor.shutdown(wait=False)
