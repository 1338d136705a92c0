"""The outer sandbox of a template: what a kernel's would show, and the means to build more inside.

The host's files are hidden by bubblewrap. As root, the process inside then enters a user namespace
in which the host's root does not exist; without root, bubblewrap makes that namespace itself.
"""

from __future__ import annotations

import base64
import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.sandbox import rootfs
from kernel_mcp.sandbox.base import BOOT_FOLDER, Identity, SandboxCommand
from kernel_mcp.sandbox.bwrap import GUEST_ID
from kernel_mcp.sandbox.identity import IdMap, find_block
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.syscalls import architecture

SOCKETS_PARENT = "/sessions/k"
WORKSPACES_PARENT = "/sessions/w"
"""Where the template of an unprivileged server has the folders that it shares out."""
LAYERS = "/packages"
MOST_LAYERS = 8
HOSTNAME = "sandbox"
TEMPLATE_TMP_BYTES = 64 * 1024 * 1024
"""What packages may leave in the template's own /tmp while they are imported."""

_NAMESPACES = (
    "--unshare-ipc",
    "--unshare-pid",
    "--as-pid-1",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--unshare-net",
    *("--hostname", HOSTNAME),
    "--new-session",
    "--die-with-parent",
    *("--cap-drop", "ALL"),
)
_TO_ENTER = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
"""What root needs to make a user namespace and to write its maps."""
_TO_BUILD = (
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_NET_ADMIN",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_SETFCAP",  # to map the template's own user into a namespace below
)
"""What the template needs in its own user namespace: bubblewrap's, when the server is not root."""


@dataclass(frozen=True, slots=True)
class Parents:
    """The folders below which all socket folders and all workspaces of a server are."""

    sockets: Path
    workspaces: Path

    def inside(self, folder: Path) -> str:
        """Where the template sees a folder directly below one of them. Raises LaunchError."""
        for parent, place in (
            (self.sockets, SOCKETS_PARENT),
            (self.workspaces, WORKSPACES_PARENT),
        ):
            if folder.parent == parent:
                return f"{place}/{folder.name}"
        raise LaunchError(f"{folder} is not where the template can reach it")


def outer_command(
    environment: KernelEnvironment, control: int, parents: Parents, identity: Identity | None
) -> SandboxCommand:
    """How to start a template whose end of the control socket is the descriptor `control`.

    `identity` is whom it is on the host of a root server, None for the server's own user.
    Raises LaunchError for a runtime that cannot be bound, SandboxUnavailable without bubblewrap.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed, and templates need it")
    entry = [f"{rootfs.BOOT}/template/start.py", "enter", str(control)]
    if identity is not None:
        entry += [",".join(":".join(map(str, row)) for row in _maps(identity))]
    options = _options(environment, parents, root=identity is not None)
    with ExitStack() as undo:
        passed = [control]
        for name, content in rootfs.account_files(GUEST_ID, GUEST_ID).items():
            fd = os.memfd_create("kernel-mcp", os.MFD_CLOEXEC)
            undo.callback(os.close, fd)
            os.write(fd, content.encode())
            os.lseek(fd, 0, os.SEEK_SET)
            passed.append(fd)
            options += ["--perms", "0644", "--file", str(fd), f"/etc/{name}"]
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
        command = SandboxCommand(
            argv=[
                program,
                *options,
                *("--", str(environment.python), "-I", "-S", "-B", *entry),
            ],
            pass_fds=passed,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        undo.pop_all()
    return command


def start_message(environment: KernelEnvironment, preload: Sequence[str]) -> dict[str, Any]:
    """What the template is told first.

    Raises SandboxUnavailable where there is no system call filter for this machine, LaunchError.
    """
    arch = architecture(platform.machine())
    if arch is None:
        raise SandboxUnavailable(f"there is no system call filter for {platform.machine()}")
    runtime = rootfs.runtime_options(environment.readonly)
    return {
        "python": str(environment.python),
        "preload": list(preload),
        "masks": rootfs.mask_options()[2::3],
        "kept": [path for path in _bound(runtime) if path.startswith("/tmp/")],
        "filter": base64.b64encode(compile_filter(arch)).decode(),
    }


def layer_paths(count: int) -> list[str]:
    """Where a kernel finds the first `count` package layers of its session."""
    return [f"{LAYERS}/{number}" for number in range(count)]


def _options(environment: KernelEnvironment, parents: Parents, *, root: bool) -> list[str]:
    features = rootfs.Features(size=True, disable_userns=False)
    options = [*_NAMESPACES]
    if not root:
        options += ["--unshare-user", "--uid", "0", "--gid", "0"]
    for capability in _TO_ENTER if root else _TO_BUILD:
        options += ["--cap-add", capability]
    options += rootfs.system_options()
    options += rootfs.scratch_options("/tmp", TEMPLATE_TMP_BYTES, features)
    options += rootfs.runtime_options(environment.readonly)
    options += ["--ro-bind", str(BOOT_FOLDER), rootfs.BOOT, "--dev", "/dev"]
    options += rootfs.scratch_options("/dev/shm", TEMPLATE_TMP_BYTES, features)
    # where something covers parts of /proc, a user namespace may not mount another one: no masks,
    # and as root no --proc either, which makes parts of it read-only by mounts
    options += ["--dir", "/proc"] if root else ["--proc", "/proc"]
    for folder in (rootfs.WORKSPACE, rootfs.SOCKETS, LAYERS, *layer_paths(MOST_LAYERS)):
        options += ["--perms", "0755", "--dir", folder]
    if not root:
        options += ["--bind", str(parents.sockets), SOCKETS_PARENT]
        options += ["--bind", str(parents.workspaces), WORKSPACES_PARENT]
    return options


def _bound(options: Sequence[str]) -> list[str]:
    """The targets of the binds among bubblewrap options."""
    return [options[i + 2] for i, option in enumerate(options) if option == "--ro-bind"]


def _maps(identity: Identity) -> list[tuple[int, int, int]]:
    """Id maps for a namespace whose root is `identity`: kernels' ids stay as they are.

    Rows are first id inside, first id on the host, count.
    """
    users, groups = (IdMap.read(Path(f"/proc/self/{name}_map")) for name in ("uid", "gid"))
    block = find_block(users, groups)
    if block is None or identity.uid not in block:
        raise SandboxUnavailable("the user ids of kernels cannot be mapped into a user namespace")
    rest = (range(block.start, identity.uid), range(identity.uid + 1, block.stop))
    return [(0, identity.uid, 1), *((part.start, part.start, len(part)) for part in rest if part)]
