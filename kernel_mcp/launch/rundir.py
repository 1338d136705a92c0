"""The folder of one running server, the files that a kernel boots from, and their bytecode.

A running server holds flock(2) on its folder; the next server removes unlocked folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio

from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, LaunchRequest, Program
from kernel_mcp.limits.groups import RECORD, remove_recorded
from kernel_mcp.linux.commands import output_of
from kernel_mcp.linux.folders import Identity, lasting_folder, private_folder, try_lock
from kernel_mcp.linux.gpus import LIBRARY_PATH
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.sandbox.base import BOOT_FOLDER, GuestPaths
from kernel_mcp.units import KIB, MIB
from kernel_specs.restricted import confine

COMPILE_S = 30.0

logger = logging.getLogger(__name__)


async def compile_guest(environment: KernelEnvironment, folder: Path = BOOT_FOLDER) -> None:
    """Compile the sources in `folder` for an environment's Python, which saves 30 ms per start.

    Does nothing for an unknown version; a failure is only logged. Imports no package.
    """
    if not environment.version:
        return
    try:
        stale = await anyio.to_thread.run_sync(_stale, folder, environment.version)
        if stale:
            with anyio.fail_after(COMPILE_S):
                command = [str(environment.bare), "-I", "-S", "-m", "compileall", "-q"]
                done = await output_of([*command, *map(str, stale)])
                if done.code:
                    raise OSError(f"the compiler ended with code {done.code}")
    except (OSError, TimeoutError) as reason:
        logger.info("kernels compile their own start, which takes them longer: %s", reason)


def _stale(folder: Path, version: str) -> list[Path]:
    """Return the sources whose bytecode for a version of CPython is missing or outdated."""
    tag = f"cpython-{''.join(version.split('.')[:2])}"
    return [
        source
        for source in sorted(folder.rglob("*.py"))
        if _changed(source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc") < _changed(source)
    ]


def _changed(file: Path) -> float:
    """Return the modification time in seconds; 0 for a missing file."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


BACKLOG = 100
"""Queue length of listen(2), the same as for sockets that a kernel makes itself."""
BOOT_VERSION = 1
CONNECTION_FILE = "connection.json"
BOOT_FILE = "boot.json"
PROGRAM_FILE = "program.json"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def connection_content(connection: ConnectionInfo, guest: GuestPaths) -> dict[str, Any]:
    """Return the Jupyter connection file, with the socket path as the kernel sees it."""
    return {
        "transport": connection.transport,
        "ip": f"{guest.sockets}/k" if connection.transport == "ipc" else connection.ip,
        "shell_port": connection.shell_port,
        "iopub_port": connection.iopub_port,
        "stdin_port": connection.stdin_port,
        "control_port": connection.control_port,
        "hb_port": connection.hb_port,
        "key": connection.key,
        "signature_scheme": connection.signature_scheme,
        "kernel_name": "restricted",
    }


def listening(connection: ConnectionInfo) -> list[int]:
    """Return listening sockets for a kernel that cannot make any, in the order of its channels.

    The caller closes them. Raises OSError.
    """
    made: list[int] = []
    try:
        made.extend(listening_at(connection.path(port)) for port in connection.ports)
    except BaseException:
        for fd in made:
            os.close(fd)
        raise
    return made


def listening_at(path: str) -> int:
    """Return a Unix socket that listens at a new path; the caller closes it. Raises OSError.

    The socket itself shows no path of the host to the process that gets it.
    """
    place = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as made:
            made.bind(f"/proc/self/fd/{place}/{Path(path).name}")
            made.listen(BACKLOG)
            return made.detach()
    finally:
        os.close(place)


def boot_content(
    request: LaunchRequest,
    guest: GuestPaths,
    ready_fd: int,
    ring_fd: int = -1,
    *,
    sealed: bool = False,
    connected: bool = False,
    strict: Sequence[str] = (),
    checkpoints: bool = False,
    start: str = "",
) -> dict[str, Any]:
    """Return the boot file: policy, limits and paths; `sealed` for a kernel that makes no socket.

    A `connected` kernel receives its ends of the connections. With `checkpoints` the readiness
    channel stays open as the control socket. `strict` are mounts that need a Landlock ruleset,
    which is the first message on that channel. The kernel begins in `start`, else in its workspace.
    """
    limits = request.limits
    return {
        "version": BOOT_VERSION,
        "policy": request.policy.to_json(),
        "limits": {
            "memory_bytes": limits.memory_bytes if limits.address_space else 0,
            "cpus": math.ceil(limits.cpus),
            "pids": guest.process_limit(limits.pids),
            "open_files": limits.open_files,
            "file_bytes": limits.disk_bytes,
            "cpu_seconds": 0,  # RLIMIT_CPU adds up over cells; the server counts per cell
        },
        "workspace": guest.workspace,
        "start": start or guest.workspace,
        "tmp": guest.tmp,
        "layers": layer_paths(request, guest),
        "support": support_of(request.environment),
        "ready_fd": ready_fd,
        "ring_fd": ring_fd,
        "sealed": sealed,
        "connected": connected,
        "lifeline": checkpoints,
        "tools": request.tools,
        "variables": dict(request.variables),
        "shuffle": 0 if request.replay is None else request.replay.shuffle,
        "seed": 0 if request.replay is None else request.replay.seed,
        "strict": [*strict],
        "runtime": ["/usr", *map(str, request.environment.readonly)],
        "output": {"chunk_bytes": 64 * KIB, "flush_seconds": 0.05, "message_bytes": 12 * MIB},
    }


def support_of(environment: KernelEnvironment) -> list[str]:
    """Return the folder of the kernel's own packages and its place on sys.path, first or last.

    Empty if the environment itself contains those packages.
    """
    return [] if environment.support is None else environment.support.path


def ceilings(request: LaunchRequest, guest: GuestPaths) -> dict[str, int]:
    """Return the limits that a kernel sets by its boot file, by the names of /proc/PID/limits."""
    limits = request.limits
    memory = limits.memory_bytes + confine.ADDRESS_SPACE_OVERHEAD + confine.MEMORY_RESERVE
    bounded = limits.memory_bytes and limits.address_space
    wanted = {
        "Max processes": guest.process_limit(limits.pids),
        "Max open files": limits.open_files,
        "Max file size": limits.disk_bytes,
        "Max address space": memory + confine.RESERVED_ADDRESSES if bounded else 0,
        "Max data size": memory if bounded else 0,
        "Max pending signals": confine.PENDING_SIGNALS,
        "Max msgqueue size": confine.MESSAGE_QUEUE_BYTES,
    }
    return {"Max core file size": 0, **{name: most for name, most in wanted.items() if most > 0}}


def layer_paths(request: LaunchRequest, guest: GuestPaths) -> list[str]:
    """Return the paths of the session's package layers in the kernel."""
    if not guest.layers:
        return [str(layer) for layer in request.layers]
    return [f"{guest.layers}/{number}" for number in range(len(request.layers))]


def program_content(program: Program, guest: GuestPaths) -> dict[str, Any]:
    """Return the file that names the program which becomes the kernel."""
    file = f"{guest.sockets}/{CONNECTION_FILE}"
    return {
        "argv": [each.replace("{connection_file}", file) for each in program.argv],
        "env": {"PATH": f"{Path(program.argv[0]).parent}:{SYSTEM_PATH}", **dict(program.env)},
    }


def argv(request: LaunchRequest, guest: GuestPaths) -> list[str]:
    """Return the kernel's command line."""
    file = f"{guest.sockets}/{CONNECTION_FILE}"
    if request.program is not None:
        start = f"{guest.boot}/programs/start.py"
        return [str(request.environment.bare), "-I", "-S", "-B", start, "-f", file]
    return [
        str(request.environment.python),
        *(("-s", "-P") if request.hash_seed else ("-I",)),
        *("-B", f"{guest.boot}/restricted/boot.py"),
        *("-f", file),
    ]


def environment(request: LaunchRequest, guest: GuestPaths) -> dict[str, str]:
    """Return the initial environment of the interpreter; the boot sets the rest.

    No variable of the server is passed on. `LIBRARY_PATH` is set here, as the dynamic loader reads
    it only when a process starts.
    """
    libraries = {name: value for name, value in request.variables if name == LIBRARY_PATH}
    hashes = {"PYTHONHASHSEED": str(request.hash_seed)} if request.hash_seed else {}
    return {
        **libraries,
        **hashes,
        "PATH": f"{request.environment.python.parent}:{SYSTEM_PATH}",
        "HOME": guest.workspace,
        "LANG": "C.UTF-8",
        "TMPDIR": guest.tmp,
    }


def write_files(
    folder: Path, contents: dict[str, dict[str, Any]], identity: Identity | None
) -> None:
    """Write JSON files that the kernel may read and only the server may change."""
    for name, content in contents.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(folder / name, flags, 0o440)
        with open(fd, "wb") as file:
            if identity is not None:
                os.fchown(fd, -1, identity.gid)
            file.write(json.dumps(content).encode())  # `json.dump` encodes in Python: 1 ms


def forget_variables(request: LaunchRequest, folder: Path) -> None:
    """Remove the boot file of a kernel that has started, if it holds variables."""
    if request.variables:
        (folder / BOOT_FILE).unlink(missing_ok=True)


LONGEST = 90
"""Maximum bytes of a run directory's path.

`k/12345678/k-1` below it must fit into `sockaddr_un`, which holds 107 bytes.
"""
_PREFIX = "s-"


class RunDirectory:
    """A private folder, removed with the server: kernels' sockets in `k`, other files beside it.

    `tools` has sockets that no kernel sees: code could replace those in folders that it sees.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.kernels = private_folder(path / "k")
        self.tools = path / "t"

    @classmethod
    def create(cls, base: Path | None = None) -> RunDirectory:
        """Make the folder of a new server below `base`, and remove those of dead servers.

        Raises ConfigError if `base` is too long or cannot be used.
        """
        parent = default_base() if base is None else base.absolute()
        path = parent / f"{_PREFIX}{secrets.token_hex(4)}"
        if len(os.fsencode(path)) > LONGEST:
            raise ConfigError(
                f"{parent} is too long for the kernels' sockets: choose a folder for state of at "
                f"most {LONGEST - len(path.name) - 1} bytes"
            )
        try:
            private_folder(parent)
            with _alone_in(parent):
                _sweep(parent)
                path.mkdir(mode=0o700)
                lock = _try_lock(path)
        except OSError as reason:
            raise ConfigError(
                f"cannot keep the server's files in {parent}: {reason}; or choose another folder "
                "with --state-dir"
            ) from reason
        if lock is None:
            raise ConfigError(f"another process has locked {path}; check the disk's lock service")
        return cls(path, lock)

    def fresh(self, name: str = "") -> Path:
        """Make and return an empty folder, mode 0700, for one kernel start.

        Raises FileExistsError.
        """
        path = self.kernels / (name or secrets.token_hex(4))
        self.kernels.mkdir(mode=0o700, parents=True, exist_ok=True)  # may have been removed
        path.mkdir(mode=0o700)
        return path

    def close(self) -> None:
        """Remove the folder; the next server removes what could not be removed."""
        if self._lock < 0:
            return
        try:
            remove_tree(self.path)
        except OSError as reason:
            logger.warning("could not remove %s: %s", self.path, reason)
        finally:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def default_base() -> Path:
    """Return the default folder for state."""
    return lasting_folder()


@contextlib.contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Hold flock(2) on `parent`: no other server sweeps or starts in it."""
    lock = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    try:
        lock = _try_lock(path)
        if lock is None:
            return
        try:
            remove_recorded(path / RECORD)
            remove_tree(path)
        finally:
            os.close(lock)
    except OSError as reason:
        logger.warning("could not remove %s of a server that has ended: %s", path, reason)


def _try_lock(path: Path) -> int | None:
    """Return a flocked descriptor, None while another process holds the lock.

    Raises PermissionError, OSError.
    """
    return try_lock(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
