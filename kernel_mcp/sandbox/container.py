"""Kernels in containers of docker or podman: one container for each kernel.

The engine's command line only makes the container. A small program of ours is its first process,
`kernel_specs/container/enter.py`; another one, `conductor.py`, stays on the host and hands it the
kernel's descriptors over a Unix socket. So pipes, readiness and the end of a kernel work as they
do in any other sandbox, and the engine is not needed for them.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import resource
import sys
from pathlib import Path

from kernel_mcp.config.settings import MIB, Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import Identity, runtime_folder
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox import rootfs
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    GuestPaths,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.container_report import container_report
from kernel_mcp.sandbox.engine import LABEL, ContainerOptions, Engine, container_name, mount
from kernel_mcp.sandbox.furniture import Furniture, outermost
from kernel_mcp.sandbox.identity import IdentityPool
from kernel_mcp.sandbox.passed import Passed
from kernel_mcp.sandbox.promise import NAMESPACES, Promise, user_of
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.users import KernelUsers, reservable_ids

_CONDUCTOR = Path(__file__).with_name("conductor.py")
_ENTER = f"{rootfs.BOOT}/container/enter.py"
_MASKED = (
    "cmdline",
    "config.gz",
    "iomem",
    "kallsyms",
    "modules",
    "vmallocinfo",
    "version_signature",
)
"""Files of /proc about the host that engines leave readable."""
_WRITABLE = rootfs.WRITABLE | {
    *("/dev", "/dev/mqueue", "/proc", "/run/secrets", "/sys", "/sys/fs/cgroup", "/var/log"),
}
"""What engines mount beside what a kernel may write to; root alone may write there."""
FIRST_PROCESS_BYTES = 32 * MIB
"""Room for the first process, on top of the kernel's memory."""
FIRST_PROCESS_PIDS = 1
DEFAULT_SCRATCH = 512 * MIB


class ContainerSandbox(KernelUsers):
    """One container per kernel."""

    name = "container"
    forks = False

    def __init__(
        self,
        *,
        engine: Engine,
        image: str,
        seccomp_filter: bytes,
        identities: IdentityPool | None,
        boot: Path = BOOT_FOLDER,
    ) -> None:
        self.engine = engine
        self.image = image
        self.filter = base64.b64encode(seccomp_filter).decode()
        super().__init__(identities)
        self._boot = boot
        self._furniture = Furniture(runtime_folder("container"))
        self._interpreter = Path(os.path.realpath(sys.executable))
        self._prefixes = tuple(sorted({Path(sys.base_prefix), Path(sys.base_exec_prefix)}))

    @classmethod
    def detect(
        cls, options: ContainerOptions | None = None, boot: Path = BOOT_FOLDER
    ) -> ContainerSandbox:
        """The backend as this machine allows it, leftovers of dead servers removed.

        Raises SandboxUnavailable with the remedy.
        """
        options = options or ContainerOptions()
        arch = architecture(platform.machine())
        if arch is None:
            raise SandboxUnavailable(
                f"there is no system call filter for {platform.machine()} machines; kernel-mcp "
                "can sandbox on x86_64 and aarch64"
            )
        engine = Engine.find(options)
        engine.require_image(options.image)
        engine.sweep()
        return cls(
            engine=engine,
            image=options.image,
            seccomp_filter=compile_filter(arch),
            identities=reservable_ids(),
            boot=boot,
        )

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Fixed places, those of bubblewrap."""
        return GuestPaths(
            workspace=rootfs.WORKSPACE,
            sockets=rootfs.SOCKETS,
            boot=rootfs.BOOT,
            layers=rootfs.LAYERS,
            # a user namespace has a count of its own, too
            own_process_count=self._identities is not None or self.engine.rootless,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The conductor, which has the engine start the container."""
        user = identity or Identity(os.geteuid(), os.getegid())
        try:
            options = [
                *self._confinement(user),
                *_resources(request.limits),
                *self._ceilings(request.limits, alone=identity is not None),
                *self._tree(request, user),
            ]
        except ValueError as reason:
            raise LaunchError(str(reason)) from reason
        interpreter = [str(self._interpreter), "-I", "-S", "-B"]
        name = container_name()
        named = ["--name", name, "--label", LABEL]
        enter = [_ENTER, f"{rootfs.SOCKETS}/enter"]
        check = "import ctypes, json, select, socket"
        task = {
            "run": [*self._run("--detach", *named, *options), *interpreter, *enter],
            "alive": self.engine.command("container", "inspect", name),
            "diagnose": [*self._run(*options), *interpreter, "-c", check],
            "uid": user.uid,
            "sockets": str(request.sockets),
            "inherit": list(request.inherit),
            "argv": list(request.argv),
            "env": dict(request.env),
            "filter": self.filter,
        }
        with Passed() as passed:
            task_fd = passed.file(json.dumps(task).encode())
            status_read, status = passed.status()
            return SandboxCommand(
                argv=[
                    *(sys.executable, "-I", "-S", "-B", str(_CONDUCTOR)),
                    *("--parent", str(os.getpid()), "--status", status, "--task", task_fd),
                ],
                pass_fds=[*passed.keep(), *request.inherit],
                env=dict(os.environ),  # of the engine; the kernel's own is part of the task
                status_fd=status_read,
                detached=True,
            )

    def promise(self, identity: Identity | None, *, forked: bool = False) -> Promise:
        """The engine's namespaces, its system call filter and ours."""
        shared = () if self.engine.rootless else ("user",)
        own = tuple(name for name in NAMESPACES if name not in shared)
        return Promise(
            user_of(identity),
            filters=2,
            namespaces=own,
            inherits=False,
            writable=_WRITABLE,
            scratch=rootfs.SCRATCH,
        )

    def report(self) -> SandboxReport:
        """What the engine and our filter put in force here."""
        return container_report(self.engine, own_user=self._identities is not None)

    def _run(self, *words: str) -> list[str]:
        runtime = (
            ["--runtime", self.engine.runtime]
            if self.engine.runtime and self.engine.kind == "docker"
            else []
        )
        return [*self.engine.command("run"), *runtime, "--rm", *words, self.image]

    def _confinement(self, user: Identity) -> list[str]:
        options = [
            *("--pull", "never"),
            *("--network", "none"),
            *("--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges"),
            *("--security-opt", "label=disable"),  # the mounted folders keep their labels
            "--read-only",
            *("--user", f"{user.uid}:{user.gid}"),
            *("--hostname", "sandbox"),
            *("--ipc", "private"),
            *("--cgroupns", "private"),
            *("--log-driver", "none"),
            *("--workdir", "/"),
            *("--entrypoint", ""),
        ]
        if self.engine.kind == "podman":
            masked = ":".join(f"/proc/{name}" for name in _MASKED)
            options += ["--read-only-tmpfs=false", "--no-hosts", "--security-opt", f"mask={masked}"]
        if self.engine.rootless:
            options += ["--userns", "keep-id"]
        return options

    def _tree(self, request: SandboxRequest, user: Identity) -> list[str]:
        """The mounts. Raises ValueError, LaunchError for paths that cannot be mounted."""
        runtime = outermost((*request.readonly, *self._prefixes))
        options = [
            *self._scratch("/tmp", request.limits.tmp_bytes),
            *self._scratch("/sys", 4096),
            *self._scratch("/var/log", 4096),
            *mount(self._boot, rootfs.BOOT),
            *mount(request.workspace, rootfs.WORKSPACE, writable=True),
            *mount(request.sockets, rootfs.SOCKETS, writable=True),
        ]
        for file in self._furniture.account_files(user):
            options += mount(file, f"/etc/{file.name}")
        for top in self._furniture.way_to(runtime):
            options += mount(top, f"/{top.name}")
        for path in runtime:
            options += mount(path, str(path))
        for number, layer in enumerate(request.layers):
            options += mount(layer, f"{rootfs.LAYERS}/{number}")
        return options

    def _ceilings(self, limits: Limits, *, alone: bool) -> list[str]:
        """The rlimits; `alone` when the kernel's host user runs nothing else.

        Of files it may open as many as this server: inherited descriptors keep their numbers, and
        the kernel lowers this limit itself, as in any sandbox.
        """
        if self.engine.rootless:
            return ["--ulimit", "host"]  # any other might be above those of podman
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        if alone and limits.pids:
            most = limits.pids + FIRST_PROCESS_PIDS
            processes = most if processes < 0 else min(processes, most)
        numbers = (("nofile", files), ("nproc", processes), ("core", 0))
        return [f"--ulimit={name}={number}:{number}" for name, number in numbers]

    def _scratch(self, folder: str, size: int) -> list[str]:
        """A tmpfs whose mode is that of the image's folder."""
        copy = ",notmpcopyup" if self.engine.kind == "podman" else ""
        mode = "1777" if folder == "/tmp" else "555"
        words = f"type=tmpfs,dst={folder},tmpfs-size={size or DEFAULT_SCRATCH},tmpfs-mode={mode}"
        return ["--mount", words + copy]


def _resources(limits: Limits) -> list[str]:
    """What the engine's control group limits."""
    options = ["--shm-size", str(limits.tmp_bytes or DEFAULT_SCRATCH)]
    if limits.memory_bytes:
        memory = str(limits.memory_bytes + FIRST_PROCESS_BYTES)
        options += ["--memory", memory, "--memory-swap", memory]
    if limits.cpus:
        options += ["--cpus", f"{limits.cpus:g}"]
    pids = limits.pids + FIRST_PROCESS_PIDS if limits.pids else -1
    return [*options, "--pids-limit", str(pids)]
