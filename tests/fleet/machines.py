"""A Ray cluster of three machines on loopback, with a node of kernel-mcp on each."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio

from kernel_mcp.fleet.cluster import connect
from kernel_mcp.fleet.front import FleetCalls
from kernel_mcp.fleet.persistence import FLEET, key_of
from kernel_mcp.fleet.registry import registry_of
from kernel_mcp.fleet.watchdog import below
from tests.integration.calls_contract import Person, links

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 120
PORT = 6399
HEAD = 2
"""The last number of the head's address: 127.0.0.1 does not do for Ray."""


def environ(**more: str) -> dict[str, str]:
    """The variables of a process that belongs to the cluster."""
    return {
        **os.environ,
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def processes(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *below(pid, 30)]


def everything() -> list[int]:
    """All processes."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; what waits to be reaped has."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found.append(pid)
    return found


@dataclass
class Node:
    """A `kernel-mcp node`. `pid` is the process that has the sessions."""

    name: str
    command: subprocess.Popen[str]
    state: Path
    pid: int

    @property
    def watchdog(self) -> int:
        words = f"kernel_mcp.fleet.watchdog {self.pid} "
        return next(each for each in everything() if words in name_of(each))

    @property
    def all(self) -> list[int]:
        """The processes of its sessions, and itself; without its watchdog."""
        return processes(self.pid)

    def end(self) -> None:
        """Wait for its end."""
        self.command.wait()
        assert self.command.stderr is not None
        self.command.stderr.close()

    def workspace(self, person: Person, handle: str) -> Path:
        """Where the files of a session are on this machine."""
        kept = self.state / FLEET / self.name / "w"
        return kept / key_of(person.name, handle).id


@dataclass
class Machines:
    """Three machines. What is started here is ended here."""

    root: Path
    head: int = HEAD
    port: int = PORT
    token: str = field(default_factory=lambda: secrets.token_hex(24))
    rays: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.{self.head}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        return environ(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=self.token)

    def start_ray(self, number: int) -> None:
        """Start Ray on a machine, and wait until it is there; it gives up where that takes long."""
        for _ in range(3):
            if self._try_ray(number):
                return
        raise AssertionError((self.root / f"ray-{number}.log").read_text()[-2000:])

    def _try_ray(self, number: int) -> bool:
        place = f"127.0.0.{number}"
        how = [f"--address={self.address}"]
        if number == self.head:
            how = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            how.append(f"--temp-dir={self.root / 'ray'}")
        command = [str(BIN / "ray"), "start", *how, f"--node-ip-address={place}", "--block"]
        command += ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
        log = self.root / f"ray-{number}.log"
        with log.open("wb") as file:
            ray = self.rays[number] = subprocess.Popen(
                command,
                env=self.environ,
                cwd=self.root,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE_S
        while "block forever" not in log.read_text():
            if ray.poll() is not None or time.monotonic() > until:
                end(ray)
                return False
            time.sleep(0.1)
        return True

    def of_ray(self, name: str) -> list[int]:
        """The processes of Ray's of some name, on all machines."""
        found = (pid for ray in self.rays.values() for pid in processes(ray.pid))
        return [pid for pid in found if name in name_of(pid)]

    def raylet(self, number: int) -> int:
        """The process of Ray's on a machine that starts the others."""
        return next(
            each for each in processes(self.rays[number].pid) if "/raylet/raylet" in name_of(each)
        )

    def start_node(self, number: int, *flags: str) -> Node:
        """Start a node on a machine, and wait until it is there."""
        name = f"n{number}"
        state = self.root / f"s{number}"
        command = [sys.executable, "-m", "kernel_mcp", "node", "--fleet", self.address]
        command += ["--fleet-store", str(self.root / "store"), "--name", name]
        command += ["--fleet-place", f"127.0.0.{number}", "--state-dir", str(state)]
        command += ["--warm", "0", "--max-sessions", "100"]
        command += ["--allow-install", "*", "--find-links", str(links(self.root / "links")), *flags]
        process = subprocess.Popen(
            command, env=self.environ, cwd=self.root, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        line = ""
        while "(process " not in line:
            line = process.stderr.readline()
            if not line:
                process.stderr.close()
                raise AssertionError(f"node {name} did not start: exit code {process.wait()}")
        found = re.search(r"\(process (\d+)\)", line)
        assert found is not None
        self.nodes[name] = Node(name, process, state, int(found[1]))
        return self.nodes[name]

    def whole(self) -> None:
        """Start again what a test before has ended."""
        for number in (HEAD, HEAD + 1, HEAD + 2):
            ray = self.rays.get(number)
            if ray is not None and not any("/raylet/raylet" in name_of(p) for p in below(ray.pid)):
                end(ray)
                ray = None
            if ray is None:
                self.start_ray(number)
        for number in (HEAD, HEAD + 1, HEAD + 2):
            node = self.nodes.get(f"n{number}")
            if node is not None and not running([node.pid]):
                node.end()  # it says that the node has ended, and ends
                node = None
            if node is None:
                self._start_again(number)

    def _start_again(self, number: int) -> None:
        """As Ray may still be starting, and the lease of a killed node may not be over."""
        for _ in range(12):
            with contextlib.suppress(AssertionError):
                self.start_node(number)
                return
        self.start_node(number)

    def run(
        self,
        *words: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        place: int = HEAD,
    ) -> subprocess.CompletedProcess[str]:
        """A command of kernel-mcp in the cluster."""
        return subprocess.run(
            [sys.executable, "-m", "kernel_mcp", *words, "--fleet-place", f"127.0.0.{place}"],
            env={**self.environ, **variables},
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    def end(self) -> None:
        """End all that was started."""
        for node in self.nodes.values():
            node.command.kill()
            node.end()
        for ray in self.rays.values():
            end(ray)


def end(ray: subprocess.Popen[bytes]) -> None:
    """End what `ray start --block` has started, and itself."""
    for pid in reversed(processes(ray.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ray.wait()


def connected(machines: Machines) -> Any:
    """Ray, of which the process of the tests is a part."""
    return connect(machines.address, place=f"127.0.0.{HEAD}")


@asynccontextmanager
async def fronted(ray: Any) -> AsyncIterator[FleetCalls]:
    """A front in this process."""
    calls = FleetCalls(ray, registry_of(ray))
    async with anyio.create_task_group() as tasks:
        with anyio.fail_after(PATIENCE_S):
            await tasks.start(calls.run)
        yield calls
        tasks.cancel_scope.cancel()


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do not run, as of a machine that hangs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
