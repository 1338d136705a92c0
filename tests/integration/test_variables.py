"""Variables that the operator gives to code: read everywhere, shown nowhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from kernel_mcp.linux.proc import parent_of
from tests.integration.agent import Agent, command
from tests.integration.unprivileged import as_ordinary_user
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

TOKEN = "tok-7f3a91c2e5b8"
QUOTED = "p'a\"ss<word>&\\\n2"
FLAGS = (
    *("--env", "MODEL_TOKEN", "--env", f"QUOTED={QUOTED}", "--env", "PIN=1234"),
    *("--env", "EMPTY=", "--allow", "*", "--allow-install", "*", "--warm", "1"),
)
OWN = {"MODEL_TOKEN": TOKEN}
CHILD = "import os, sys; print(os.environ['MODEL_TOKEN'] == sys.argv[1])"
READ = f"""
import os, subprocess, sys
known = ''.join({list(TOKEN)!r})
print(os.environ['MODEL_TOKEN'] == known, os.environ['PIN'], len(os.environ['QUOTED']))
print(repr(os.environ['EMPTY']))
words = [sys.executable, '-c', {CHILD!r}, known]
print(subprocess.run(words, capture_output=True, text=True).stdout)
"""


def values_in(anything: Any) -> list[str]:
    """The values that a text, or anything as JSON, has in it."""
    text = anything if isinstance(anything, str) else json.dumps(anything, ensure_ascii=False)
    forms = (TOKEN, QUOTED, json.dumps(QUOTED)[1:-1], "tok-7f3a91c2", "3a91c2e5b8")
    return [form for form in forms if form in text]


@pytest.mark.parametrize(
    "how",
    sampled(["warm", "forked", "cold", "none", "landlock", "ordinary"], "warm"),
)
async def test_code_and_its_children_read_them_in_every_kernel(how: str) -> None:
    more = {
        "forked": ("--warm", "0"),
        "cold": ("--no-template",),
        "none": ("--sandbox", "none"),
        "landlock": ("--sandbox", "landlock"),
    }
    flags = (*FLAGS, *more.get(how, ()))
    server = command(*flags, env=OWN)
    if how == "ordinary":
        words = as_ordinary_user([sys.executable, "-m", "kernel_mcp", *flags], OWN)
        server = StdioServerParameters(command=words[0], args=words[1:], env={}, cwd="/")
    async with Client(server) as client:
        notebook = Agent(client)
        for session in ("", (await notebook.call("create_session")).data["session"]):
            answer = await notebook.run(READ, session=session)
            assert answer.text.split() == ["True", "1234", str(len(QUOTED)), "''", "True"]
            await notebook.call("reset", session=session)
            assert "True" in (await notebook.run(READ, session=session)).text


@pytest.fixture
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="env-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


LEAKS = {
    "stdout": "print(os.environ['MODEL_TOKEN'])",
    "stderr": "print(os.environ['QUOTED'], file=sys.stderr)",
    "result": "os.environ['MODEL_TOKEN'], os.environ['QUOTED']",
    "all": "dict(os.environ)",
    "display": "from IPython.display import *; display(HTML('<b>' + os.environ['MODEL_TOKEN']))",
    "json": "JSON({os.environ['MODEL_TOKEN']: [os.environ['QUOTED']]})",
    "traceback": "raise ValueError(os.environ['MODEL_TOKEN'])",
    "child": "subprocess.run('echo $MODEL_TOKEN; env', shell=True)",
    "shell": "!echo $MODEL_TOKEN",
    "split": (
        "import time\nfor c in os.environ['MODEL_TOKEN'] + os.environ['QUOTED']:\n"
        "    print(c, end='', flush=True); time.sleep(0.06)"
    ),
    "streams": (
        "t = os.environ['MODEL_TOKEN']\nos.write(1, t[:5].encode()); time.sleep(0.2)\n"
        "os.write(1, t[5:].encode())"
    ),
    "huge": "print('x' * 65_530 + os.environ['MODEL_TOKEN'] + 'x' * 100_000)",
    "progress": "print('\\r' + os.environ['MODEL_TOKEN'], end='')",
    "died": "print(os.environ['MODEL_TOKEN'], flush=True); os._exit(3)",
}


def own_files(state: Path) -> Iterator[Path]:
    """The files of a running server, but for what code wrote into workspaces."""
    for path in state.rglob("*"):
        if path.is_file() and path.relative_to(state).parts[1] != "w":
            yield path


async def test_no_output_of_any_kind_shows_a_value(tmp_path: Path, state: Path) -> None:
    log = tmp_path / "audit.jsonl"
    places = ("--audit-log", str(log), "--state-dir", str(state), "--log-level", "debug")
    server = command(*FLAGS, *places, env=OWN)
    with (tmp_path / "stderr").open("w") as stderr:
        async with Client(stdio_client(server, errlog=stderr)) as client:
            await look_everywhere(client, state)
    for path in (log, tmp_path / "stderr"):
        assert not values_in(path.read_text()), path
    assert json.loads(log.read_text().splitlines()[0])["variables"] == [
        *("MODEL_TOKEN", "QUOTED", "PIN", "EMPTY")
    ]
    assert "--env PIN: outputs show its value" in (tmp_path / "stderr").read_text()


async def look_everywhere(client: Client, state: Path) -> None:
    notebook = Agent(client)
    handle = (await notebook.run("import os, sys, subprocess, time")).cell["session"]
    for number, (kind, code) in enumerate(LEAKS.items(), 2):
        answer = await notebook.run(code)
        shown = answer.result.model_dump_json()
        assert not values_in(shown), (kind, shown)
        assert kind == "huge" or "masked]" in shown, (kind, shown)
        for address in (f"cells/{number}", f"cells/{number}.json", "notebook"):
            read = await client.read_resource(f"kernel://{handle}/{address}")
            assert not values_in(read.model_dump_json()), (kind, address)
    running = await notebook.call(
        "execute",
        code="import os, time\nt = os.environ['MODEL_TOKEN']\n"
        "print('a', t[:8], sep='', end='', flush=True); time.sleep(1); print(t[8:])",
        wait=0.4,
    )
    assert running.text.startswith("a\n") or running.text.startswith("a"), running.text
    assert not values_in(running.result.model_dump_json())
    ended = await notebook.call("wait")
    assert "masked]" in ended.text
    assert not values_in(ended.result.model_dump_json())
    code = (
        "import os\nlong = os.environ['MODEL_TOKEN'] * 9\nx = [os.environ['MODEL_TOKEN']]\n"
        "y = 'z' * 68 + os.environ['MODEL_TOKEN']\n"
        "open('env.txt', 'w').write('\\n'.join(os.environ.values()))"
    )
    await notebook.run(code)
    for tool in ("list_variables", "info", "list_sessions", "list_files"):
        answer = await notebook.call(tool)
        assert not values_in(answer.result.model_dump_json()), (tool, answer.text)
    assert (await notebook.call("info")).data["variables"] == [
        *("MODEL_TOKEN", "QUOTED", "PIN (too short to be masked)"),
        "EMPTY (too short to be masked)",
    ]
    for offset in (0, 1, 30):
        read_file = await notebook.call("read_file", path="env.txt", offset=offset)
        assert not values_in(read_file.result.model_dump_json())
    resource = await client.read_resource(f"kernel://{handle}/files/env.txt")
    assert not values_in(resource.model_dump_json())
    assert not values_in(client.instructions or "")
    assert "MODEL_TOKEN, QUOTED, PIN (too short to be masked), EMPTY" in (client.instructions or "")
    files = [*own_files(state)]
    assert files
    assert not [path for path in files if values_in(path.read_bytes().decode("latin-1"))]
    command_lines = [(path / "cmdline").read_text() for path in servers()]
    assert any("QUOTED=***" in line for line in command_lines)
    assert not [line for line in command_lines if values_in(line)]
    said: list[str | None] = []
    coloured = "t = os.environ['MODEL_TOKEN']\nprint(t[:5] + '\\x1b[31m' + t[5:])"
    answer = await notebook.run(coloured, on_progress=lambda *told: said.append(told[2]))
    assert [told for told in said if told and "masked]" in told]
    assert not values_in([said, answer.result.model_dump_json()])


COMMON = {
    "PLACE": "/workspace",
    "SERVER": "kernel-mcp",
    "WORD": "session",
    "KIND": "output_type",
    "STREAM": "stdout",
    "OTHER": "masked",
}


@pytest.mark.ways
async def test_values_that_are_common_words_leave_answers_whole() -> None:
    flags = [word for name in COMMON for word in ("--env", name)]
    async with Client(command(*flags, "--warm", "0", env=COMMON)) as client:
        notebook = Agent(client)
        answer = await notebook.run("import os\nprint(os.getcwd(), 'masked')")
        assert answer.text == "[PLACE masked] [OTHER masked]"
        handle = answer.cell["session"]
        listed = await notebook.call("list_sessions")
        assert json.loads(listed.text)["sessions"][0]["session"] == handle
        record = await client.read_resource(f"kernel://{handle}/cells/1.json")
        assert json.loads(record.contents[0].text)["stdout"] == f"{answer.text}\n"  # type: ignore[union-attr]
        book = await client.read_resource(f"kernel://{handle}/notebook")
        cell = json.loads(book.contents[0].text)["cells"][0]  # type: ignore[union-attr]
        assert cell["outputs"][0]["output_type"] == "stream"
        assert cell["outputs"][0]["name"] == "stdout"
        assert "'[OTHER masked]'" in cell["source"]
        written = await notebook.call("export_notebook")
        assert written.text.startswith("[kernel-mcp] ")


@pytest.mark.ways
async def test_code_that_knows_a_value_keeps_the_server_no_busier_than_others() -> None:
    value = "-----BEGIN " + "q8a7" * 300 + "-----"
    chain = "import os, sys\nfor _ in range(300): sys.stdout.write(os.environ['KEY'][:-5] * 50)"
    async with Client(command("--env", "KEY", "--warm", "0", env={"KEY": value})) as client:
        notebook = Agent(client)
        await notebook.run("1")
        before = server_seconds()
        answer = await notebook.run(chain)
        assert answer.status == "ok"
        assert server_seconds() - before < 5  # quadratic once, while all sessions waited


def servers() -> Iterator[Path]:
    """The folders in /proc of this process's children; others may end meanwhile."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if parent_of(int(path.name)) == os.getpid():
                yield path


def server_seconds() -> float:
    """Processor seconds of this process's servers."""
    times = [(path / "stat").read_text().rpartition(")")[2].split() for path in servers()]
    return sum(int(each[11]) + int(each[12]) for each in times) / os.sysconf("SC_CLK_TCK")
