"""Files of sessions that `--workspace` keeps, found again by the next server."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from tests.integration.agent import Agent, command
from tests.integration.unprivileged import USER, as_ordinary_user
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="kept-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "way",
    sampled(
        [f"{who}, {warm}" for who in ("as started", "ordinary") for warm in "01"],
        *("ordinary, 0",),
    ),
)
async def test_a_later_server_has_the_files_of_default_and_named_sessions(
    place: Path, way: str
) -> None:
    who, warm = way.split(", ")
    flags = ("--workspace", str(place), "--warm", warm, "--allow", "*")
    server = command(*flags)
    if who == "ordinary":
        if os.geteuid() == 0:
            os.chown(place, USER, USER)
        words = as_ordinary_user([sys.executable, "-m", "kernel_mcp", *flags])
        server = StdioServerParameters(command=words[0], args=words[1:], env={}, cwd="/")
    async with Client(server) as client:
        notebook = Agent(client)
        await notebook.run("open('a.txt', 'w').write('default')")
        made = await notebook.call("create_session", name="etl")
        assert "'etl' has them again" in made.data["note"]
        await notebook.run("open('b.txt', 'w').write('etl')", session="etl")
        unnamed = (await notebook.call("create_session")).data
        await notebook.run("open('c.txt', 'w').write('unnamed')", session=unnamed["session"])
        await notebook.call("run_script", script="open('d.txt', 'w').write('no session has it')")
    assert {path.name for path in place.iterdir() if not path.name.startswith(".")} == {
        "default",
        "etl",
        unnamed["name"],
    }
    async with Client(server) as client:
        notebook = Agent(client)
        assert "default" in (await notebook.run("print(open('a.txt').read())")).text
        for name, file in (("etl", "b.txt"), (unnamed["name"], "c.txt")):
            session = (await notebook.call("create_session", name=name)).data["session"]
            code = f"print(open({file!r}).read()); open({file!r}, 'a').write('more')"
            answer = await notebook.run(code, session=session)
            assert answer.status == "ok", answer.text
        read = await notebook.call("read_file", path="b.txt", session="etl")
        assert read.text == "etlmore"


@pytest.mark.parametrize(
    "flags", [("--warm", "1"), pytest.param(("--no-template",), marks=pytest.mark.ways)]
)
async def test_a_umask_that_closes_files_to_others_closes_none_to_kernels(
    place: Path, flags: tuple[str, ...]
) -> None:
    (place / "shown").mkdir(mode=0o755)
    (place / "shown/a.csv").write_text("1,2")
    place.chmod(0o755)
    server = command("--workspace", str(place / "kept"), "--mount", str(place / "shown"), *flags)
    words = ["-c", 'umask 077; exec "$@"', "sh", server.command, *server.args]
    async with Client(StdioServerParameters(command="sh", args=words, env=server.env)) as client:
        notebook = Agent(client)
        await notebook.call("write_file", path="b.txt", content="3")
        for session in ("", (await notebook.call("create_session")).data["session"]):
            code = f"open('own', 'w').write('x'), open({str(place / 'shown/a.csv')!r}).read()"
            assert (await notebook.run(code, session=session)).text == "(1, '1,2')"
        assert (await notebook.run("open('b.txt').read()")).text == "'3'"
