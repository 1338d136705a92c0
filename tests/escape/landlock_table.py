"""Runs the table of attacks on Landlock: `python -m tests.escape.landlock_table WAY`.

WAY is `confined` or `unconfined`. Prints one JSON object: what came of each attack.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_mcp.config.settings import Limits
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Sandbox, SandboxRequest
from kernel_mcp.sandbox.landlock import LandlockSandbox
from kernel_mcp.units import GIB
from tests.escape.landlock_attacks import ATTACKS, World

LIMITS = Limits(memory_bytes=1 * GIB, pids=32, open_files=256, disk_bytes=GIB, tmp_bytes=GIB)
TIMEOUT_S = 120
RUNTIME = (Path(sys.prefix), Path(sys.base_prefix))
VICTIM = """
import signal, sys
token = b"VICTIM_MEMORY" * 10
signal.signal(signal.SIGUSR1, lambda *_: open(sys.argv[1], "w").close())
print(id(token), flush=True)
while True:
    signal.pause()
"""


@dataclass(frozen=True)
class Finding:
    """The outcome of an attack: `escaped` if it reached its aim."""

    escaped: bool
    how: str


class Attacker:
    """Performs attacks, each in a world of its own; unconfined when there is no sandbox.

    User ids are given back at the end: processes that an attack has left may take a moment to die.
    """

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._undo = ExitStack()

    def attack(self, name: str) -> Finding:
        """Perform one attack."""
        identity = None
        if self._sandbox is not None:
            identity = self._sandbox.identity()
            self._undo.callback(self._sandbox.release, identity)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kernel-mcp-"))
            world = stack.enter_context(_world(Path(folder)))
            done = _perform(name, world, self._sandbox, identity)
        try:
            said = json.loads(done.stdout)
            return Finding(escaped=said["escaped"] is True, how=str(said.get("how", "")))
        except ValueError:
            return Finding(escaped=False, how=f"exit code {done.returncode}: {done.stderr[-300:]}")

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()


def _perform(
    name: str, world: World, sandbox: Sandbox | None, identity: Identity | None
) -> subprocess.CompletedProcess[str]:
    library = Path(world["library"])
    code = (
        f"import sys, json; sys.path.insert(0, {str(library)!r})\n"
        "from tests.escape.landlock_attacks import perform\n"
        "perform(sys.argv[1], json.loads(sys.argv[2]))"
    )
    argv = [sys.executable, "-I", "-S", "-B", "-c", code, name, json.dumps(world)]
    with ExitStack() as stack:
        env, passed = {"LANG": "C.UTF-8"}, []
        if sandbox is not None:
            workspace, sockets = Path(world["workspace"]), Path(world["sockets"])
            if identity is not None:
                for made in (workspace, sockets):
                    os.chown(made, identity.uid, identity.gid)
            command = sandbox.command(
                SandboxRequest(
                    argv=argv,
                    env=env,
                    workspace=workspace,
                    sockets=sockets,
                    readonly=(*RUNTIME, library),
                    limits=LIMITS,
                ),
                identity,
            )
            stack.callback(command.close_passed)
            argv, env, passed = [*command.argv], dict(command.env), [*command.pass_fds]
        return subprocess.run(
            argv,
            env=env,
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            start_new_session=True,
            check=False,
        )


@contextmanager
def _world(top: Path) -> Iterator[World]:
    """Lay out targets: files, sockets, shared memory, a process."""
    outside = top / "outside"
    for name in ("outside", "workspace", "sockets", "neighbour"):
        (top / name).mkdir(mode=0o700)
    for name in ("secret", "victim_file", "removable", "movable", "attributed"):
        (outside / name).write_text("secret")
    os.setxattr(outside / "attributed", "user.note", b"secret")
    os.mkfifo(outside / "pipe")
    (top / "neighbour" / "data").write_text("neighbour")
    library = top / "library"
    source = Path(__file__).parent
    for package in ("tests", "tests/escape"):
        (library / package).mkdir(parents=True, exist_ok=True)
        (library / package / "__init__.py").touch()
    shutil.copytree(
        source / "landlock_attacks",
        library / "tests/escape/landlock_attacks",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        kinds = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}
        for name, kind in kinds.items():
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            listener.bind(str(outside / name))
            if kind == socket.SOCK_STREAM:
                listener.listen()
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        abstract.bind(f"\0{top}")
        abstract.listen()
        shared = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm"))
        shared.write(b"secret")
        shared.flush()
        segment = stack.enter_context(_segment())
        victim = stack.enter_context(_victim(outside / "signalled"))
        paths = ("secret", "victim_file", "removable", "movable", "attributed", "pipe")
        yield {
            **{name: str(outside / name) for name in (*paths, *kinds, "signalled")},
            "folder": str(outside),
            "workspace": str(top / "workspace"),
            "sockets": str(top / "sockets"),
            "neighbour": str(top / "neighbour" / "data"),
            "library": str(library),
            "package": str(library / "tests" / "__init__.py"),
            "shared_memory": shared.name,
            "abstract": str(top),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "limits": {
                "memory_bytes": LIMITS.memory_bytes,
                "open_files": LIMITS.open_files,
                "processes": LIMITS.pids + _processes_of(os.geteuid()),
            },
            "segment": segment,
            **victim,
        }


@contextmanager
def _segment() -> Iterator[int]:
    """The id of a System V segment of this user."""
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT
    try:
        yield segment
    finally:
        libc.shmctl(segment, 0, None)  # IPC_RMID


@contextmanager
def _victim(signalled: Path) -> Iterator[dict[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", VICTIM, str(signalled)],
        env={"VICTIM_TOKEN": "secret"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield {"victim": process.pid, "address": int(process.stdout.readline())}
        finally:
            process.kill()


def _processes_of(uid: int) -> int:
    count = 0
    for folder in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            count += folder.name.isdigit() and folder.stat().st_uid == uid
    return count


def main(way: str) -> None:
    """Run everything and print it."""
    sandbox = LandlockSandbox.detect() if way == "confined" else None
    names = [
        name for name, attack in ATTACKS.items() if sandbox is not None or attack.works_unconfined
    ]
    found: dict[str, Any] = {}
    attacker = Attacker(sandbox)
    for name in names:
        finding = attacker.attack(name)
        found[name] = {"escaped": finding.escaped, "how": finding.how}
    attacker.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
