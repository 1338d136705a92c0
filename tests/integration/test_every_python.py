"""The same session on each Python of this machine, and as an ordinary user without control groups.

Its sessions are forked once the template has loaded everything: the first one of a server is not.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

from kernel_specs.template import immortal
from tests.integration.agent import Agent, losses
from tests.integration.lives import Life, Place
from tests.integration.processes import named
from tests.integration.sleepers import IDLE, asleep
from tests.integration.unprivileged import USER, as_ordinary_user
from tests.interpreters import NAMES, interpreter
from tests.run_folder import own_folder

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def ordinary_place() -> Iterator[Place]:
    """A place that an ordinary user may pass and write to."""
    folder = Path(tempfile.mkdtemp(dir=own_folder(), prefix="ordinary-"))
    if os.geteuid() == 0:
        os.chown(folder, USER, USER)
    try:
        yield Place(folder)
    finally:
        shutil.rmtree(folder)


FLAGS = ("--template", "--allow", "*")
GATHER = "import asyncio\nlen(await asyncio.gather(*[asyncio.sleep(0.01) for _ in range(5)]))"
DEATH = "kept.append(0); import os; os.kill(os.getpid(), 9)"
IMMORTAL = "import os, sys\nsys.getrefcount(os) > 1 << 30"
SECOND = "after"
"""A session that begins once the template is whole."""
STRESS = """
import asyncio, contextvars, gc, json, re, threading, weakref, datetime, decimal, enum, abc
async def one(): await asyncio.gather(*[asyncio.sleep(0) for _ in range(50)])
class Kept(abc.ABC): pass
for turn in range(20):
    await one()
    made = [type(f"T{n}", (Kept,), {"f": lambda self: self})() for n in range(200)]
    links = [weakref.ref(each) for each in made]
    threads = [threading.Thread(target=lambda: json.dumps([re.compile(str(turn)).pattern]))]
    [each.start() for each in threads]; [each.join() for each in threads]
    del made; gc.collect(); gc.get_objects()
    assert not any(link() for link in links)
    assert decimal.Decimal(turn) + 1 == turn + 1 and datetime.datetime.now().year > 2000
    for each in gc.get_objects():
        if type(each) in (dict, list, tuple, type): gc.get_referents(each)
'done'
"""


@dataclass(frozen=True)
class Server:
    """How the servers of one place are started."""

    place: Place
    version: str = platform.python_version()
    flags: tuple[str, ...] = ()
    path: str = os.defpath
    user: Callable[[list[str]], list[str]] = list

    @classmethod
    def on(cls, folder: Path, name: str) -> Server:
        """Return one whose kernels run on an installed Python."""
        version, program = interpreter(name)
        path = f"{Path(program).parent}:{os.defpath}"
        return cls(Place(folder), version, ("--python", version), path)

    def begin(self, *flags: str) -> AbstractAsyncContextManager[Life]:
        """Start one."""
        started = (*FLAGS, *self.flags, *flags)
        return self.place.life(*started, env={"PATH": self.path}, user=self.user)


@asynccontextmanager
async def whole(server: Server) -> AsyncIterator[Life]:
    """Yield a client of a server whose template has loaded everything."""
    async with server.begin() as life:
        await life.run("1")
        with anyio.fail_after(120):
            while not await at_rest(life.pid):
                await anyio.lowlevel.checkpoint()
        yield life


async def at_rest(server: int) -> bool:
    """Return True if the template has used no processor time for 0.3 s."""
    templates = named("kernel-template", below=server)
    before = [used(pid) for pid in templates]
    await anyio.sleep(0.3)
    return bool(templates) and before == [used(pid) for pid in templates]


def used(pid: int) -> bytes:
    """Return the user and system time of a process."""
    try:
        return b" ".join(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:13])
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def survive(notebook: Agent, session: str, *, deaths: int) -> None:
    """Kill the kernel of a session again and again: its variables are back each time."""
    await notebook.run("kept = [41]", session=session)
    for _ in range(deaths):
        assert not losses(await notebook.run("1", session=session, checkpoint=True))
        dead = await notebook.run(DEATH, session=session)
        assert (dead.status, dead.cell["state_kept"]) == ("killed", True), dead.text
        assert (await notebook.run("kept", session=session)).text == "[41]"
        assert (await notebook.run(GATHER, session=session)).text == "5"


async def begun(notebook: Agent, name: str = SECOND) -> str:
    """Create a session."""
    return str((await notebook.call("create_session", name=name)).data["session"])


async def continued(server: Server) -> None:
    """Restore both sessions in the next server, and hibernate them."""
    async with server.begin(*IDLE) as life:
        for turn in range(2):
            for name in ("", SECOND):
                answer = await life.run("kept", session=name)
                assert answer.text.startswith("[41]"), (turn, answer.text)
                assert not losses(answer)
                await asleep(life, str(answer.cell["session"]))


async def outlives(server: Server) -> None:
    """Lead two sessions through deaths of kernels, a restart, and hibernation."""
    async with whole(server) as life:
        session = await begun(life)
        told = await life.run(IMMORTAL, session=session)
        assert told.text == str(server.version in immortal.TRIED)
        await survive(life, session, deaths=3)
        await survive(life, "", deaths=1)
    await continued(server)


@pytest.mark.ways
@pytest.mark.parametrize("python", NAMES)
async def test_a_session_outlives_its_kernels_and_its_server(python: str, tmp_path: Path) -> None:
    await outlives(Server.on(tmp_path, python))


async def test_a_session_of_an_ordinary_user_without_control_groups_does(
    ordinary_place: Place,
) -> None:
    user = partial(as_ordinary_user, variables={"KERNEL_MCP_PERSIST": "1G,1d"})
    await outlives(Server(ordinary_place, user=user))


@pytest.mark.full
@pytest.mark.parametrize("python", NAMES)
async def test_stressed_sessions_come_back_every_time(python: str, tmp_path: Path) -> None:
    async with whole(Server.on(tmp_path, python)) as life:
        for number in range(16):
            session = await begun(life, f"s{number}")
            assert (await life.run(STRESS, session=session)).text == "'done'"
            await survive(life, session, deaths=2)
            assert (await life.run(STRESS, session=session)).text == "'done'"
            await life.call("close_session", session=session)
