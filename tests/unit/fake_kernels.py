"""Kernels that only exist in the test: cells are assignments, dumps are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import anyio

from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.environments.build import Terms
from kernel_mcp.environments.metadata import EnvironmentSpec, note_file
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import EnvironmentBuildError, LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.kernel import Kernel, NoTools, PendingReply, ToolAccess
from kernel_mcp.kernels.known_names import KnownNames
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.kernels.run import Run, Sink
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.network import Network, NetworkAccess
from kernel_mcp.launch.process import StartReport
from kernel_mcp.limits.kernel import KernelLimits
from kernel_mcp.linux.proc import ExitStatus, Usage
from kernel_mcp.notebooks.metadata import PYTHON_METADATA
from kernel_mcp.output.items import Failure, Stream
from kernel_mcp.policy import Policy
from kernel_mcp.sessions.capacity import Bound, Capacity
from kernel_mcp.sessions.cell import Cell
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.events import Events
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.principals import Others
from kernel_mcp.sessions.scheduler import Preparation
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.shared_context import SharedContext
from kernel_mcp.sessions.storage import SessionFolders

IN_CELL = "Cell In[1], line 1"


class FakeKernel:
    """Runs `name = value`, `say text`, `raise text`, and, until it is interrupted, `wait`."""

    extended = True
    snapshots = None
    starts_anew = Kernel.starts_anew
    place = ""
    notebook_metadata = PYTHON_METADATA
    environment = KernelEnvironment(Path("python"), ())
    policy = Policy(frozenset(), allow_all=True)
    tools: ToolAccess = NoTools()

    def __init__(self, source: FakeSource) -> None:
        self.variables: dict[str, str] = {}
        self.exit: ExitStatus | None = None
        self.closed = self.broken = False
        self.stopped = False
        self.rests = 0
        self.handle = self
        self.report = StartReport(("the kernel is a fake",))
        self.sandbox_group = None
        self.pid = 2**22
        """Above the highest pid of Linux: threads of a real process would count as its own."""
        self.egress = NetworkAccess(Network())
        self.names = KnownNames()
        self.limits = KernelLimits(
            Limits(), membership=None, quotas=(), wake=lambda _: None, forget=lambda _: None
        )
        self.dead = anyio.Event()
        self._source = source
        self._dump = b""
        self._arrived = b""
        self._loaded: set[str] = set()
        self._waiting: Run | None = None
        self._pending: PendingReply | None = None

    @property
    def running(self) -> Run | None:
        return self._waiting

    async def watch(self) -> None:
        await self.dead.wait()

    async def aclose(self) -> None:
        self.closed = True
        self.dead.set()

    def usage(self) -> Usage:
        return Usage()

    def die(self) -> None:
        self.exit = ExitStatus(code=7)
        self.dead.set()
        if self._pending is not None:
            self._pending.done.set()
        if self._waiting is not None:
            self._waiting.finished.set()

    kill = die

    def end_unresponsive(self, run: Run) -> None:
        self.kill()

    def interrupt(self, *, alone: bool = False) -> None:
        self._source.interrupts.append(alone)
        if self._waiting is not None:
            self._waiting.on_reply({"status": "ok"})
            self._waiting.on_idle()
            self._waiting = None
        if self._pending is not None and self._source.dump != "stuck" and not self._source.stuck:
            self._answer(self._pending, {"status": "aborted"})

    def prewarm(self, code: str) -> Run:
        run = Run(lambda _event: None)
        run.on_reply({"status": "ok"})
        run.on_idle()
        return run

    def hear(self, sink: Sink) -> None:
        self.sink = sink

    def missed(self, run: Run) -> bool:
        return self.exit is not None and not run.begun

    def submit(
        self,
        code: str,
        sink: Sink,
        number: int | None = None,
        notebook: str = "",
        asks: object = None,
    ) -> Run:
        if self.exit is not None:
            raise LaunchError("The kernel's shell channel is closed. Call reset.")
        run = Run(sink)
        if self._source.mortal:
            self._source.mortal -= 1
            self.die()
            run.finished.set()
            return run
        if code == "wait":
            self._waiting = run
            run.begun = True
            return run
        word, _, text = code.partition(" ")
        if word == "say":
            sink(Stream("stdout", text))
        if word == "raise":
            failure = {"status": "error", "ename": "Error", "evalue": text, "traceback": [IN_CELL]}
            run.on_reply(failure)
            sink(Failure("Error", text, (IN_CELL,)))
        if word in ("say", "raise"):
            run.on_reply({"status": "ok"})
            run.on_idle()
            return run
        name, _, value = code.partition(" = ")
        self.variables[name] = value
        self.names.add([name])
        run.on_reply({"status": "ok"})
        run.on_idle()
        return run

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        self._source.asked.append(kind)
        if self._source.mute or self.exit is not None:
            raise LaunchError("The kernel did not answer.")
        return {}

    async def begin_script(self, name: str, timeout: float) -> None:
        await self.ask("kernel_mcp_script_request", {"name": name}, timeout=timeout)

    async def describe_variables(self, match: str, offset: int, timeout: float) -> dict[str, Any]:
        await self.ask("kernel_mcp_variables_request", {}, timeout=timeout)
        return {"variables": _described(self.variables), "omitted": self._source.omitted}

    @contextmanager
    def asking(
        self,
        channel: str,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> Iterator[PendingReply]:
        answer = PendingReply()
        self._source.asked.append(kind)
        {
            "kernel_mcp_save_request": self._save,
            "kernel_mcp_dump_request": self._make,
            "kernel_mcp_dump_part_request": self._send,
            "kernel_mcp_load_part_request": self._take,
            "kernel_mcp_load_request": self._load,
        }[kind](answer, content, b"".join(buffers))
        yield answer

    def _make(self, answer: PendingReply, content: dict[str, Any], _: bytes) -> None:
        if self._source.dump in ("hang", "stuck"):
            self._pending = answer
            self._source.dumping.set()
            return
        if self._source.dump == "die":
            self._pending = answer
            self.die()
            return
        bad = self._source.unpicklable
        wanted = {k: v for k, v in self.variables.items() if k not in content["leave"]}
        lost = {name: bad[name] for name in wanted if name in bad}
        most = content["max_bytes"]
        lost |= {name: "too large" for name, value in wanted.items() if len(value) > most}
        kept = {name: value for name, value in wanted.items() if name not in lost}
        self._dump = json.dumps({"values": kept}).encode()
        response = {
            "status": "ok",
            "size": self._source.size or len(self._dump),
            "names": list(kept),
            "stored": list(kept),
            "groups": [[name] for name in kept],
            "changed": self._source.changed,
            "files": self._source.files,
            "lost": lost,
            "variables": _described(kept),
        }
        self._answer(answer, response)

    def _save(self, answer: PendingReply, content: dict[str, Any], _: bytes) -> None:
        self._answer(answer, {"status": "ok", "unfit": "this kernel is a fake"})

    def _send(self, answer: PendingReply, content: dict[str, Any], _: bytes) -> None:
        part = self._dump[: 1 if self._source.dump == "drip" else content["bytes"]]
        self._dump = self._dump[len(part) :]
        self._answer(answer, {"status": "ok"}, part)

    def _take(self, answer: PendingReply, _: dict[str, Any], data: bytes) -> None:
        self._arrived += data
        self._answer(answer, {"status": "ok"})

    def _load(self, answer: PendingReply, content: dict[str, Any], _: bytes) -> None:
        if self._source.load == "die":
            self._pending = answer
            self.die()
            return
        dump = json.loads(self._arrived)
        lost: dict[str, str] = {}
        self._loaded |= set(content["leave"])
        left = {k: v for k, v in dump["values"].items() if k not in self._loaded}
        for name in list(left)[: content["count"] or None]:
            value = left.pop(name)
            self._loaded.add(name)
            if name in self._source.fatal or name in self._source.unlucky:
                if name in self._source.unlucky:
                    self._source.unlucky.remove(name)
                self._pending = answer
                self.die()
                return
            if name in self._source.stuck:
                self._pending = answer
                return
            if name in self._source.unreadable:
                lost[name] = "ValueError: cannot be read"
            else:
                self.variables[name] = value
        response = {
            "status": "ok",
            "names": list(self.variables),
            "lost": lost,
            "behind": [],
            "left": len(left),
            "missing": content["files"],
        }
        self._answer(answer, response)

    def _answer(self, answer: PendingReply, content: dict[str, Any], *buffers: bytes) -> None:
        answer.message = Message("reply", "", content, buffers)
        answer.done.set()
        self._pending = None


def _described(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "type": "str", "preview": text} for name, text in variables.items()]


class FakeSource:
    """Makes fake kernels and decides how they behave."""

    def __init__(self) -> None:
        self.kernels: list[FakeKernel] = []
        self.requests: list[KernelRequest] = []
        self.asked: list[str] = []
        self.interrupts: list[bool] = []
        """For each interrupt, whether it was for the kernel alone."""
        self.unpicklable: dict[str, str] = {}
        self.unreadable: set[str] = set()
        self.fatal: set[str] = set()
        self.unlucky: list[str] = []
        """Names at which kernels end, once for each time that they are in it."""
        self.stuck: set[str] = set()
        self.changed: dict[str, str] = {}
        self.files: list[str] = []
        self.dump = self.load = ""
        self.mute = False
        """True if kernels answer no question."""
        self.omitted = 0
        self.size = 0
        self.refuse = ""
        self.mortal = 0
        """Kernels that end before they take a cell."""
        self.dumping = anyio.Event()

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        self.requests.append(request)
        if self.refuse == ("beside" if request.beside else "own"):
            raise LaunchError("no kernel today")
        self.kernels.append(FakeKernel(self))
        return cast(Kernel, self.kernels[-1])

    @property
    def living(self) -> int:
        """Kernels that have not been closed."""
        return sum(not kernel.closed for kernel in self.kernels)


class FakeStore:
    """Has one environment for every spec, and notes what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.asked: list[tuple[str, ...]] = []
        self.terms: list[Terms] = []
        self.released: list[tuple[str, ...]] = []
        self.failure: EnvironmentBuildError | None = None
        self.python.parent.mkdir(parents=True)
        self.python.touch()
        manifest = {"modules": {"pillow": ["PIL"], "numpy": ["numpy"]}}
        note_file(folder).write_text(json.dumps(manifest))

    async def ensure(
        self, spec: EnvironmentSpec, progress: ProgressCallback, terms: Terms
    ) -> KernelEnvironment:
        self.asked.append(tuple(map(str, spec.packages)))
        self.terms.append(terms)
        if self.failure is not None:
            raise self.failure
        return KernelEnvironment(self.python, (), packages=("ipykernel==7.0",))

    def unfit(self, spec: EnvironmentSpec) -> dict[str, str]:
        return {}

    def release(self, spec: EnvironmentSpec) -> None:
        self.released.append(tuple(map(str, spec.packages)))

    async def uv_version(self) -> str:
        return "0.9.0"

    def size(self, environment: KernelEnvironment) -> int:
        return 1000


class Handed:
    """Callers of one client, whose answers are with it at once."""

    def of(self, context: object) -> Caller:
        return Caller(response=ResponseContext(self))

    def then(
        self,
        delivered: Callable[[], object],
        revoked: Callable[[], object] | None = None,
        cancelled: Callable[[], object] | None = None,
    ) -> None:
        delivered()


def deliver(session: Session, cell: Cell) -> None:
    """Add the session's pending notices to `cell`, and mark them as delivered."""
    pending = session.notifications.pending
    cell.notices += [notice.text for notice in pending]
    session.notifications.mark_delivered(pending)


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_manager(
    folder: Path,
    source: FakeSource,
    clock: FakeClock,
    *,
    capacity: Capacity | None = None,
    keep: bool = False,
    by_principal: bool = False,
    preparation: Preparation[Session] | None = None,
    persistence: Persistence | None = None,
    others: Others | None = None,
    events: Events | None = None,
    **settings: Any,
) -> SessionManager:
    """A manager of sessions with fake kernels."""
    return SessionManager(
        Settings(**settings),
        source,
        SessionFolders(
            folder / "w", folder / "r", folder / "p", keep=keep, by_principal=by_principal
        ),
        SharedContext(events or Events(), capacity=capacity or Capacity(), clock=clock),
        preparation,
        persistence,
        others=others,
    )


def bound(most: int, used: int, name: str = "the bound") -> Bound:
    """A limit of which so much is taken; a kernel takes 10, and 5 stay free."""
    return Bound(name, "of them", most, lambda: used, 10, 5, "do this")
