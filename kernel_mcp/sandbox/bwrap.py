"""Kernels and installers under bubblewrap: namespaces, minimal root, no capabilities, seccomp.

A root server runs each session as a host user of its own, without a user namespace: in one, the
kernel would still be root on the host. Other servers use an unprivileged user namespace.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from pathlib import Path

import anyio

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity, home_folder
from kernel_mcp.linux.process import find_program
from kernel_mcp.linux.safe_tree import give_tree
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    BY_TREES,
    NO_GRANTS,
    BuildRequest,
    Grants,
    GuestPaths,
    Passed,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.confinement import NAMESPACES, ExpectedConfinement, user_of
from kernel_mcp.sandbox.remedies import diagnose, install_hint
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
"""Capabilities with which setpriv changes the user and empties the bounding set; it drops them."""
_READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/")


class BwrapSandbox(KernelUsers):
    """Runs each kernel in a bubblewrap of its own."""

    name = "bwrap"
    forks = True
    mount_method = BY_TREES

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
        """Return the backend for this machine; `boot` contains `restricted/boot.py`.

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
            [program, "--help"], capture_output=True, text=True, check=False, timeout=60
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

    def builder(self) -> BwrapBuilder:
        """Return a builder that starts a bubblewrap for each run of an installer."""
        return BwrapBuilder(self)

    def refusal(self, said: str) -> str:
        """Return why bubblewrap could not start a process, and a command that helps."""
        return diagnose(said)

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Return fixed paths, the same for every kernel."""
        return GuestPaths(
            workspace=mounts.WORKSPACE,
            sockets=mounts.SOCKETS,
            boot=mounts.BOOT,
            layers=mounts.LAYERS,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """Return the bubblewrap command line; its options are in a file that only it can read."""
        with Passed() as passed:
            files = mounts.account_files(*self._ids(identity), request.hosts)
            options = [
                *_NAMESPACES,
                "--unshare-net",
                *self._privilege_options(identity),
                *self._system,
                *mounts.scratch_options("/tmp", request.limits.tmp_bytes, self.features),
                *mounts.runtime_options(request.readonly),
                *mounts.replaced_options(request.replaced),
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
            options += mounts.folder_options(request.folders)
            options += mounts.device_options(request.devices)
            options += mounts.closing_options(request.devices)
            options += _READ_ONLY
            filtering = self._sealed_filter if request.folders.shown else self.filter
            options += ["--seccomp", passed.file(filtering)]
            status_read, status = passed.status()
            options += ["--json-status-fd", status]
            arguments = passed.file(os.fsencode("\0".join([*options, ""])))
            return SandboxCommand(
                argv=[
                    *request.folders.staged(),
                    self.program,
                    "--args",
                    arguments,
                    "--",
                    *self.drop(identity),
                    *request.argv,
                ],
                pass_fds=[*passed.keep(), *request.folders.trees, *request.inherit],
                env=request.env,
                status_fd=status_read,
            )

    @cached_property
    def _sealed_filter(self) -> bytes:
        arch = architecture(platform.machine())
        assert arch is not None  # `detect` has checked it
        return compile_filter(arch, sealed=True)

    def expected_confinement(
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement:
        """Return the expected confinement: all namespaces, and one filter, or two if `forked`.

        Cold kernels of a root server have no user namespace of their own.
        """
        shared = ("user",) if self._identities is not None and not forked else ()
        own = tuple(name for name in NAMESPACES if name not in shared)
        return ExpectedConfinement(
            user_of(identity),
            filters=2 if forked else 1,
            namespaces=own,
            writable=mounts.WRITABLE,
            scratch=mounts.SCRATCH,
            covered=self._masked if forked else (*self._masked, mounts.FIRST_PROCESS),
        )

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        """Return the guarantees and gaps of bubblewrap on this host."""
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
                *grants.reach("the system's programs, the interpreter and its packages"),
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
        """Return options for an installer's namespaces and rights, like a kernel's.

        The host's network is not unshared. Without an identity the installer keeps the server's
        user, without capabilities if that is root.
        """
        if identity is None and self._identities is not None:
            return [*_NAMESPACES]
        return [*_NAMESPACES, *self._privilege_options(identity)]

    def drop(self, identity: Identity | None) -> list[str]:
        """Return the command prefix that changes to the user `identity`; empty for None."""
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


# An installer gets a few writable folders and possibly the network. It is trusted; code of packages
# runs only in builds from source, under a root server as a separate user.
TMP_BYTES = 1024 * 1024 * 1024
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIX = "UV_"
_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSL_CLIENT_CERT", "NETRC", "UV_CONFIG_FILE")
"""Variables whose files must be readable in the sandbox."""
_PLACES = ("UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
"""Variables that may name folders with packages."""
_SETTINGS = "uv/uv.toml"
"""uv's own settings, relative to a configuration folder."""
_TRUST = ("/etc/pki/ca-trust", "/etc/ca-certificates")
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


class BwrapBuilder:
    """Runs each installer in a bubblewrap of its own."""

    confined = True

    def __init__(self, sandbox: BwrapSandbox) -> None:
        self._sandbox = sandbox

    @asynccontextmanager
    async def owner(
        self, folders: Sequence[Path], *, hostile: bool
    ) -> AsyncIterator[Identity | None]:
        """Yield a user id for code of packages; it owns `folders` inside the block.

        None if not `hostile`: uv itself runs as the server's user.
        """
        identity = self._sandbox.identity() if hostile else None
        if identity is None:
            yield None
            return
        try:
            await _give(folders, identity.uid, identity.gid)
            try:
                yield identity
            finally:
                with anyio.CancelScope(shield=True):
                    await _give(folders, os.geteuid(), os.getegid())
        finally:
            self._sandbox.release(identity)

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """Return the bubblewrap command line; its options are in a file that only it can read."""
        env = _environment(request.env)
        readonly = [*request.readonly, *_named(env)]
        if request.hostile:
            readonly = [path for path in readonly if str(path) != env.get("NETRC")]
        elif settings := _settings(request.env):
            env["XDG_CONFIG_HOME"] = str(settings.parent.parent)
            readonly.append(settings)
        with Passed() as passed:
            options = [
                *self._sandbox.build_options(identity),
                *(() if request.network else ("--unshare-net",)),
                *mounts.system_options(),
                *_trust_options(),
                *mounts.scratch_options("/tmp", TMP_BYTES, self._sandbox.features),
                *mounts.runtime_options(readonly),
                *_writable_options(request.writable),
                *("--dev", "/dev"),
                *mounts.scratch_options("/dev/shm", TMP_BYTES, self._sandbox.features),
                *mounts.proc_options(),
            ]
            for name, content in self._etc(identity).items():
                options += ["--perms", "0644", "--file", passed.file(content.encode())]
                options += [f"/etc/{name}"]
            for folder in ("/dev", "/proc", "/"):
                options += ["--remount-ro", folder]
            options += ["--chdir", "/tmp", "--seccomp", passed.file(self._sandbox.filter)]
            arguments = passed.file(os.fsencode("\0".join([*options, ""])))
            argv = [self._sandbox.program, "--args", arguments, "--"]
            return SandboxCommand(
                argv=[*argv, *self._sandbox.drop(identity), *request.argv],
                pass_fds=passed.keep(),
                env=env,
            )

    def _etc(self, identity: Identity | None) -> dict[str, str]:
        uid, gid = (identity.uid, identity.gid) if identity else (os.geteuid(), os.getegid())
        files = mounts.account_files(uid, gid)
        for name in ("resolv.conf", "hosts"):
            path = Path("/etc", name)
            files[name] = path.read_text(errors="replace") if path.is_file() else ""
        return {**files, "nsswitch.conf": _NSSWITCH}


async def _give(folders: Sequence[Path], uid: int, gid: int) -> None:
    for folder in folders:
        await anyio.to_thread.run_sync(partial(give_tree, folder, uid=uid, gid=gid))


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return an installer's environment: the server's indexes, proxies and uv settings."""
    kept = {
        name: value
        for name, value in env.items()
        if name.upper() in _PASSED or name in _FILES or name.startswith(_PREFIX)
    }
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return {**kept, **fixed, "UV_PYTHON_DOWNLOADS": "never"}


def _named(env: Mapping[str, str]) -> list[Path]:
    """Return the existing files and folders that environment variables name."""
    words = [env[name] for name in _FILES if name in env]
    words += [word for name in _PLACES for word in re.split(r"[\s,]+", env.get(name, ""))]
    # an index may have a name: name=file:///folder
    places = [re.sub(r"^(?:[\w-]+=)?(?:file://)?(?=/)", "", word) for word in words]
    return [
        Path(place)
        for place in places
        if place.startswith("/") and os.path.exists(place)  # noqa: PTH110  # as in `_settings`
    ]


def _settings(env: Mapping[str, str]) -> Path | None:
    """Return the path of the user's uv settings; None if there are none."""
    home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME') or home_folder() or ''}/.config"
    path = Path(home, _SETTINGS)
    # False without access; is_file() raises before Python 3.14
    return path if path.is_absolute() and os.path.isfile(path) else None  # noqa: PTH113


def _trust_options() -> list[str]:
    options: list[str] = []
    for path in (*_TRUST, "/etc/uv"):
        if Path(path).is_dir():
            options += ["--ro-bind", path, path]
    return options


def _writable_options(folders: Sequence[Path]) -> list[str]:
    options: list[str] = []
    for folder in folders:
        for parent in reversed(folder.parents):
            if str(parent) not in ("/", "/tmp"):
                options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--bind", str(folder), str(folder)]
    return options
