"""Sessions whose kernels are hostile programs, and what they cost the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

import anyio

from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel
from kernel_mcp.launch.base import ConnectionInfo, KernelEnvironment, OnRecord
from kernel_mcp.launch.process import Egress, KernelProcess, KernelSockets, StartReport
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.limits.manager import ResourceManager
from kernel_mcp.linux.proc import ExitStatus, Usage
from kernel_mcp.policy import Policy
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.storage import SessionFolders
from kernel_mcp.units import MIB

PROGRAM = Path(__file__).with_name("hostile_kernel.py")
ENVIRONMENT = KernelEnvironment(Path(sys.executable), ())
OPEN = Policy.for_allow(["*"])
NO_LIMITS = Limits(disk_bytes=0, tmp_bytes=0, memory_bytes=0, pids=0)
GRACE_S = 0.2
READY_S = 3.0
CALLER = Caller()


class NoEgress:
    """No network: there is nothing to open."""

    def open(self, wanted: tuple[str, ...] | None, on_record: OnRecord) -> None:
        pass


class HostileHandle:
    """A hostile program in the place of a kernel's process; it ignores interrupts."""

    def __init__(self, mode: str, folder: Path) -> None:
        connection = ConnectionInfo(ip=str(folder / "k"), key=secrets.token_hex(16))
        self.sockets = KernelSockets(connection)
        arguments = [mode, connection.ip, connection.key]
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), *arguments], stdout=subprocess.PIPE
        )
        self.pid = self._process.pid
        self.report = StartReport(())
        self.egress: Egress = NoEgress()
        self.sandbox_group = None
        self.exit: ExitStatus | None = None
        self.limits: KernelLimits = ResourceManager().open(NO_LIMITS, folder, folder)
        self._ended = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    async def started(self) -> None:
        """Wait until it listens."""
        assert self._process.stdout is not None
        with anyio.fail_after(60):
            await anyio.wait_readable(self._process.stdout)
        assert self._process.stdout.readline() == b"ready\n"

    @property
    def stopped(self) -> bool:
        return False

    def usage(self) -> Usage:
        return Usage()

    def unreceived(self, characters: int) -> str:
        return ""

    def interrupt(self) -> None:
        """It does not listen."""

    def kill(self) -> None:
        if self.exit is None:
            self._process.kill()

    async def wait(self) -> ExitStatus:
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def aclose(self) -> None:
        self.kill()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        self.exit = ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)
        self._ended.set()


class HostileSource:
    """Starts a kernel of the mode that is next."""

    def __init__(self, folder: Path) -> None:
        self.mode = "honest"
        self._folder = folder
        self._count = 0

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        handle = HostileHandle(self.mode, folder)
        try:
            await handle.started()
            kernel = Kernel(cast(KernelProcess, handle), environment=ENVIRONMENT, policy=OPEN)
        except BaseException:
            await handle.aclose()
            raise
        try:
            await kernel.ready(READY_S)
        except BaseException:
            await kernel.aclose()
            raise
        return kernel


class Court:
    """A server's sessions: a hostile one and an honest one beside it."""

    def __init__(self, manager: SessionManager, source: HostileSource) -> None:
        self._manager = manager
        self._source = source

    async def session(self, mode: str) -> Session:
        """A session whose kernels behave like `mode`."""
        self._source.mode = mode
        session = await self._manager.create(CALLER)
        if mode == "honest" or not mode.startswith("raw_"):
            await session.reset(files=False, packages=False)
        return session

    async def run(self, session: Session, *, timeout_s: float = 2.0) -> Cell:
        """Run a cell to its end."""
        cell = session.submit("code", timeout_s)
        with anyio.fail_after(60):
            await cell.finished.wait()
        return cell


@asynccontextmanager
async def court() -> AsyncIterator[Court]:
    """A session manager without sandbox and tools."""
    with tempfile.TemporaryDirectory(prefix="kh") as folder:
        base = Path(folder)
        source = HostileSource(base)
        manager = SessionManager(
            Settings(grace_s=GRACE_S),
            source,
            SessionFolders(base / "w", base / "r", base / "l", keep=False),
            SharedContext(),
        )
        async with manager.running():
            yield Court(manager, source)


def text_of(cell: Cell) -> str:
    """The whole output of a cell."""
    return "".join(cell.log.text())


@contextmanager
def memory_growth() -> Iterator[Callable[[], float]]:
    """How far the peak of this process's memory rises in the block, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    yield lambda: max(0.0, (_status("VmHWM") - before) / MIB)


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


class Trips(list[float]):
    """How long round trips took; `work` is what each took of the processor, for all that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[float] = []


@asynccontextmanager
async def round_trips(court: Court, session: Session) -> AsyncIterator[Trips]:
    """How long cells of another session take while the block runs, one after the other.

    The unit is the time of one before the block begins: how busy the machine is does not count. It
    does for the longest of many: what a single one may take is judged by processor time.
    """
    taken = Trips()

    async def trip() -> tuple[float, float]:
        began, worked = time.perf_counter(), time.process_time()
        cell = await court.run(session, timeout_s=300)
        text = text_of(cell)
        assert text == "honest\n", (text, cell.outcome, cell.notices)
        return time.perf_counter() - began, time.process_time() - worked

    alone = [await trip() for _ in range(11)]
    undisturbed, work = (statistics.median(each) for each in zip(*alone, strict=True))

    async def measure() -> None:
        while True:
            elapsed, worked = await trip()
            taken.append(elapsed / undisturbed)
            taken.work.append(worked / work)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure)
        yield taken
        tasks.cancel_scope.cancel()
    with contextlib.suppress(Exception):
        taken.sort()
