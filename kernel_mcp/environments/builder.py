"""The sandbox of an installer: a few writable folders, and the network if need be, nothing else.

The installer itself is trusted; what it unpacks is not run. Code of packages runs here only where
the operator allows builds from source: then as a user of its own, where the server is root. It is
bubblewrap wherever that works, whatever confines the kernels.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import anyio

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.safe_tree import give_tree
from kernel_mcp.sandbox import mounts
from kernel_mcp.sandbox.base import Passed, Sandbox, SandboxCommand
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.none import tie_to_server
from kernel_mcp.sandbox.probe import run_confined

# Work that something else may end.

T = TypeVar("T")


async def cancel_on(
    event: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[T]]
) -> T | None:
    """The result of `work`, or None when `event` comes first. Raises what `work` raises."""
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await event()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001  # raised again, outside of the task group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


logger = logging.getLogger(__name__)

TMP_BYTES = 1024 * 1024 * 1024
_PASSED = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PREFIX = "UV_"
_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSL_CLIENT_CERT", "NETRC", "UV_CONFIG_FILE")
"""Variables that name files which have to be readable."""
_PLACES = ("UV_FIND_LINKS", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
"""Variables that may name folders with packages."""
_SETTINGS = "uv/uv.toml"
"""uv's own settings, below a folder of configuration."""
_TRUST = ("/etc/pki/ca-trust", "/etc/ca-certificates")
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """One run of an installer.

    writable  host folders it may change, seen at the same place
    readonly  host paths it needs, seen at the same place
    hostile   whether it will run code of packages, or read it in ways that may go wrong
    network   whether it has the host's network
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    writable: Sequence[Path]
    readonly: Sequence[Path]
    hostile: bool = False
    network: bool = True


class Builder(Protocol):
    """Confines installers."""

    confined: bool
    """Whether there is a boundary at all."""

    @asynccontextmanager
    def owner(self, folders: Sequence[Path], *, hostile: bool) -> AsyncIterator[Identity | None]:
        """Whom the folders belong to inside the block; afterwards they are the server's again."""

    def command(self, request: BuildRequest, identity: Identity | None) -> SandboxCommand:
        """The host command for one run. Raises LaunchError for paths that cannot be bound."""


def builder_for(sandbox: Sandbox | None = None) -> Builder:
    """The builder that goes with a sandbox: bubblewrap wherever it works; blocks to find out."""
    if isinstance(sandbox, BwrapSandbox):
        return BwrapBuilder(sandbox)
    try:
        return BwrapBuilder(_working_bwrap())
    except SandboxUnavailable as reason:
        logger.warning(
            "packages are unpacked without a sandbox, which runs none of their code: %s", reason
        )
        return PlainBuilder()


def _working_bwrap() -> BwrapSandbox:
    sandbox = BwrapSandbox.detect()
    done = run_confined(sandbox, ["/bin/sh", "-c", "exit 0"])
    if done.returncode:
        raise SandboxUnavailable(done.stderr)
    return sandbox


class BwrapBuilder:
    """One bubblewrap per run."""

    confined = True

    def __init__(self, sandbox: BwrapSandbox) -> None:
        self._sandbox = sandbox

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
            arguments = passed.file("\0".join([*options, ""]).encode())
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


class PlainBuilder:
    """No confinement: for `--sandbox none` and backends without a builder of their own."""

    confined = False

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


def _named(env: Mapping[str, str]) -> list[Path]:
    """The files and folders that variables name, as far as they are there."""
    words = [env[name] for name in _FILES if name in env]
    words += [word for name in _PLACES for word in re.split(r"[\s,]+", env.get(name, ""))]
    # an index may have a name: name=file:///folder
    places = [re.sub(r"^(?:[\w-]+=)?(?:file://)?(?=/)", "", word) for word in words]
    return [Path(place) for place in places if place.startswith("/") and Path(place).exists()]


def _settings(env: Mapping[str, str]) -> Path | None:
    """The user's settings of uv, None where there are none."""
    home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME') or Path.home()}/.config"
    path = Path(home, _SETTINGS)
    return path if path.is_absolute() and path.is_file() else None


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
