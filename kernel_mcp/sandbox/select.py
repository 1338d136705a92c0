"""Choose the first backend that works, tested by a process in it; defines `--sandbox none`."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from kernel_mcp import extensions
from kernel_mcp.errors import ConfigError, LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import SCRATCH, Identity, scratch_folder
from kernel_mcp.linux.proc import threads_of_user
from kernel_mcp.linux.process import tie_to_server
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    NO_GRANTS,
    Builder,
    BuildRequest,
    ContainerOptions,
    Grants,
    GuestPaths,
    Sandbox,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.remedies import cannot_start
from kernel_mcp.sandbox.self_test import require_boundary, run_confined


class PlainBuilder:
    """No confinement of installers: for `--sandbox none`, and if bubblewrap does not work."""

    confined = False

    @asynccontextmanager
    async def owner(
        self, folders: Sequence[Path], *, hostile: bool
    ) -> AsyncIterator[Identity | None]:
        """Yield None: the server keeps owning the folders."""
        yield None

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """Return the command itself; with setpriv, it is killed with the server."""
        return SandboxCommand(argv=[*tie_to_server(), *request.argv], pass_fds=(), env=request.env)


class NoSandbox:
    """Kernels are plain child processes of the server, with its rights."""

    name = "none"
    forks = False
    mount_method = ""

    def __init__(self, boot: Path = BOOT_FOLDER) -> None:
        self._boot = str(boot)

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Return the host's own paths; temporary files go to a folder beside the sockets."""
        return GuestPaths(
            workspace=str(workspace),
            sockets=str(sockets),
            boot=self._boot,
            tmp=str(sockets / SCRATCH),
            other_threads=threads_of_user(os.geteuid()),
        )

    def identity(self, workspace: Path | None = None) -> Identity | None:
        """Return None: kernels run as the server's user."""
        return None

    def release(self, identity: Identity | None) -> None:
        """Do nothing: no identity was reserved."""

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """Return the command itself; with setpriv, it is killed with the server."""
        scratch_folder(request.sockets)
        return SandboxCommand(
            argv=[*tie_to_server(), *request.argv], pass_fds=[*request.inherit], env=request.env
        )

    def expected_confinement(self, identity: Identity | None, *, forked: bool = False) -> None:
        """Return None: nothing is confined."""
        return

    def builder(self) -> Builder | None:
        """Return None: bubblewrap confines installers, if it is available."""
        return None

    def refusal(self, said: str) -> str:
        """Return why no process could be started."""
        return cannot_start(self.name, said)

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        """Return a report with gaps only."""
        return SandboxReport(
            backend=self.name,
            enforced=(),
            gaps=(
                "there is no boundary: code runs with the rights of the server's user",
                "all files, the network and all processes of that user are within reach",
                "processes that a kernel moves to another session outlive it",
            ),
        )


logger = logging.getLogger(__name__)

AUTOMATIC = ("bwrap",)
"""Backends that `auto` may choose, best first."""
WEAKER = ("landlock",)
"""Backends with gaps, which are used only if the operator names them."""


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
"""Every backend by its name in `--sandbox`."""


def builder_for(sandbox: Sandbox | None = None) -> Builder:
    """Return the sandbox's builder, or bubblewrap's if it works, or an unconfined one; blocks."""
    if sandbox is not None and (own := sandbox.builder()) is not None:
        return own
    try:
        found = BwrapSandbox.detect()
        _probe(found)
        return found.builder()
    except SandboxUnavailable as reason:
        logger.warning(
            "packages are unpacked without a sandbox, which runs none of their code: %s", reason
        )
        return PlainBuilder()


def select_sandbox(
    *names: str,
    container: ContainerOptions | None = None,
    prove: Callable[[Sandbox], None] | None = None,
) -> Sandbox:
    """Return the first of these backends that works, tested by a process in it.

    `auto` stands for `AUTOMATIC`; choosing a later name logs a warning. Blocks some 10 ms, half a
    second for `container`. `prove` runs that process, and may raise SandboxUnavailable to require
    more. Raises SandboxUnavailable with the remedy, ConfigError for an unknown name.
    """
    tried = AUTOMATIC if names == ("auto",) else names
    refusals: list[str] = []
    for name in tried:
        found = _try(name, container, prove)
        if not isinstance(found, SandboxUnavailable):
            if refusals:
                logger.warning(
                    "kernels get the %s sandbox, with the gaps that `info` lists, because what "
                    "--sandbox %s names before it cannot be used. %s",
                    name,
                    ",".join(names),
                    " ".join(refusals),
                )
            return found
        refusals.append(f"{name}: {found}" if len(tried) > 1 else str(found))
    if tried is AUTOMATIC:
        refusals += [
            f"The {name} sandbox works here: `--sandbox {','.join((*AUTOMATIC, name))}` takes it "
            f"instead, with the gaps that `kernel-mcp doctor --sandbox {name}` lists."
            for name in WEAKER
            if not isinstance(_try(name, container, prove), SandboxUnavailable)
        ]
    raise SandboxUnavailable("\n".join(refusals))


def _try(
    name: str, container: ContainerOptions | None, prove: Callable[[Sandbox], None] | None
) -> Sandbox | SandboxUnavailable:
    detect = BACKENDS.get(name) or _of_extension(name)
    try:
        sandbox = _container(container) if name == "container" else detect()
        _start(sandbox, prove or _probe)
    except SandboxUnavailable as refusal:
        return refusal
    except LaunchError as refusal:  # a folder of this machine cannot be shown
        return SandboxUnavailable(str(refusal))
    return sandbox


def _of_extension(name: str) -> Callable[[], Sandbox]:
    if name not in extensions.offered(extensions.SANDBOXES):
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no sandbox {name!r}; choose one of {known}")
    detect = extensions.load(extensions.SANDBOXES, name)

    def checked() -> Sandbox:
        found: Sandbox = detect()
        if not hasattr(found, "report"):
            raise ConfigError(f"the sandbox {name!r} is of {type(found).__name__}, not a sandbox")
        if not found.report().enforced:
            raise SandboxUnavailable(
                f"the sandbox {name!r} enforces nothing, as its report() says. If code may run "
                "with all rights of the server's user, use --sandbox none."
            )
        return found

    return checked


def _start(sandbox: Sandbox, prove: Callable[[Sandbox], None]) -> None:
    """Run `prove`. Raises SandboxUnavailable.

    If no process starts at all, the error is that of the start.
    """
    try:
        prove(sandbox)
    except SandboxUnavailable:
        _probe(sandbox)
        raise


def _probe(sandbox: Sandbox) -> None:
    """Run `exit 0` in the sandbox. Raises SandboxUnavailable if that fails."""
    done = run_confined(sandbox, ["/bin/sh", "-c", "exit 0"])
    if done.returncode == 0:
        return
    said = done.stderr if done.stderr.strip() else f"nothing, exit code {done.returncode}"
    raise SandboxUnavailable(sandbox.refusal(said))


def proven_sandbox(*names: str, container: ContainerOptions | None = None) -> Sandbox:
    """Return the first of these backends whose guarantees hold.

    A backend without guarantees, such as `none`, must only start a process. Blocks some 40 ms, a
    second for a container. Raises SandboxUnavailable, ConfigError.
    """
    return select_sandbox(*names, container=container, prove=_prove)


def _prove(sandbox: Sandbox) -> None:
    if sandbox.report().enforced:
        require_boundary(sandbox)
    else:
        _probe(sandbox)


def begin_proof(*names: str, container: ContainerOptions | None = None) -> Future[Sandbox]:
    """Start `proven_sandbox` in its own thread; return its result as a future.

    Raises SandboxUnavailable if no thread can be started.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="sandbox-proof")
    try:
        return executor.submit(proven_sandbox, *names, container=container)
    except RuntimeError as reason:
        raise SandboxUnavailable(
            "The system lets the server start no thread, and so no kernel either: raise its limit "
            "of processes and threads (ulimit -u, or pids.max of its control group)."
        ) from reason
    finally:
        executor.shutdown(wait=False)
