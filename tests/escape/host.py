"""The host's half of the attacks: prepares what is to be stolen, runs them, tells the outcomes.

`python -m tests.escape.host` prints the table.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.sandbox.self_test import run_confined
from kernel_mcp.units import MIB
from tests.escape.attacks.table import Target
from tests.escape.inside import ATTACKS

FOLDER = Path(__file__).parent
LIMITS = Limits(
    memory_bytes=256 * MIB, pids=40, disk_bytes=64 * MIB, tmp_bytes=8 * MIB, open_files=64
)


def run_attacks(backend: str | Sandbox, names: list[str]) -> dict[str, str]:
    """The outcome of each named attack under a backend: `ESCAPED …` or `held …`."""
    sandbox = select_sandbox(backend) if isinstance(backend, str) else backend
    with prepared() as target, tempfile.TemporaryDirectory() as folder:
        confined = sandbox.name != "none"
        task = {
            "target": asdict(target),
            "names": names,
            "workspace": sandbox.guest_paths(Path(folder), Path(folder)).workspace,
        }
        done = run_confined(
            sandbox,
            [sys.executable, "-I", "-S", "-B", str(FOLDER / "inside.py")],
            readonly=[Path(sys.prefix), Path(sys.base_prefix), FOLDER] if confined else [],
            limits=LIMITS,
            stdin=json.dumps(task),
            timeout=500,
        )
    if done.returncode != 0:
        raise RuntimeError(f"the attacks did not run: {done.stderr}")
    outcomes: dict[str, str] = json.loads(done.stdout)
    return outcomes


def control_names() -> list[str]:
    """The attacks that this user can carry out without a sandbox and without harm."""
    wanted = {"anyone", "maybe"} | ({"root"} if os.geteuid() == 0 else set())
    return [attack.name for attack in ATTACKS if attack.control in wanted]


@contextmanager
def prepared() -> Iterator[Target]:
    """Secrets, servers and a process on the host, removed afterwards."""
    marker = f"secret-{secrets.token_hex(8)}"
    arch = architecture(platform.machine())
    with ExitStack() as stack:
        workspace = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (workspace / "data.csv").write_text(marker)
        files = {
            name: stack.enter_context(_secret(folder, marker))
            for name, folder in (
                ("home", str(Path.home())),
                ("tmp", tempfile.gettempdir()),
                ("shm", "/dev/shm"),
            )
        }
        unix, abstract = str(workspace / "socket"), f"kernel-mcp-{marker}"
        tcp = stack.enter_context(_server(marker, socket.AF_INET, ("127.0.0.1", 0)))
        outside = stack.enter_context(_server(marker, socket.AF_INET, (_own_address(), 0)))
        stack.enter_context(_server(marker, socket.AF_UNIX, unix))
        stack.enter_context(_server(marker, socket.AF_UNIX, f"\0{abstract}"))
        yield Target(
            marker=marker,
            secret_home=files["home"],
            secret_tmp=files["tmp"],
            secret_shm=files["shm"],
            other_workspace=str(workspace),
            tcp=list(tcp.getsockname()),
            tcp_outside=list(outside.getsockname()),
            udp=list(stack.enter_context(_datagram_server(marker)).getsockname()),
            abstract=abstract,
            unix=unix,
            pid=stack.enter_context(_process(marker)).pid,
            shared_memory=stack.enter_context(_shared_memory(marker)),
            interpreter=sys.executable,
            numbers=arch.numbers if arch else {},
            limits={
                "memory_bytes": LIMITS.memory_bytes,
                "pids": LIMITS.pids,
                "open_files": LIMITS.open_files,
                "file_bytes": LIMITS.disk_bytes,
                "tmp_bytes": LIMITS.tmp_bytes,
            },
        )


@contextmanager
def _secret(folder: str, marker: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="kernel-mcp-") as file:
        Path(file.name).chmod(0o644)
        file.write(marker)
        file.flush()
        yield file.name


@contextmanager
def _server(marker: str, family: int, address: object) -> Iterator[socket.socket]:
    """A stream server that greets whoever connects."""
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()

        def greet() -> None:
            client, _ = listener.accept()
            with client:
                client.send(marker.encode())

        with _thread(greet, listener):
            yield listener


@contextmanager
def _datagram_server(marker: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))

        def answer() -> None:
            _, address = listener.recvfrom(256)
            listener.sendto(marker.encode(), address)

        with _thread(answer, listener):
            yield listener


@contextmanager
def _thread(step: Callable[[], None], listener: socket.socket) -> Iterator[None]:
    """Repeat `step` until the listener is shut down."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            # a wait that timed out, a client that went away
            with suppress(OSError):
                step()

    listener.settimeout(0.1)
    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _process(marker: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that has the marker in its environment."""
    with subprocess.Popen(["/bin/sleep", "300"], env={"SECRET": marker}) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def _shared_memory(marker: str) -> Iterator[int]:
    """The id of a System V segment that everybody on the host may read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1644)  # IPC_CREAT
    address = libc.shmat(segment, None, 0)
    ctypes.memmove(address, marker.encode(), len(marker))
    try:
        yield segment
    finally:
        libc.shmdt(ctypes.c_void_p(address))
        libc.shmctl(segment, 0, None)  # IPC_RMID


def _own_address() -> str:
    """The address this machine uses towards others, the loopback's when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
    return address


def refuse_unconfined(sandbox: Sandbox) -> None:
    """Exit if a sandbox enforces nothing: the attacks would do their harm to this machine."""
    if not sandbox.report().enforced:
        sys.exit(f"{sandbox.name} confines nothing: the attacks would hit this machine")


def main(backend: str = "auto", form: str = "table") -> None:
    """Print the outcomes under a backend. Exits for one that confines nothing: see `refuse`."""
    refuse_unconfined(select_sandbox(backend))
    outcomes = run_attacks(backend, [attack.name for attack in ATTACKS])
    if form == "json":
        json.dump(outcomes, sys.stdout)
        return
    without = run_attacks("none", control_names())
    for attack in ATTACKS:
        control = without.get(attack.name, "not tried").partition(":")[0]
        name = attack.name.replace("_", " ")
        print(f"{attack.group:11} {name:46} {control:10} {outcomes[attack.name]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
