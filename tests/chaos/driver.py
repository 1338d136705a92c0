"""Sessions that do and suffer things at random, each beside a model of what it should hold.

`python -m tests.chaos --seconds 600` prints what was found as JSON; it fails when a variable had a
wrong value or was lost without a delivered answer that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp.client import Client

from tests.chaos.model import Model
from tests.integration.agent import Agent, Answer, command

PREPARE = (
    "import json, os, time, threading, types\n"
    "class Killer:\n"
    "    def __init__(self, n): self.n = n\n"
    "    def __reduce__(self): return os._exit, (3,)\n"
    "class Stuck:\n"
    "    def __init__(self, n): self.n = n\n"
    "    def __setstate__(self, state): raise OSError('not back')\n"
    "class Ends:\n"
    "    def __init__(self, n): self.n = n\n"
    "    def __reduce__(self): os._exit(4)\n"
)
KINDS = {
    "{n}": 8,
    "[{n}]": 4,
    "(lambda: {n})": 2,
    "types.SimpleNamespace(n={n}, lock=threading.Lock())": 1,
    "Killer({n})": 1,
    "Stuck({n})": 1,
    "Ends({n})": 1,
}
"""Ways to hold a number: the last four cannot be kept by a hibernation."""
LOOK = (
    "import json as _json\n"
    "def _look(v):\n"
    "    v = v[0] if isinstance(v, list) else v\n"
    "    return v if isinstance(v, int) else v.n if hasattr(v, 'n') else v()\n"
    "print('SEEN' + _json.dumps({_k: _look(_v) for _k, _v in list(globals().items())"
    " if _k.startswith('v_')}))\n"
    "import os as _os\n"
    "print('SPACE' + _os.readlink('/proc/self/ns/pid'), _os.getpid())\n"
)
NAMES = 12
PATIENCE_S = 150.0
"""How long a call may take on a busy machine before it counts as stuck."""
LOOKS = 12
"""Calls that may fail, for what happens to a session meanwhile, until one has to show it."""


@dataclass
class Findings:
    """The result of a run."""

    steps: int = 0
    done: Counter[str] = field(default_factory=Counter)
    losses_told: int = 0
    refusals: int = 0
    wrong: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    log: str = ""

    @property
    def good(self) -> bool:
        """True if nothing was wrong, and no loss silent."""
        return not (self.wrong or self.silent or self.stuck)


class Player:
    """One session at a time, the model of it, and what happens to it."""

    def __init__(
        self,
        number: int,
        notebook: Agent,
        chance: random.Random,
        findings: Findings,
        *,
        state: Path,
    ) -> None:
        self._number = number
        self._notebook = notebook
        self._chance = chance
        self._findings = findings
        self._state = state
        self._model = Model()
        self._handle = ""
        self._space: tuple[str, int] | None = None
        self._value = 0
        self._history: list[str] = []
        self._acts: dict[Callable[[], Awaitable[None]], int] = {
            self.assign: 30,
            self.assign_and_cancel: 8,
            self.assign_without_waiting: 8,
            self.assign_and_interrupt: 5,
            self.exit: 4,
            self.exit_unseen: 3,
            self.be_killed: 8,
            self.be_killed_meanwhile: 8,
            self.be_stopped: 4,
            self.list_variables: 6,
            self.reset: 2,
            self.reset_and_cancel: 3,
            self.close: 1,
            self.close_and_cancel: 2,
            self.lose_folder: 2,
            self.strike_anywhere: 1,
            self.rest: 8,
        }

    async def play(self, until: float) -> None:
        """Go on until then."""
        while time.monotonic() < until:
            (act,) = self._chance.choices(list(self._acts), list(self._acts.values()))
            self._note(act.__name__)
            self._findings.done[act.__name__] += 1
            try:
                with anyio.fail_after(PATIENCE_S * 4):
                    if not self._handle:
                        await self._open()
                    await act()
                    if self._handle:
                        await self.look()
            except TimeoutError:
                self._complain(self._findings.stuck, act.__name__)
                self._handle = ""
            self._findings.steps += 1

    async def call(self, tool: str, **arguments: Any) -> Answer:
        answer = await self._notebook.call(tool, session=self._handle, **arguments)
        self._hear(tool, answer)
        return answer

    async def given_up(self, tool: str, **arguments: Any) -> bool:
        """Call and give up after a random moment; whether it had succeeded before."""
        with anyio.move_on_after(self._chance.choice([0.003, 0.02, 0.1, 0.5])):
            return not (await self.call(tool, **arguments)).failed
        self._note("given up")
        return False

    async def look(self) -> None:
        """Compare the session with its model."""
        looks = 0
        while looks < LOOKS:
            answer = await self.call("execute", code=LOOK, timeout=10, wait=PATIENCE_S)
            looks += not (answer.failed and "Wait for a cell to end" in answer.text)
            text = answer.text
            if not self._handle:
                return
            if not answer.failed and answer.status == "ok":
                seen = json.loads(text.partition("SEEN")[2].splitlines()[0])
                space, number = text.partition("SPACE")[2].splitlines()[0].split()
                self._space = space, int(number)
                verdict = self._model.compare(seen, answer)
                for kind, names in asdict(verdict).items():
                    for name in names:
                        self._complain(getattr(self._findings, kind), name)
                return
            await anyio.sleep(0.2)
        self._complain(self._findings.stuck, "no answer shows what it holds")
        await self._open()

    async def assign(self) -> None:
        name, code = self._assignment()
        answer = await self.call("execute", code=code, wait=PATIENCE_S)
        self._assigned(name, answer)

    async def assign_and_cancel(self) -> None:
        name, code = self._assignment()
        slow = self._chance.choice(["", "time.sleep(0.1)", "time.sleep(30)", "sum(range(10**11))"])
        code = f"{slow}\n{code}" if self._chance.random() < 0.5 else f"{code}\n{slow}"
        self._model.assign(name, self._value, surely=False)
        await self.given_up("execute", code=code)

    async def assign_without_waiting(self) -> None:
        name, code = self._assignment()
        self._model.assign(name, self._value, surely=False)
        await self.call("execute", code=f"time.sleep(0.05)\n{code}", wait=0)
        if self._chance.random() < 0.5:
            await self.call("wait", wait=20)

    async def assign_and_interrupt(self) -> None:
        name, code = self._assignment()
        self._model.assign(name, self._value, surely=False)
        await self.call("execute", code=f"{code}\ntime.sleep(60)", wait=0)
        await anyio.sleep(self._chance.choice([0, 0.05, 0.3]))
        await self.call("interrupt")

    async def exit(self) -> None:
        await self.call("execute", code="import os; os._exit(7)")

    async def exit_unseen(self) -> None:
        if self._chance.random() < 0.5:
            await self.call("execute", code="import os; os._exit(8)", wait=0)
        else:
            later = "import os, threading; threading.Timer(0.2, lambda: os._exit(9)).start()"
            await self.call("execute", code=later)
            await anyio.sleep(self._chance.choice([0.1, 0.2, 0.5]))
        if self._chance.random() < 0.5:
            tool = self._chance.choice(["list_files", "info", "wait", "list_variables"])
            await self.given_up(tool)

    async def be_killed(self) -> None:
        self._signal(signal.SIGKILL)
        await anyio.sleep(self._chance.choice([0, 0.01, 0.1]))

    async def be_killed_meanwhile(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.assign)
            await anyio.sleep(self._chance.uniform(0, 0.02))
            self._signal(signal.SIGKILL)

    async def be_stopped(self) -> None:
        self._signal(signal.SIGSTOP)

    async def list_variables(self) -> None:
        answer = await self.call("list_variables")
        if answer.failed or not self._handle:
            return
        listed = [each["name"] for each in answer.data["variables"]]
        if not answer.data["omitted"]:
            for name in self._model.lacks(listed):
                self._complain(self._findings.silent, f"{name} in a list")

    async def reset(self) -> None:
        answer = await self.call("reset", files=self._chance.random() < 0.3)
        if not answer.failed:
            self._model.remove(surely=True)

    async def reset_and_cancel(self) -> None:
        if await self.given_up("reset"):
            self._model.remove(surely=True)

    async def close(self) -> None:
        answer = await self.call("close_session")
        if not answer.failed:
            self._handle = ""

    async def close_and_cancel(self) -> None:
        if await self.given_up("close_session"):
            self._handle = ""

    async def lose_folder(self) -> None:
        for folder in self._state.glob(f"s-*/*/{self._handle}"):
            if folder.parent.name == "w":
                removed = folder.with_name(f"{folder.name}-removed-{self._value}")
                self._value += 1
                folder.rename(removed)
                await anyio.to_thread.run_sync(partial(shutil.rmtree, removed, ignore_errors=True))

    async def strike_anywhere(self) -> None:
        """Kill whatever the server has started: a template, a supervisor, a spare, a kernel."""
        (server,) = _children(os.getpid())
        if pids := _below(server):
            with contextlib.suppress(OSError):
                os.kill(self._chance.choice(pids), signal.SIGKILL)

    async def rest(self) -> None:
        await anyio.sleep(self._chance.choice([0.5, 2.5, 5]))

    def _assigned(self, name: str, answer: Answer) -> None:
        ok = not answer.failed and answer.status == "ok" if self._handle else False
        self._model.assign(name, self._value, surely=ok)

    def _assignment(self) -> tuple[str, str]:
        self._value += 1
        name = f"v_{self._chance.randrange(NAMES)}"
        (kind,) = self._chance.choices(list(KINDS), list(KINDS.values()))
        made = kind.format(n=self._value)
        return name, f"{PREPARE}{name} = {made}"

    async def _open(self) -> None:
        while True:
            answer = await self._notebook.call("create_session")
            if not answer.failed:
                break
            self._note(answer.text[:60])
            await anyio.sleep(0.5)
        self._handle = str(answer.data["session"])
        self._model = Model()
        self._space = None
        self._history = []

    def _hear(self, tool: str, answer: Answer) -> None:
        if answer.failed and "create_session" in answer.text:  # it is no more
            self._note(f"{tool}: {answer.text[:200]}")
            self._model.hear(answer)
            for name in self._model.lacks([]):
                self._complain(self._findings.silent, f"{name} with its session")
            self._handle = ""
            return
        before = self._model.lacks([])
        self._model.hear(answer)
        told = set(before) - set(self._model.lacks([]))
        self._findings.losses_told += len(told)
        if answer.failed and "Wait for a cell to end" in answer.text and not told:
            self._findings.refusals += 1
            return
        status = answer.cell["status"] if "kernel-mcp/cell" in (answer.result.meta or {}) else ""
        notes = [t for t in answer.text.splitlines() if t.startswith("[kernel-mcp]")]
        self._note(f"{tool}{' failed: ' + answer.text[:150] if answer.failed else ''} {status}")
        self._history += [f"    {text[:300]}" for text in notes]

    def _note(self, text: str) -> None:
        self._history.append(f"{time.monotonic():.2f} {text}")

    def _complain(self, place: list[str], what: str) -> None:
        tail = "\n    ".join(self._history[-40:])
        place.append(f"{self._handle} of player {self._number}: {what}, after\n    {tail}")

    def _signal(self, number: signal.Signals) -> None:
        if self._space is None:
            return
        for pid in _kernel(*self._space, str(self._state)):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                self._findings.done[f"processes that got {number.name}"] += 1


def _kernel(space: str, number: int, place: str) -> list[int]:
    """The processes of a kernel by its namespace of processes, or by its number in ours.

    Those of containers do not descend from us: they have a folder below `place` mounted.
    """
    below = _below(os.getpid())
    if space == str(Path("/proc/self/ns/pid").readlink()):
        return [number] if number in below else []
    found: list[int] = []
    for pid in {*below, *(int(path.name) for path in Path("/proc").glob("[0-9]*"))}:
        with contextlib.suppress(OSError):
            if str(Path(f"/proc/{pid}/ns/pid").readlink()) == space and (
                pid in below or place in Path(f"/proc/{pid}/mountinfo").read_text()
            ):
                found.append(pid)
    return found


def _below(parent: int) -> list[int]:
    """The processes that descend from one."""
    found = _children(parent)
    for pid in found:
        found += _children(pid)
    return found


def _children(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


@asynccontextmanager
async def _served(state: Path, flags: tuple[str, ...], log: Path) -> AsyncIterator[Agent]:
    wanted = command(
        *("--allow", "*", "--state-dir", str(state), "--max-sessions", "14", "--grace", "0.5"),
        *("--idle-timeout", "3", "--quota", "asleep=40", *flags),
    )
    quoted = wanted.model_copy(
        update={
            "command": "bash",
            "args": ["-c", f'exec "$@" 2>>{log}', "server", wanted.command, *wanted.args],
        }
    )
    async with Client(quoted, mode="auto") as client:
        yield Agent(client)


@asynccontextmanager
async def _shown_on_failure(log: Path) -> AsyncIterator[None]:
    """Show the end of the server's log when the block fails, as when the server has ended."""
    try:
        yield
    except BaseException:
        sys.stderr.write(log.read_text()[-20_000:])
        raise


async def chaos(*, seconds: float, sessions: int, seed: int, flags: tuple[str, ...]) -> Findings:
    """Play with so many sessions for so long; `flags` are for the server."""
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/var/tmp") as folder:
        state, log = Path(folder, "s"), Path(folder, "log")
        async with _served(state, flags, log) as notebook:
            until = time.monotonic() + seconds
            async with _shown_on_failure(log), anyio.create_task_group() as tasks:
                for number in range(sessions):
                    chance = random.Random(f"{seed} {number}")
                    player = Player(number, notebook, chance, findings, state=state)
                    tasks.start_soon(player.play, until)
        findings.log = log.read_text()[-20_000:] if log.exists() else ""
    return findings
