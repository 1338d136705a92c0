"""An operator looks at sessions of a real server over HTTP, and stops one that runs away."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel_mcp.cli import EXIT_USAGE
from tests.integration.httpclient import http_agent, until
from tests.integration.principals import add, revoke
from tests.integration.test_http_operations import Operated, operating

pytestmark = [pytest.mark.anyio]

PERSIST = ("--persist", "1G,1d")
RUNAWAY = "x = 41\nwhile True: pass"


def sessions(operated: Operated, *words: str) -> subprocess.CompletedProcess[str]:
    """The answer of `kernel-mcp sessions` about the servers here."""
    argv = [sys.executable, "-m", "kernel_mcp", "sessions", *words, "--state-dir"]
    return subprocess.run(
        [*argv, str(operated.state), *PERSIST], capture_output=True, text=True, check=False
    )


@contextmanager
def of_two(folder: Path, *flags: str) -> Iterator[tuple[Operated, str, str]]:
    """A server whose state outlives it, with the tokens of ada and bob."""
    tokens = folder / "tokens"
    ada, bob = add(tokens, "ada"), add(tokens, "bob")
    with operating(*PERSIST, "--tokens", str(tokens), *flags, token=ada) as operated:
        yield operated, ada, bob


async def test_the_operator_finds_what_runs_away_stops_it_and_loses_nothing(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    tokens = tmp_path / "tokens"
    ada = add(tokens, "ada", "--door", f"mount:{data}")
    flags = ("--tokens", str(tokens), "--mount", str(data))
    with operating(*PERSIST, *flags, token=ada) as operated:
        await operated.ready()
        async with http_agent(operated.server) as notebook:
            await notebook.run("kept = 1")
            await notebook.call("execute", code=RUNAWAY, wait=0)
            await until(lambda: "cell 2 has run for" in sessions(operated, "list").stdout)
            listed = sessions(operated, "list").stdout
            (row,) = [line for line in listed.splitlines() if "  ada  " in line]
            assert re.search(r"busy, \d+ MiB, 2 cells, .*, process \d+ used \d+\.\d s, ", row), row
            assert f"mount {data}:ro" in row
            assert "last client " in row
            assert listed.count("default") + listed.count("variables") <= 2, listed
            shown = sessions(operated, "top").stdout
            assert re.search(r"uses \d+%, cell 2 has run", shown), shown
            stopped = sessions(operated, "stop", "--principal", "ada", "--older-than", "1ms")
            assert stopped.returncode == 0, stopped
            assert re.search(r"^s-[\w-]{12}  -  ada  stopped and saved$", stopped.stdout, re.M)
            assert "  ada  " not in sessions(operated, "list").stdout
            answer = await notebook.run("kept, x")
            assert answer.text.startswith("(1, 41)")
            assert "stopped by the operator of the server, and saved" in answer.text
        assert [line["event"] for line in operated.trail].count("stop") == 1


async def test_what_cannot_be_saved_is_said_and_its_owner_told(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    with operating("--tokens", str(tokens), token=add(tokens, "ada")) as operated:
        await operated.ready()
        async with http_agent(operated.server) as notebook:
            await notebook.run("x = 41")
            stopped = sessions(operated, "stop", "--principal", "ada")
            assert (stopped.returncode, "not saved: only named" in stopped.stdout) == (1, True)
            answer = await notebook.run("x")
            assert "stopped by the operator of the server: its variables and files are gone" in (
                answer.text
            )


async def test_only_what_is_named_is_stopped_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    with of_two(tmp_path) as (operated, ada, bob):
        await operated.ready()
        async with (
            http_agent(operated.server, token=ada) as one,
            http_agent(operated.server, token=bob) as two,
        ):
            await one.call("create_session", name="mine")
            await two.call("create_session", name="mine")
            assert sessions(operated, "stop", "other").returncode == 1
            both = sessions(operated, "stop", "mine")
            assert both.returncode == EXIT_USAGE
            assert "name one session by its handle" in both.stderr
            assert sessions(operated, "stop", "--older-than", "1d").returncode == 1
            assert sessions(operated, "stop", "mine", "--principal", "bob").returncode == 0
            left = sessions(operated, "list").stdout
    assert ("  mine  ada  " in left, "  mine  bob  " in left) == (True, False)


async def test_the_end_of_a_principals_last_token_ends_its_cells_and_saves_them(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens"
    with of_two(tmp_path) as (operated, ada, bob):
        await operated.ready()
        async with (
            http_agent(operated.server, token=ada) as one,
            http_agent(operated.server, token=bob) as two,
        ):
            await one.call("execute", code=RUNAWAY, wait=0)
            await two.run("y = 2")
            revoke(tokens, "ada")
            await until(lambda: "  ada  " not in sessions(operated, "list").stdout)
            assert (await two.run("y")).text == "2"
        again = add(tokens, "ada")
        async with http_agent(operated.server, token=again) as one:
            answer = await one.run("x")
            assert answer.text.startswith("41")
        (stop,) = [line for line in operated.trail if line["event"] == "stop"]
    assert (stop["who"], stop["unsaved"]) == ("ada", "")
