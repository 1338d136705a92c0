"""The outer sandbox of a template, and the supervisor that replaces templates.

bubblewrap hides the host's files. As root, the process inside then enters a user namespace without
the host's root; otherwise bubblewrap makes that namespace itself.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.config.mounts import Mount
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.host_folders import Device, within
from kernel_mcp.launch import rundir
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.template.process import TemplateProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.process import find_program
from kernel_mcp.linux.syscalls import Architecture, architecture
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import BOOT_FOLDER, Passed, Sandbox, SandboxCommand
from kernel_mcp.sandbox.bwrap import GUEST_ID
from kernel_mcp.sandbox.seccomp import BUILDING, compile_filter
from kernel_mcp.sandbox.users import IdMap, find_block

SESSIONS = "/sessions"
"""Folder in the template of an unprivileged server that contains the folders for its kernels."""
MOST_LAYERS = 8
HOSTNAME = "sandbox"
TEMPLATE_TMP_BYTES = 64 * 1024 * 1024
"""Size in bytes of the template's own /tmp, for files that packages create at import."""

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
"""Capabilities with which root makes a user namespace and writes its id maps."""
_TO_BUILD = (
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_SETFCAP",  # to map the template's own user into an inner namespace
)
"""Capabilities of a template in its user namespace, made by bubblewrap without root."""


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """The folders that contain all files of kernels, and settings common to all kernels."""

    folders: tuple[Path, ...]
    mounts: tuple[Mount, ...] = ()
    blank: Path = Path("/")
    mark: Callable[[], object] = lambda: None
    hosts: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    devices: tuple[Device, ...] = ()

    def inside(self, path: Path) -> str:
        """Return the path of `path` in the template of an unprivileged server.

        Raises LaunchError if no folder contains it.
        """
        for number, folder in enumerate(self.folders):
            if path.is_relative_to(folder) and path != folder and ".." not in path.parts:
                return f"{SESSIONS}/{number}/{path.relative_to(folder)}"
        raise LaunchError(f"{path} is not below a folder that the template was given")

    @property
    def folder_paths(self) -> list[str]:
        """Paths of the folders in the template of an unprivileged server."""
        return [f"{SESSIONS}/{number}" for number in range(len(self.folders))]

    def options(self) -> list[str]:
        """Return options that bind all folders and mounts; missing folders are created."""
        options: list[str] = []
        for folder, place in zip(self.folders, self.folder_paths, strict=True):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            options += ["--bind", str(folder), place]
        for number, mount in enumerate(self.mounts):
            bind = "--bind" if mount.writable else "--ro-bind"
            options += [bind, str(mount.host), self.mount_path(number)]
        return options

    @staticmethod
    def mount_path(number: int) -> str:
        """Return the path of a mounted folder in the template."""
        return f"{SESSIONS}/m{number}"

    def targets(self, passed: Passed) -> list[str]:
        """Return options that create mount points for mounted folders.

        None are created below /tmp, as each kernel has its own /tmp.
        """
        options: list[str] = []
        if self.mounts:
            options += ["--ro-bind", str(self.blank), mounts.BLANK]
        inner = [each.guest for each in self.mounts]
        for mount in self.mounts:
            parents = [str(parent) for parent in reversed(Path(mount.guest).parents)]
            if "/tmp" in parents or within(str(Path(mount.guest).parent), inner):
                continue
            for parent in parents[1:]:
                options += ["--perms", "0755", "--dir", parent]
            if mount.host.is_dir():
                options += ["--perms", "0755", "--dir", mount.guest]
            else:
                options += ["--perms", "0644", "--file", passed.file(b""), mount.guest]
        return options


def outer_command(
    environment: KernelEnvironment,
    control: int,
    settings: TemplateSettings,
    identity: Identity | None,
) -> SandboxCommand:
    """Return the command of a template whose end of the control socket is descriptor `control`.

    `identity` is the template's user on the host of a root server, None for the server's own user.
    The seccomp filter permits packages little more than kernels. Raises LaunchError for a runtime
    that cannot be bound, SandboxUnavailable without bubblewrap or a filter for this machine.
    """
    program = find_program("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed, and templates need it")
    role = "init" if identity is None else "enter"
    entry = [f"{mounts.BOOT}/template/start.py", role, str(control)]
    if identity is not None:
        entry += [",".join(":".join(map(str, row)) for row in _maps(identity))]
    options = _options(environment, settings, root=identity is not None)
    with Passed() as passed:
        options += settings.targets(passed)
        for name, content in mounts.account_files(GUEST_ID, GUEST_ID, settings.hosts).items():
            options += ["--perms", "0644", "--file", passed.file(content.encode()), f"/etc/{name}"]
        options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
        options += ["--seccomp", passed.file(_filter(settings, BUILDING))]
        return SandboxCommand(
            argv=[
                program,
                *options,
                *("--", str(environment.bare), "-I", "-S", "-B", *entry),
            ],
            pass_fds=[control, *passed.keep()],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
        )


def start_message(
    environment: KernelEnvironment, preload: Sequence[str], settings: TemplateSettings
) -> dict[str, Any]:
    """Return the first message to a template: interpreter, imports, masked paths, filter.

    Raises LaunchError, and SandboxUnavailable without a filter for this machine.
    """
    runtime = mounts.runtime_options(environment.readonly)
    return {
        "python": str(environment.python),
        "preload": list(preload),
        "support": rundir.support_of(environment),
        "masks": list(mounts.masked()),
        "fixed": list(mounts.fixed()) if mounts.opens_proc(settings.devices) else [],
        "kept": [path for path in _bound(runtime) if path.startswith("/tmp/")],
        "filter": base64.b64encode(_filter(settings)).decode(),
        "variables": dict(settings.variables),
    }


def _filter(settings: TemplateSettings, but: Collection[str] = ()) -> bytes:
    return compile_filter(_architecture(), but, sealed=bool(settings.mounts), copies=True)


def _architecture() -> Architecture:
    arch = architecture(platform.machine())
    if arch is None:
        raise SandboxUnavailable(f"there is no system call filter for {platform.machine()}")
    return arch


def _options(
    environment: KernelEnvironment, settings: TemplateSettings, *, root: bool
) -> list[str]:
    features = mounts.Features(size=True, disable_userns=False)
    options = [*_NAMESPACES]
    if not root:
        options += ["--unshare-user", "--uid", "0", "--gid", "0"]
    for capability in _TO_ENTER if root else _TO_BUILD:
        options += ["--cap-add", capability]
    options += mounts.system_options()
    options += mounts.scratch_options("/tmp", TEMPLATE_TMP_BYTES, features)
    options += mounts.runtime_options(environment.readonly)
    options += mounts.replaced_options(environment.replaced)
    options += ["--ro-bind", str(BOOT_FOLDER), mounts.BOOT, "--dev", "/dev"]
    options += mounts.device_options(settings.devices)
    options += mounts.scratch_options("/dev/shm", TEMPLATE_TMP_BYTES, features)
    # Linux refuses to mount a /proc in a user namespace if parts of the outer one are covered. So
    # there are no masks here, and as root no `--proc`, which makes parts of it read-only by mounts.
    options += ["--dir", "/proc"] if root else ["--proc", "/proc"]
    layers = [f"{mounts.LAYERS}/{number}" for number in range(MOST_LAYERS)]
    for folder in (mounts.WORKSPACE, mounts.SOCKETS, mounts.LAYERS, *layers):
        options += ["--perms", "0755", "--dir", folder]
    if not root:
        options += settings.options()
    return options


def _bound(options: Sequence[str]) -> list[str]:
    """Return the targets of read-only binds among bubblewrap options."""
    return [options[i + 2] for i, option in enumerate(options) if option == "--ro-bind"]


def _maps(identity: Identity) -> list[tuple[int, int, int]]:
    """Return rows of an id map: first id inside, first id on the host, count.

    `identity` is mapped to 0, all other ids to themselves. Raises SandboxUnavailable if they cannot
    be mapped.
    """
    users, groups = (IdMap.read(Path(f"/proc/self/{name}_map")) for name in ("uid", "gid"))
    block = find_block(users, groups)
    if block is None or identity.uid not in block:
        raise SandboxUnavailable("the user ids of kernels cannot be mapped into a user namespace")
    rest = (range(block.start, identity.uid), range(identity.uid + 1, block.stop))
    return [(0, identity.uid, 1), *((part.start, part.start, len(part)) for part in rest if part)]


logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
MOST_FAILURES = 3
"""Consecutive failed forks after which a template is replaced."""


class TemplateSupervisor:
    """The current template of one environment, and earlier ones until their last kernel ends."""

    def __init__(
        self,
        sandbox: Sandbox,
        settings: TemplateSettings,
        environment: KernelEnvironment,
        preload: Sequence[str],
        remark: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`remark` is called with texts that the next answers include."""
        self._sandbox = sandbox
        self._remark = remark
        self._settings = settings
        self.environment = environment
        self.preload = tuple(preload)
        self._current: TemplateProcess | None = None
        self._all: dict[TemplateProcess, Identity | None] = {}
        self._again: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S
        self._failures = 0
        self.refusal = ""
        """Reason not to use templates for this environment; empty for none."""
        self._mark: object = None
        self._start()

    def renew(self) -> None:
        """Replace the template if a mounted folder was replaced on the host."""
        if self._mark != self._settings.mark() and self._current is not None:
            self._current.stop_forking()
            self._replace("a mounted folder was replaced on the host")

    @property
    def template(self) -> TemplateProcess | None:
        """The template that can fork now, or None."""
        current = self._current
        return current if current is not None and current.usable else None

    @property
    def loading(self) -> bool:
        """Return True if the template is starting: it runs but cannot fork yet."""
        current = self._current
        return current is not None and current.alive and not current.usable

    @property
    def busy(self) -> bool:
        """Return True if any template runs, earlier ones included."""
        return bool(self._all)

    async def can_fork(self) -> bool:
        """Wait until the current template can fork or has failed; return True if it can."""
        return self._current is not None and await self._current.can_fork()

    async def stocked(self) -> None:
        """Wait until the current template has made its first imports, or has failed."""
        if self._current is not None:
            await self._current.stocked()

    async def ready(self) -> bool:
        """Wait until the current template has imported everything or has failed.

        Return True if it can fork.
        """
        return self._current is not None and await self._current.ready()

    def forked(self) -> None:
        """Record a successful fork: reset the count of failures and the pause."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self) -> None:
        """Record a failed fork; replace the template after `MOST_FAILURES` in a row."""
        self._failures += 1
        if self._failures >= MOST_FAILURES and self._current is not None:
            self._current.stop_forking()
            self._replace(f"{self._failures} kernels in a row could not be forked")

    def refuse(self, reason: str) -> None:
        """Use no template for this environment any more: a fork was not confined."""
        if not self.refusal:
            self.refusal = reason
            logger.error(
                "the template of %s is refused and kernels start cold, as %s. Run `kernel-mcp "
                "doctor` and report this as a defect.",
                self.environment.python,
                reason,
            )
        self.stop_forking()

    def stop_forking(self) -> None:
        """Stop forking and start no other template; running kernels are kept."""
        self._current = None
        if self._again is not None:
            self._again.cancel()
        for template in list(self._all):
            template.stop_forking()

    async def aclose(self) -> None:
        """End all templates and their remaining kernels."""
        self.stop_forking()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for template in list(self._all):
                    tasks.start_soon(template.aclose)

    def _start(self) -> None:
        self._failures = 0
        self._mark = self._settings.mark()
        identity = None
        with Barrier("starting a template") as barrier:
            identity = self._sandbox.identity()
            template = TemplateProcess(
                lambda control: outer_command(self.environment, control, self._settings, identity),
                start_message(self.environment, self.preload, self._settings),
                self._on_change,
            )
            self._current = template
            self._all[template] = identity
        if barrier.failure is not None:
            self._sandbox.release(identity)
            self._replace(reason_of(barrier.failure))

    def _on_change(self, template: TemplateProcess) -> None:
        if template.gone.is_set():
            self._sandbox.release(self._all.pop(template, None))
        if template is self._current and not template.alive:
            self._replace(template.reason, template.output)
        elif template.whole:
            for name, error in template.missing.items():
                logger.info("not preloaded: %s (%s)", name, error)

    def _replace(self, reason: str, output: str = "") -> None:
        """Start another template after a pause; until then kernels start cold.

        Only the first of several consecutive replacements is added to answers.
        """
        self._current = None
        logger.warning(
            "the template of %s is replaced in %g s, kernels start cold until then: %s%s",
            self.environment.python,
            self._pause_s,
            reason,
            f". It wrote:\n{output}" if output else "",
        )
        if self._pause_s == FIRST_PAUSE_S:
            self._remark(
                f"The template that kernels are forked from is replaced ({reason}): kernels start "
                "cold until the next one runs"
            )
        self._again = asyncio.get_running_loop().call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
