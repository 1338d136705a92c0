"""Kernels in containers of docker or podman: one container for each kernel.

The engine only makes the container. `shim.py` on the host then sends the kernel's descriptors over
a Unix socket to the first process inside, `kernel_specs/container/enter.py`. So pipes, readiness
and the end of a kernel do not depend on the engine. The shim exits once the server has the
connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import resource
import secrets
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import Identity, runtime_folder
from kernel_mcp.linux.process import foreign_environment
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    BY_BINDS,
    BY_TREES,
    NO_GRANTS,
    ContainerOptions,
    Grants,
    GuestPaths,
    Passed,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.confinement import NAMESPACES, ExpectedConfinement, user_of
from kernel_mcp.sandbox.container.engine import (
    LABEL,
    Engine,
    container_name,
    container_report,
    mount,
    nameable,
)
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.users import IdentityPool, KernelUsers, reservable_ids
from kernel_mcp.units import MIB

_OF_THE_IMAGE = ("usr", "opt", "var", "tmp", "run", "lib", "lib64", "bin", "sbin", "srv", "mnt")
"""Top-level folders of every image that any user may enter."""


class EtcFiles:
    """Files for /etc and folders with mount points, in a folder of this user, named by content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def account_files(self, user: Identity, hosts: Sequence[tuple[str, str]] = ()) -> list[Path]:
        """Return files for /etc; kernels with the same user and hosts share them."""
        key = hashlib.sha256(repr(tuple(hosts)).encode()).hexdigest()[:16] if hosts else ""
        folder = self._folder / f"{user.uid}-{user.gid}{'-' * bool(key)}{key}"
        _open_folder(folder)
        found = []
        for name, content in mounts.account_files(user.uid, user.gid, hosts).items():
            path = folder / name
            if not path.exists() or path.read_text() != content:
                fresh = path.with_name(f".{name}-{secrets.token_hex(4)}")
                fresh.write_text(content)
                fresh.chmod(0o644)
                fresh.rename(path)
            found.append(path)
        return found

    def way_to(self, paths: Sequence[Path], shown: Sequence[mounts.Folder] = ()) -> list[Path]:
        """Return top-level folders that contain only the mount points `paths` and those of `shown`.

        They replace the image's folders, which the user may be unable to enter, such as /root.
        """
        ends = {path: path.is_dir() for path in paths}
        ends |= {Path(each.guest): each.is_folder for each in shown}
        key = hashlib.sha256("\0".join(map(str, ends.items())).encode()).hexdigest()[:16]
        root = self._folder / f"way-{key}"
        _open_folder(root)
        tops = set()
        for path, is_folder in ends.items():
            if path.parts[1] in _OF_THE_IMAGE or len(path.parts) == 2:
                continue
            tops.add(root / path.parts[1])
            place = root
            for part in path.parts[1:-1]:
                place /= part
                _open_folder(place)
            if is_folder:
                _open_folder(place / path.name)
            else:
                (place / path.name).touch()
        return sorted(tops)


def outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths and their real paths, without those inside others.

    Raises LaunchError.
    """
    wanted = set()
    for path in paths:
        if not path.is_absolute() or len(path.parts) < 2:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check what --python and --kernel name"
            )
        if not path.exists():
            raise LaunchError(f"{path} does not exist, but the kernel's interpreter needs it")
        wanted |= {Path(os.path.normpath(path)), Path(os.path.realpath(path))}
    return [path for path in sorted(wanted) if not any(other in wanted for other in path.parents)]


def _open_folder(path: Path) -> None:
    """Make a folder of mode 0755 whatever the umask is."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)


_SHIM = Path(__file__).with_name("shim.py")
_ENTER = f"{mounts.BOOT}/container/enter.py"
_MASKED = (
    "cmdline",
    "config.gz",
    "iomem",
    "kallsyms",
    "modules",
    "pressure",
    "vmallocinfo",
    "version_signature",
)
"""Entries of /proc about the host that engines do not mask."""
_WRITABLE = mounts.WRITABLE | {
    *("/dev", "/dev/mqueue", "/proc", "/run/secrets", "/sys", "/sys/fs/cgroup", "/var/log"),
}
"""Writable mounts of a container: the kernel's, and the engine's, where only root may write."""
FIRST_PROCESS_BYTES = 32 * MIB
"""Bytes of memory for the first process, on top of the kernel's limit."""
FIRST_PROCESS_PIDS = 1
DEFAULT_SCRATCH = 512 * MIB


class ContainerSandbox(KernelUsers):
    """Runs each kernel in a container of its own."""

    name = "container"
    forks = False

    def __init__(
        self,
        *,
        engine: Engine,
        image: str,
        seccomp_filter: bytes,
        sealed_filter: bytes,
        identities: IdentityPool | None,
        boot: Path = BOOT_FOLDER,
    ) -> None:
        self.engine = engine
        self.image = image
        self._sealed = base64.b64encode(sealed_filter).decode()
        self.filter = base64.b64encode(seccomp_filter).decode()
        super().__init__(identities)
        self._boot = boot
        self._etc = EtcFiles(runtime_folder("container"))
        self._interpreter = Path(os.path.realpath(sys.executable))
        self._prefixes = tuple(sorted({Path(sys.base_prefix), Path(sys.base_exec_prefix)}))

    @classmethod
    def detect(
        cls, options: ContainerOptions | None = None, boot: Path = BOOT_FOLDER
    ) -> ContainerSandbox:
        """Return the backend for this machine; remove containers of dead servers.

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
            sealed_filter=compile_filter(arch, sealed=True),
            identities=reservable_ids(),
            boot=boot,
        )

    @property
    def mount_method(self) -> str:
        """Return `BY_TREES` for podman, whose containers start in its caller's mount namespace.

        Docker's daemon starts them in its own: `BY_BINDS`.
        """
        return BY_TREES if self.engine.kind == "podman" else BY_BINDS

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Return fixed paths, the same as under bubblewrap."""
        return GuestPaths(
            workspace=mounts.WORKSPACE,
            sockets=mounts.SOCKETS,
            boot=mounts.BOOT,
            layers=mounts.LAYERS,
            # Linux also counts processes per user namespace
            own_process_count=self._identities is not None or self.engine.rootless,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """Return the command of the shim, which runs the engine to start the container."""
        user = identity or Identity(os.geteuid(), os.getegid())
        try:
            options = [
                *self._confinement(user),
                *_resources(request.limits, self.engine.processors),
                *self._ceilings(request.limits, alone=identity is not None),
                *self._tree(request, user),
            ]
        except ValueError as reason:
            raise LaunchError(str(reason)) from reason
        interpreter = [str(self._interpreter), "-I", "-S", "-B"]
        name = container_name()
        named = ["--name", name, "--label", LABEL]
        enter = [_ENTER, f"{mounts.SOCKETS}/enter"]
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
            "filter": self._sealed if request.folders.shown else self.filter,
        }
        with Passed() as passed:
            task_fd = passed.file(json.dumps(task).encode())
            status_read, status = passed.link()
            return SandboxCommand(
                argv=[
                    *request.folders.staged(),
                    *(sys.executable, "-I", "-S", "-B", str(_SHIM)),
                    *("--parent", str(os.getpid()), "--status", status, "--task", task_fd),
                ],
                pass_fds=[*passed.keep(), *request.folders.trees, *request.inherit],
                env=foreign_environment(),  # for the engine; the kernel's is in the task
                status_fd=status_read,
                detached=True,
            )

    def expected_confinement(
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement:
        """Return the expected confinement: the engine's namespaces and filter, and our filter."""
        shared = () if self.engine.rootless else ("user",)
        own = tuple(name for name in NAMESPACES if name not in shared)
        return ExpectedConfinement(
            user_of(identity),
            filters=2,
            namespaces=own,
            inherits=False,
            writable=_WRITABLE,
            scratch=mounts.SCRATCH,
        )

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        """Return the guarantees and gaps of the engine and this project's filter on this host."""
        return container_report(self.engine, grants, own_user=self._identities is not None)

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
            *("--security-opt", "label=disable"),  # SELinux: the mounted folders keep their labels
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
        """Return options for the mounts.

        Raises ValueError, LaunchError for paths that cannot be mounted.
        """
        runtime = outermost((*request.readonly, *self._prefixes))
        options = [
            *self._scratch("/tmp", request.limits.tmp_bytes),
            *self._scratch("/sys", 4096),
            *self._scratch("/var/log", 4096),
            *mount(self._boot, mounts.BOOT),
            *mount(request.workspace, mounts.WORKSPACE, writable=True),
            *mount(request.sockets, mounts.SOCKETS, writable=True),
        ]
        for device in request.devices:
            options += ["--device", f"{device.source}:{device.guest}:rw"]
        for file in self._etc.account_files(user, request.hosts):
            options += mount(file, f"/etc/{file.name}")
        for top in self._etc.way_to(runtime, request.folders.shown):
            options += mount(top, f"/{top.name}")
        for path in runtime:
            options += mount(path, str(path))
        for source, target in request.replaced:
            options += mount(source, str(target))
        for number, layer in enumerate(request.layers):
            options += mount(layer, f"{mounts.LAYERS}/{number}")
        return [*options, *self._folders(request.folders)]

    def _folders(self, folders: mounts.Folders) -> list[str]:
        """Return options for the mounted folders and their masks.

        Masks of paths that the engine cannot name are left to the keeper.
        """
        if not folders.shown:
            return []
        options = [*mount(folders.blank, mounts.BLANK)]
        for folder in folders.shown:
            options += mount(folder.source, folder.guest, writable=folder.writable)
            for source, target, writable in folders.covers(folder):
                if nameable(f"{source}{target}") or self.mount_method == BY_BINDS:
                    options += mount(source, target, writable=writable)
        return options

    def _ceilings(self, limits: Limits, *, alone: bool) -> list[str]:
        """Return options for the rlimits; `alone` if the kernel's host user runs nothing else.

        RLIMIT_NOFILE is the server's, as inherited descriptors keep their numbers. The kernel
        lowers it itself.
        """
        if self.engine.rootless:
            return ["--ulimit", "host"]  # other values could exceed podman's own limits
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        if alone and limits.pids:
            most = limits.pids + FIRST_PROCESS_PIDS
            processes = most if processes < 0 else min(processes, most)
        numbers = (("nofile", files), ("nproc", processes), ("core", 0))
        return [f"--ulimit={name}={number}:{number}" for name, number in numbers]

    def _scratch(self, folder: str, size: int) -> list[str]:
        """Return the options of a tmpfs with the mode of the image's folder; `size` in bytes."""
        copy = ",notmpcopyup" if self.engine.kind == "podman" else ""
        mode = "1777" if folder == "/tmp" else "555"
        words = f"type=tmpfs,dst={folder},tmpfs-size={size or DEFAULT_SCRATCH},tmpfs-mode={mode}"
        return ["--mount", words + copy]


def _resources(limits: Limits, processors: int) -> list[str]:
    """Return options for the engine's limits: memory, processors, processes.

    `processors` is the number of processors, above which engines reject a limit; 0 if the engine
    may not limit them.
    """
    options = ["--shm-size", str(limits.tmp_bytes or DEFAULT_SCRATCH)]
    if limits.memory_bytes:
        memory = str(limits.memory_bytes + FIRST_PROCESS_BYTES)
        options += ["--memory", memory, "--memory-swap", memory]
    if 0 < limits.cpus < processors:
        options += ["--cpus", f"{limits.cpus:g}"]
    pids = limits.pids + FIRST_PROCESS_PIDS if limits.pids else -1
    return [*options, "--pids-limit", str(pids)]
