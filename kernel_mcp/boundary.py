"""The sandbox a server is going to use, chosen and proven while the rest is still being loaded."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.engine import ContainerOptions
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.sandbox.selftest import require_boundary

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
