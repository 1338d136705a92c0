"""Sandboxes and tools of another distribution, installed beside the server and named by a flag."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mcp.client import Client

from tests.contracts import logging_sandbox
from tests.integration.agent import Agent, command

pytestmark = [pytest.mark.anyio]

ROOT = Path(__file__).parents[2]
OFFERED = """\
[kernel_mcp.sandboxes]
logging = tests.contracts.logging_sandbox:LoggingSandbox.detect
broken = tests.contracts.logging_sandbox:NoSuchThing
number = builtins:int
exits = sys:exit
open = kernel_mcp.sandbox.select:NoSandbox

[kernel_mcp.tools]
words = tests.contracts.word_tools:register
broken = tests.contracts.no_such_module:register
no_function = sys:maxsize
ends = ends_tools:register
exits = sys:exit
"""


@pytest.fixture
def beside(tmp_path: Path) -> dict[str, str]:
    """The environment of a server beside which that distribution is installed."""
    info = tmp_path / "site" / "words_and_logs-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words-and-logs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(OFFERED)
    (info.parent / "ends_tools.py").write_text("raise SystemExit(3)")
    return {
        "PYTHONPATH": os.pathsep.join([str(info.parent), str(ROOT)]),
        logging_sandbox.LOG: str(tmp_path / "log"),
    }


async def test_a_server_uses_them_where_flags_name_them(
    beside: dict[str, str], tmp_path: Path
) -> None:
    flags = ("--sandbox", "logging", "--tools", "core,files,words")
    async with Client(command(*flags, env=beside)) as client:
        notebook = Agent(client)
        assert (await client.list_tools()).tools[-2].name == "count_words"
        made = await notebook.call("write_file", path="a.txt", content="one two\nthree")
        counted = await notebook.call("count_words", path="a.txt")
        assert counted.data == {"session": made.data["session"], "path": "a.txt", "words": 3}
        assert "no file 'b.txt'" in (await notebook.call("count_words", path="b.txt")).text
        assert (await notebook.run("open('a.txt').read()")).text == "'one two\\nthree'"
        assert (await notebook.call("info")).data["sandbox"] == "logging"
    log = (tmp_path / "log").read_text().splitlines()
    assert any(line.endswith(" in workspace") for line in log), log


async def test_an_answer_of_such_a_tool_is_cut_to_max_output(beside: dict[str, str]) -> None:
    flags = ("--tools", "core,files,words", "--max-output", "1000")
    async with Client(command(*flags, env=beside)) as client:
        notebook = Agent(client)
        await notebook.call("write_file", path="a.txt", content="few words")
        assert (await notebook.call("list_words", path="a.txt")).data == {"words": ["few", "words"]}
        await notebook.call("write_file", path="a.txt", content="word " * 10_000)
        long = await notebook.call("list_words", path="a.txt")
    assert long.result.structured_content is None
    text, notice = (block.text for block in long.result.content if block.type == "text")
    assert len(text) <= 1000
    assert "characters left out" in text
    assert notice == (
        "[kernel-mcp] This answer was longer than 1,000 characters: its structured part is left out"
    )


async def test_a_server_goes_on_without_tools_that_fail(
    beside: dict[str, str], tmp_path: Path
) -> None:
    async with Client(command("--tools", "core,exits,words", env=beside)) as client:
        assert (await client.list_tools()).tools[-2].name == "count_words"
        assert (await Agent(client).run("6 * 7")).text == "42"


def test_nothing_is_used_that_no_flag_names(beside: dict[str, str]) -> None:
    told = started(beside, "--tools", "core,files")
    said = [line for line in told.stderr.splitlines() if "no cgroup limits" not in line]
    assert (told.returncode, said) == (0, [])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--sandbox", "broken"), "'broken' of words-and-logs cannot be loaded"),
        (("--tools", "core,broken"), "'broken' of words-and-logs cannot be loaded"),
        (("--sandbox", "number"), "the sandbox 'number' is of int, not a sandbox"),
        (("--sandbox", "exits"), "'exits' of words-and-logs fails: SystemExit"),
        (("--sandbox", "open"), "the sandbox 'open' enforces nothing"),
        (("--tools", "core,no_function"), "it is int, not a function or class"),
        (("--tools", "core,ends"), "'ends' of words-and-logs cannot be loaded"),
        (("--tools", "core,wrods"), "--tools core,wrods: expected core, packages, files"),
        (("--sandbox", "loging"), "--sandbox loging: expected auto, bwrap, landlock"),
        (("--sandbox", "logging,bwrap"), "logging stands alone"),
    ],
)
def test_one_that_cannot_be_used_ends_the_start_with_a_sentence(
    beside: dict[str, str], flags: tuple[str, ...], why: str
) -> None:
    told = started(beside, *flags)
    assert told.returncode != 0
    assert why in told.stderr
    assert "Traceback" not in told.stderr


def started(env: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """A server whose input has ended."""
    return subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "--warm", "0", "--no-template", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        check=False,
    )
