"""The contents of sessions of the state table, and the servers that they outlive.

Every variable has to be there as it was, or be told: by its name, or by the number of the cell that
it comes of. The client is the SDK's own, driven from threads of no event loop, so that servers can
outlive a test.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import uv
from anyio.from_thread import BlockingPortal, start_blocking_portal

from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON
from tests.integration.agent import Answer, lost, notices
from tests.integration.lives import Life, Place
from tests.integration.processes import running
from tests.unit.packages.wheels import wheel

SLOW_DISK = """
import os, sys, time
_fsync = os.fsync
def fsync(file):
    time.sleep(0.5)
    _fsync(file)
os.fsync = fsync
from kernel_mcp.cli import main
sys.exit(main())
"""
SPIN = "while True: pass"

FORKED = "forked from a template that was tried"
PACKAGES = ("--allow", "numpy")
TRIES = 300
PAUSE_S = 0.1


@dataclass(frozen=True)
class Content:
    """Variables that one cell makes, and what is true of them as long as they are whole."""

    code: str
    checks: Mapping[str, str]


SMALL = Content(
    """
import dataclasses, hashlib, random, sqlite3, threading
import numpy as np
small = {"a": [1, 2.5, None], "b": ("x", b"y")}
twice = lambda x: 2 * x
@dataclasses.dataclass
class Point:
    x: int
point = Point(3)
""",
    {
        "small": 'small == {"a": [1, 2.5, None], "b": ("x", b"y")}',
        "twice": "twice(21) == 42",
        "point": "point == Point(3)",
    },
)
LARGE = Content(
    "large = random.Random(7).randbytes(6 * 2**20)",
    {"large": "large == random.Random(7).randbytes(6 * 2**20)"},
)
SHARED = Content(
    "listed = [1]; both = [listed, listed]\nwhole = np.arange(200_000); part = whole[10:20]",
    {
        "both": "both[0] is listed and both[1] is listed and listed == [1]",
        "part": "np.shares_memory(part, whole) and part.tolist() == list(range(10, 20))",
        "whole": "whole.tolist() == list(range(200_000))",
    },
)
UNPICKLABLE = Content(
    'conn = sqlite3.connect(":memory:"); lines = (x for x in [1, 2]); lock = threading.Lock()',
    {
        "conn": 'conn.execute("select 1").fetchone() == (1,)',
        "lines": "next(lines) == 1",
        "lock": "not lock.locked()",
    },
)
OWN = Content(
    "import greeting\nwords = greeting.Words('hello')",
    {"words": "words == greeting.Words('hello')"},
)
ALL = (SMALL, LARGE, SHARED, UNPICKLABLE)
SAVABLE = (SMALL, LARGE, SHARED)
FAST = "count = globals().get('count', 0) + 1"
FAST_CALLS = 3

GREETING = """
import dataclasses
__version__ = {!r}
@dataclasses.dataclass
class Words:
    text: str
"""
PROBE = """
def _probe(check):
    try:
        return bool(eval(check, globals()))
    except Exception as error:
        return type(error).__name__ + ': ' + str(error)
print({name: _probe(check) for name, check in %r.items()})
"""


def interpreters() -> Iterator[Path]:
    """Every other Python of this machine that kernels may have, by its path."""
    for minor in range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1):
        if minor == sys.version_info[1]:
            continue
        name = f"python3.{minor}"
        found = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))
        found += [Path(path) for path in [shutil.which(name)] if path and "shims" not in path]
        yield from found[:1]


def environment(root: Path, python: str, version: str = "1.0") -> Path:
    """Make an environment anew, with a package that sessions use."""
    program = [uv.find_uv_bin(), "--quiet", "--offline"]
    subprocess.run([*program, "venv", "--clear", "--python", python, str(root)], check=True)
    if version:
        files = {"greeting.py": GREETING.format(version)}
        file = wheel(root.parent / "wheels", "greeting", version, files=files)
        argv = [*program, "pip", "install", "--no-deps", "--no-index", "--link-mode", "copy"]
        subprocess.run([*argv, "--python", str(root), str(file)], check=True)
    return root


@dataclass
class Held:
    """The contents of a session, by the number of the cell that assigned them."""

    name: str
    cells: dict[int, Content] = field(default_factory=dict)
    last: int = 0

    @property
    def checks(self) -> dict[str, str]:
        return {name: check for each in self.cells.values() for name, check in each.checks.items()}

    def cell_of(self, name: str) -> int:
        return next(number for number, each in self.cells.items() if name in each.checks)


@dataclass
class Verdict:
    """The state of a session afterwards: whole variables, and others with their description.

    `told` are the notices of all answers since.
    """

    kept: set[str]
    gone: dict[str, object]
    told: str
    names: set[str]
    cells: set[int]

    def silent(self, held: Held) -> dict[str, object]:
        """Those that are not whole, and of which nothing was said."""
        return {
            name: seen
            for name, seen in self.gone.items()
            if name not in self.names and held.cell_of(name) not in self.cells
        }


def cells_told(text: str) -> set[int]:
    """Numbers of cells that notices name."""
    found: set[int] = set()
    for run in re.findall(r"\b[Cc]ells? ((?:\d+(?:\N{EN DASH}\d+)?(?:, )?)+)", text):
        for part in filter(None, run.split(", ")):
            first, _, last = part.partition("\N{EN DASH}")
            found |= set(range(int(first), int(last or first) + 1))
    return found


class Server:
    """A server and its client, used from a thread."""

    def __init__(self, portal: BlockingPortal, life: AbstractContextManager[Life]) -> None:
        self._portal = portal
        self._context = life
        self._life = life.__enter__()
        self.pid = self._life.pid

    def call(self, tool: str, **arguments: Any) -> Answer:
        async def call() -> Answer:
            return await self._life.call(tool, **arguments)

        return self._portal.call(call)

    def run(self, code: str, session: str, **arguments: Any) -> Answer:
        async def run() -> Answer:
            return await self._life.run(code, session=session, **arguments)

        return self._portal.call(run)

    def info(self, session: str) -> dict[str, Any]:
        return self.call("info", session=session).data

    def close(self) -> None:
        """End its input, and wait until it has ended."""
        self._context.__exit__(None, None, None)

    def kill(self, number: int) -> None:
        """Send it a signal that ends it, and wait until it has ended."""
        os.kill(self.pid, number)
        for _ in range(TRIES):
            if not running(self.pid):
                break
            self._portal.call(anyio.sleep, PAUSE_S)
        self.close()


class Table:
    """One folder after another's servers; `python` is what they are given, if anything."""

    def __init__(
        self, portal: BlockingPortal, root: Path, python: str = "", condition: str = ""
    ) -> None:
        self.place = Place(root)
        self.python = python
        self.venv = root / ".venv"
        self._slow = condition == "slow disk"
        self._portal = portal
        self._server: Server | None = None
        self._flags: tuple[str, ...] = ()
        if python:
            environment(self.venv, python)

    def server(self, *flags: str) -> Server:
        """The one that runs, with default flags and these; a new one where that has others."""
        if self._server is not None and (self._flags != flags or not running(self._server.pid)):
            self.end()  # one that has ended by itself has failed the row before
        if self._server is None:
            own = ("--python", str(self.venv)) if self.python else ()
            given = ("--template", *PACKAGES, *own, *flags)
            folders = [str(Path(self.python).parent)] if self.python else []
            env = {"PATH": ":".join([*folders, os.environ["PATH"]])}
            life = self.place.life(*given, env=env, user=self._program)
            self._server = Server(self._portal, self._portal.wrap_async_context_manager(life))
            self._flags = flags
        return self._server

    def _program(self, argv: list[str]) -> list[str]:
        python, module, name, *flags = argv
        return [python, "-c", SLOW_DISK, *flags] if self._slow else [python, module, name, *flags]

    def end(self, number: int = 0) -> None:
        """End the server by a signal, or by the end of its input."""
        server, self._server = self._server, None
        if server is None:
            return
        if number and running(server.pid):
            server.kill(number)
        else:
            server.close()

    def session(self, name: str, *flags: str, contents: Sequence[Content] = ALL) -> Held:
        """Make a session with these contents, whose kernel comes of a template that is whole."""
        server = self.server(*flags)
        for _ in range(TRIES):
            server.call("create_session", name=name)
            server.run("None", name)
            if FORKED in str(server.info(name)["sandbox_found"]):
                break
            server.call("close_session", session=name)
            self._portal.call(anyio.sleep, PAUSE_S)
        else:
            raise AssertionError("no template is whole")
        held = Held(name)
        for content in (*contents, *([OWN] if self.python else [])):
            answer = server.run(content.code, name)
            assert answer.status == "ok", answer.text
            held.last = answer.cell["cell"]
            held.cells[held.last] = content
        return held

    def saved_session(self, name: str, *flags: str) -> Held:
        """Make a session that is saved but for cells that have just followed each other."""
        held = self.session(name, *flags)
        self.saved(held)
        self.hurry(held)
        return held

    def hurry(self, held: Held) -> None:
        """Change a variable by cells that follow each other at once."""
        for count in range(1, FAST_CALLS + 1):
            held.last = self.server(*self._flags).run(FAST, held.name).cell["cell"]
            content = Content(FAST, {"count": f"count == {count}"})
            held.cells = {n: each for n, each in held.cells.items() if "count" not in each.checks}
            held.cells[held.last] = content

    def saved(self, held: Held) -> None:
        """Wait until its variables lie on the disk as of its last cell."""
        for _ in range(TRIES):
            found = [each for each in self.place.manifests() if each["name"] == held.name]
            if found and (found[0]["cell"] or 0) >= held.last:
                return
            self._portal.call(anyio.sleep, PAUSE_S)
        raise AssertionError("it is not saved")

    def sleeps(self, held: Held) -> None:
        """Wait until a session is hibernated."""
        for _ in range(TRIES):
            found = self.server(*self._flags).call("list_sessions").data["sessions"]
            if any(each["name"] == held.name and each["state"] == "hibernated" for each in found):
                return
            self._portal.call(anyio.sleep, PAUSE_S)
        raise AssertionError("it does not sleep")

    def judge(self, held: Held, *before: Answer, flags: Sequence[str] = ()) -> Verdict:
        """Look at what a session holds now; `before` are answers since it was ended."""
        shown = self.server(*flags).run(PROBE % (held.checks,), held.name)
        answers = [*before, shown]
        text = shown.text.partition("\n[kernel-mcp]")[0].strip()
        found: dict[str, object] = ast.literal_eval(text)
        told = "\n".join(notice for each in answers for notice in notices(each))
        return Verdict(
            kept={name for name, seen in found.items() if seen is True},
            gone={name: seen for name, seen in found.items() if seen is not True},
            told=told,
            names={name for each in answers for name in lost(each)},
            cells=cells_told(told),
        )

    def entry(self, held: Held) -> Path:
        """The folder in which a session is saved."""
        found = {
            json.loads(path.read_text())["name"]: path.parent
            for path in self.place.kept.glob("r/*/manifest.json")
        }
        return found[held.name]


@contextmanager
def table(root: Path, python: str = "", condition: str = "") -> Iterator[Table]:
    """A table in a folder; the machine is `busy` or has a `slow disk`, if that is asked for."""
    spinning = 2 * (os.cpu_count() or 1) if condition == "busy" else 0
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(spinning)]
    try:
        with start_blocking_portal() as portal:
            made = Table(portal, root, python, condition)
            try:
                yield made
            finally:
                made.end(signal.SIGTERM)
    finally:
        for each in busy:
            each.kill()
            each.wait()
