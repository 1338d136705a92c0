"""The sandbox of an installer: network and a few writable folders, nothing else of the machine.

The installer itself is trusted; what it unpacks is not run. Code of packages runs here only where
the operator allows builds from source: then as a user of its own, where the server is root.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import anyio

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.launch.trees import give_tree
from kernel_mcp.sandbox import rootfs
from kernel_mcp.sandbox.base import Identity, Sandbox, SandboxCommand
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.none import tie_to_server
from kernel_mcp.sandbox.passed import Passed
from kernel_mcp.sandbox.run import run_confined

TMP_BYTES = 1024 * 1024 * 1024
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIX = "UV_"
_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSL_CLIENT_CERT", "NETRC", "UV_CONFIG_FILE")
"""Variables that name files which have to be readable."""
_TRUST = ("/etc/pki/ca-trust", "/etc/ca-certificates")
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One run of an installer.

    writable  host folders, and where the installer sees them
    readonly  host paths it needs, seen at the same place
    hostile   whether it will run code of packages
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    writable: Mapping[Path, str]
    readonly: Sequence[Path]
    hostile: bool = False


class Builder(Protocol):
    """Confines installers."""

    confined: bool
    """Whether there is a boundary at all."""

    def layer_path(self, staging: Path, generation: str) -> str:
        """Where the installer sees the folder `staging`, which will be called `generation`.

        Compiled files carry this path, so it is the one that kernels will know, where possible.
        """

    @asynccontextmanager
    def owner(self, folders: Sequence[Path], *, hostile: bool) -> AsyncIterator[Identity | None]:
        """Whom the folders belong to inside the block; afterwards they are the server's again."""

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """The host command for one run. Raises LaunchError for paths that cannot be bound."""


def builder_for(sandbox: Sandbox) -> Builder:
    """The builder that goes with a sandbox: beside containers, bubblewrap where it works."""
    if isinstance(sandbox, BwrapSandbox):
        return BwrapBuilder(sandbox)
    if sandbox.name == "container":
        try:
            return BwrapBuilder(_working_bwrap())
        except SandboxUnavailable:
            return PlainBuilder()
    return PlainBuilder()


def _working_bwrap() -> BwrapSandbox:
    sandbox = BwrapSandbox.detect()
    done = run_confined(sandbox, ["/bin/sh", "-c", "exit 0"])
    if done.returncode:
        raise SandboxUnavailable(done.stderr)
    return sandbox


class BwrapBuilder:
    """One bubblewrap per run, with the host's network."""

    confined = True

    def __init__(self, sandbox: BwrapSandbox) -> None:
        self._sandbox = sandbox

    def layer_path(self, staging: Path, generation: str) -> str:
        """The place that kernels see the first layer at."""
        return f"{rootfs.LAYERS}/0/{generation}"

    @asynccontextmanager
    async def owner(
        self, folders: Sequence[Path], *, hostile: bool
    ) -> AsyncIterator[Identity | None]:
        """A user id of its own for code of packages; uv alone keeps the server's."""
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
        """The bubblewrap command line; its options travel in a file that only bubblewrap sees."""
        env = _environment(request.env)
        named = [Path(env[name]) for name in _FILES if env.get(name, "").startswith("/")]
        readonly = [*request.readonly, *(path for path in named if path.exists())]
        if request.hostile:
            readonly = [path for path in readonly if str(path) != env.get("NETRC")]
        with Passed() as passed:
            options = [
                *self._sandbox.build_options(identity),
                *rootfs.system_options(),
                *_trust_options(),
                *rootfs.scratch_options("/tmp", TMP_BYTES, self._sandbox.features),
                *rootfs.runtime_options(readonly),
                *_writable_options(request.writable),
                *("--dev", "/dev", "--proc", "/proc"),
                *rootfs.mask_options(),
            ]
            for name, content in self._etc(identity).items():
                options += ["--perms", "0644", "--file", passed.file(content.encode())]
                options += [f"/etc/{name}"]
            for folder in ("/dev", "/proc", "/"):
                options += ["--remount-ro", folder]
            options += ["--chdir", "/tmp", "--seccomp", passed.file(self._sandbox.filter)]
            arguments = passed.file("\0".join([*options, ""]).encode())
            argv = [self._sandbox.program, "--args", arguments, "--"]
            return SandboxCommand(
                argv=[*argv, *self._sandbox.drop(identity), *request.argv],
                pass_fds=passed.keep(),
                env=env,
            )

    def _etc(self, identity: Identity | None) -> dict[str, str]:
        uid, gid = (identity.uid, identity.gid) if identity else (os.geteuid(), os.getegid())
        files = rootfs.account_files(uid, gid)
        for name in ("resolv.conf", "hosts"):
            path = Path("/etc", name)
            files[name] = path.read_text(errors="replace") if path.is_file() else ""
        return {**files, "nsswitch.conf": _NSSWITCH}


class PlainBuilder:
    """No confinement: for `--sandbox none` and backends without a builder of their own."""

    confined = False

    def layer_path(self, staging: Path, generation: str) -> str:
        """The host's own path."""
        return str(staging)

    @asynccontextmanager
    async def owner(
        self, folders: Sequence[Path], *, hostile: bool
    ) -> AsyncIterator[Identity | None]:
        """Everything stays the server's."""
        yield None

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """The command itself, whose life is tied to the server's where that is possible."""
        return SandboxCommand(argv=[*tie_to_server(), *request.argv], pass_fds=(), env=request.env)


async def _give(folders: Sequence[Path], uid: int, gid: int) -> None:
    for folder in folders:
        await anyio.to_thread.run_sync(partial(give_tree, folder, uid=uid, gid=gid))


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """What an installer needs of the server's environment: where packages come from, no more."""
    kept = {
        name: value
        for name, value in env.items()
        if name.upper() in _PASSED or name in _FILES or name.startswith(_PREFIX)
    }
    fixed = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return {**kept, **fixed, "UV_PYTHON_DOWNLOADS": "never"}


def _trust_options() -> list[str]:
    options: list[str] = []
    for path in _TRUST:
        if Path(path).is_dir():
            options += ["--ro-bind", path, path]
    return options


def _writable_options(folders: Mapping[Path, str]) -> list[str]:
    options: list[str] = []
    for folder, place in folders.items():
        for parent in reversed(Path(place).parents):
            if str(parent) not in ("/", "/tmp"):
                options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--bind", str(folder), place]
    return options
