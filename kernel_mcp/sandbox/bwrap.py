"""Kernels under bubblewrap: namespaces, a minimal root, no capabilities, a system call filter.

A root server gives each session a host user id of its own, without a user namespace: with one, the
kernel would still be host uid 0. Any other server uses an unprivileged user namespace.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.process import find_program
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    GuestPaths,
    Passed,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.promise import NAMESPACES, Promise, user_of
from kernel_mcp.sandbox.remedies import install_hint
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.users import IdentityPool, KernelUsers, reservable_ids

GUEST_ID = 1000
"""User and group id inside the user namespace of an unprivileged server."""

_NAMESPACES = (
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-uts",
    "--unshare-cgroup-try",
    *("--hostname", "sandbox"),
    "--new-session",
    "--die-with-parent",
    *("--cap-drop", "ALL"),
)
_FOR_SETPRIV = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")
"""What setpriv needs to change the user id and to empty the bounding set; it drops them too."""
_READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", "/")


class BwrapSandbox(KernelUsers):
    """One bubblewrap per kernel."""

    name = "bwrap"
    forks = True

    def __init__(
        self,
        *,
        program: str,
        setpriv: str,
        features: mounts.Features,
        seccomp_filter: bytes,
        identities: IdentityPool | None,
        boot: Path,
    ) -> None:
        self.program = program
        self._setpriv = setpriv
        self.features = features
        self.filter = seccomp_filter
        super().__init__(identities)
        self._boot = str(boot)
        self._system = mounts.system_options()
        self._proc = mounts.proc_options()
        self._masked = mounts.masked()

    @classmethod
    def detect(cls, boot: Path = BOOT_FOLDER) -> BwrapSandbox:
        """The backend as this machine allows it; `boot` holds `restricted/boot.py`.

        Raises SandboxUnavailable with the remedy.
        """
        program = find_program("bwrap")
        if program is None:
            raise SandboxUnavailable(
                f"bubblewrap is not installed, and kernels need it as their sandbox. "
                f"{install_hint('bubblewrap')}"
            )
        arch = architecture(platform.machine())
        if arch is None:
            raise SandboxUnavailable(
                f"there is no system call filter for {platform.machine()} machines; kernel-mcp "
                "can sandbox on x86_64 and aarch64. `--sandbox none` runs kernels unconfined, "
                "at your own risk."
            )
        text = subprocess.run(
            [program, "--help"], capture_output=True, text=True, check=False, timeout=10
        ).stdout
        if "--perms" not in text:
            raise SandboxUnavailable(
                f"{program} is too old: kernel-mcp needs bubblewrap 0.5 or later. "
                f"{install_hint('bubblewrap')}"
            )
        identities = reservable_ids(unless_nested=True)
        setpriv = shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin") or ""
        if identities is not None and not setpriv:
            raise SandboxUnavailable(
                "setpriv is not installed; a root server needs it to give kernels a user id of "
                f"their own. {install_hint('util-linux')}"
            )
        return cls(
            program=program,
            setpriv=setpriv,
            features=mounts.Features("--size" in text, "--disable-userns" in text),
            seccomp_filter=compile_filter(arch),
            identities=identities,
            boot=boot,
        )

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """The same places for every kernel."""
        return GuestPaths(
            workspace=mounts.WORKSPACE,
            sockets=mounts.SOCKETS,
            boot=mounts.BOOT,
            layers=mounts.LAYERS,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """The bubblewrap command line; its options travel in a file that only bubblewrap sees."""
        with Passed() as passed:
            files = mounts.account_files(*self._ids(identity))
            options = [
                *_NAMESPACES,
                "--unshare-net",
                *self._privilege_options(identity),
                *self._system,
                *mounts.scratch_options("/tmp", request.limits.tmp_bytes, self.features),
                *mounts.runtime_options(request.readonly),
                *("--ro-bind", self._boot, mounts.BOOT),
                *("--dev", "/dev"),
                *mounts.scratch_options("/dev/shm", request.limits.tmp_bytes, self.features),
                *self._proc,
            ]
            for name, content in files.items():
                options += ["--perms", "0644", "--file", passed.file(content.encode())]
                options += [f"/etc/{name}"]
            options += ["--bind", str(request.workspace), mounts.WORKSPACE]
            options += ["--bind", str(request.sockets), mounts.SOCKETS]
            options += mounts.layer_options(request.layers)
            options += _READ_ONLY
            options += ["--seccomp", passed.file(self.filter)]
            status_read, status = passed.status()
            options += ["--json-status-fd", status]
            arguments = passed.file("\0".join([*options, ""]).encode())
            return SandboxCommand(
                argv=[
                    self.program,
                    "--args",
                    arguments,
                    "--",
                    *self.drop(identity),
                    *request.argv,
                ],
                pass_fds=[*passed.keep(), *request.inherit],
                env=request.env,
                status_fd=status_read,
            )

    def promise(self, identity: Identity | None, *, forked: bool = False) -> Promise:
        """All namespaces; a root server's cold kernels alone have no user namespace.

        What a template forks is under the template's filter, too.
        """
        shared = ("user",) if self._identities is not None and not forked else ()
        own = tuple(name for name in NAMESPACES if name not in shared)
        return Promise(
            user_of(identity),
            filters=2 if forked else 1,
            namespaces=own,
            writable=mounts.WRITABLE,
            scratch=mounts.SCRATCH,
            covered=self._masked if forked else (*self._masked, mounts.FIRST_PROCESS),
        )

    def report(self) -> SandboxReport:
        """What bubblewrap puts in force here."""
        user = (
            "a user namespace without capabilities"
            if self._identities is None
            else "a host user id of its own for each session, without capabilities"
        )
        gaps = ["shares the host's Linux kernel, so a kernel exploit leaves the sandbox"]
        if self._identities is None:
            gaps.append("the folder of a kernel's sockets is kept small by a watchdog only")
        if not self.features.size:
            gaps.append("/tmp has no size limit: bubblewrap here is older than 0.7")
        return SandboxReport(
            backend=self.name,
            enforced=(
                "empty network namespace",
                "only the workspace and a private /tmp are writable; the host's files are hidden",
                "own process, ipc and host name namespaces",
                user,
                "system call filter (seccomp)",
                "ends with the server",
            ),
            gaps=tuple(gaps),
        )

    def _ids(self, identity: Identity | None) -> tuple[int, int]:
        return (GUEST_ID, GUEST_ID) if identity is None else (identity.uid, identity.gid)

    def _privilege_options(self, identity: Identity | None) -> list[str]:
        if identity is not None:
            return [*_FOR_SETPRIV]
        options = ["--unshare-user", "--uid", str(GUEST_ID), "--gid", str(GUEST_ID)]
        return [*options, "--disable-userns"] if self.features.disable_userns else options

    def build_options(self, identity: Identity | None) -> list[str]:
        """Namespaces and rights of an installer: as a kernel's, but with the host's network.

        Without an identity it keeps the server's user, and a root server's has no capabilities.
        """
        if identity is None and self._identities is not None:
            return [*_NAMESPACES]
        return [*_NAMESPACES, *self._privilege_options(identity)]

    def drop(self, identity: Identity | None) -> list[str]:
        """The words that make a command run as `identity`."""
        if identity is None:
            return []
        return [
            self._setpriv,
            f"--reuid={identity.uid}",
            f"--regid={identity.gid}",
            "--clear-groups",
            "--inh-caps=-all",
            "--bounding-set=-all",
            "--no-new-privs",
            "--",
        ]
