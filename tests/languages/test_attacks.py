"""No attack from another language's kernel gains what one from this server's own does not."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client

from kernel_mcp.config.settings import Limits
from kernel_mcp.units import MIB
from tests.contracts.interpreter import COLD, KINDS, Kind
from tests.escape.attacks.table import Target
from tests.escape.host import FOLDER, prepared
from tests.escape.inside import ATTACKS
from tests.integration.agent import Agent, command
from tests.integration.servers import Servers
from tests.languages.kernels import kernel_flag
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

SMALL = ("--pids", "60", "--disk", "64M")
MEMORY = {"deno": 1500 * MIB}
"""The memory that a kernel takes to start, if that is more than `LITTLE`."""
LITTLE = 512 * MIB
FILES = (
    "__init__.py",
    "inside.py",
    *(f"attacks/{each.name}" for each in FOLDER.glob("attacks/*.py")),
)
ATTACK = (
    "rm task.json; alone=; setsid true 2>/dev/null && alone='setsid -w';"
    "$alone python3 -I -S -B corpus/tests/escape/inside.py > told.json"
)
"""The task holds the secret that attacks look for; bash has a terminal of its own."""
WAYS = {
    "bwrap": (),
    "doors": ("--env", "GREETING=hello", "--network", "example.com,db.invalid:5432"),
    "secret": ("--network", "api.example.com", "--secret", "API_TOKEN@api.example.com"),
    "mount": ("--mount",),
    "strict": ("--mount", ":/data:ro:strict"),
    "landlock": ("--sandbox", "landlock"),
}
FOREIGN = {kind.name: kind for kind in KINDS if kind.spec and not kind.elsewhere}
CLOSED = [(name, "landlock") for name in ("bash", "deno", "octave")]
"""Kernels that cannot start there."""
TRIED = [f"{name}, {way}" for name in FOREIGN for way in WAYS if (name, way) not in CLOSED]
OWN = next(kind for kind in KINDS if kind.name == "cold")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with prepared() as target:
        limits = {
            "memory_bytes": LITTLE,
            "pids": 60,
            "open_files": Limits().open_files,
            "file_bytes": 64 * MIB,
            "tmp_bytes": Limits().tmp_bytes,
        }
        yield replace(target, limits=limits)


def flags_of(way: str, folder: Path) -> tuple[str, ...]:
    """The flags of a server; a mounted folder holds nothing to be stolen."""
    given = WAYS[way]
    if "--mount" in given:
        given = ("--mount", f"{folder}{''.join(given[1:])}")
    return (*SMALL, *given)


@asynccontextmanager
async def served(way: str, kind: Kind, folder: Path) -> AsyncIterator[Agent]:
    """A client of a server with sessions of its own and of another language."""
    memory = ("--memory", f"{MEMORY.get(kind.name, LITTLE)}")
    flags = (*COLD, *memory, *flags_of(way, folder), "--kernel", kernel_flag(kind.name))
    async with Client(command(*flags, env={"API_TOKEN": "a-secret-value"})) as client:
        yield Agent(client)


async def outcomes(notebook: Agent, kind: Kind, target: Target) -> dict[str, str]:
    """Run all attacks below a kernel of this kind."""
    wanted: dict[str, Any] = {"language": kind.spec} if kind.spec else {}
    opened = await notebook.call("create_session", **wanted)
    assert not opened.failed, opened.text
    session = opened.data["session"]
    place = (await notebook.call("info", session=session)).data["workspace"]
    task = {"target": asdict(target), "names": [a.name for a in ATTACKS], "workspace": place}
    files = {f"corpus/tests/escape/{name}": (FOLDER / name).read_text() for name in FILES}
    for path, content in {**files, "task.json": json.dumps(task)}.items():
        made = await notebook.call("write_file", session=session, path=path, content=content)
        assert not made.failed, made.text
    command = f"cd {shlex.quote(place)} && {{ {ATTACK}; }} < task.json"
    code = kind.language.at(kind.language.shell, command)
    ran = await notebook.run(code, session=session, timeout=500, wait=500)
    assert ran.status == "ok", ran.text
    told = await notebook.call("read_file", session=session, path="told.json", limit=MIB)
    found: dict[str, str] = json.loads(told.text)
    await notebook.call("close_session", session=session)
    return found


@pytest.mark.parametrize("tried", sampled(TRIED, "stock, bwrap", "stock, landlock"))
async def test_it_gains_no_more(tried: str, target: Target, tmp_path: Path) -> None:
    name, way = tried.split(", ")
    limits = {**target.limits, "memory_bytes": MEMORY.get(name, LITTLE)}
    target = replace(target, limits=limits)
    async with served(way, FOREIGN[name], tmp_path) as notebook:
        found = await outcomes(notebook, FOREIGN[name], target)
        escaped = {name for name, what in found.items() if not what.startswith("held")}
        if escaped:
            own = await outcomes(notebook, OWN, target)
            assert escaped <= {name for name, what in own.items() if not what.startswith("held")}
    assert found.keys() == {each.name for each in ATTACKS}


START = """\
import os, sys
sys.path.remove(os.getcwd())
told = "written"
try:
    with open("/run/kernel/planted", "w") as file:
        file.write("beyond every quota")
except OSError as reason:
    told = type(reason).__name__
with open("told", "w") as file:
    file.write(told)
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives kernels users of their own")
async def test_code_of_the_workspace_that_runs_at_the_start_writes_only_there(
    servers: Servers,
) -> None:
    async with servers.agent("--kernel", kernel_flag("stock")) as notebook:
        await notebook.call("create_session", name="stock", language="stock")
        await notebook.call(
            "write_file", session="stock", path="ipykernel_launcher.py", content=START
        )
        again = await notebook.call("reset", session="stock")
        assert not again.failed, again.text
        told = await notebook.call("read_file", session="stock", path="told")
        assert told.text == "PermissionError"
