"""Variables of R outlive its kernel and the server, or are reported as lost."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from mcp.client import Client

from tests.integration.agent import Agent, command, lost
from tests.integration.lives import Place
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.ways]

DEFINED = """
x <- 1:5; df <- data.frame(a = 1:3); f <- function(n) n + x[1]
e <- new.env(); e$v <- 7; g <- e
con <- textConnection("a"); makeActiveBinding("act", function() 42, environment())
library(tools); set.seed(1); runif(1)
"""
BACK = """
print(x); print(df$a); print(f(1)); g$v <- 8; print(e$v)
print(c(exists("con"), exists("act"), "tools" %in% .packages())); runif(1)
"""


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@asynccontextmanager
async def server(state: Path, *flags: str, r: bool = True) -> AsyncIterator[Agent]:
    """A client of a server that keeps its sessions in `state`."""
    kernel = ("--kernel", kernel_flag("r")) if r else ()
    given = ("--state-dir", str(state), "--warm", "0", "--no-template", *kernel, *flags)
    kept = {"KERNEL_MCP_PERSIST": "1G,1d"}
    async with Client(command(*given, env=kept)) as client:
        yield Agent(client)


async def opened(notebook: Agent) -> Agent:
    """The same client, whose session `r` has begun."""
    answer = await notebook.call("create_session", name="r", language="r")
    assert not answer.failed, answer.text
    return notebook


def check(back: str) -> None:
    lines = [line.split(" ", 1)[1] for line in back.splitlines() if line.startswith("[1]")]
    assert lines[:5] == ["1 2 3 4 5", "1 2 3", "2", "8", "FALSE FALSE  TRUE"]
    assert lines[5].startswith("0.372")  # the generator of random numbers goes on


async def test_the_next_server_has_them_and_names_what_it_has_not(state: Path) -> None:
    async with server(state) as notebook:
        await (await opened(notebook)).run(DEFINED, session="r")
    async with server(state) as notebook:
        answer = await notebook.run(BACK, session="r")
        check(answer.text)
        assert "Continued from" in answer.text
        assert sorted(lost(answer)) == ["act", "con"]
        assert "tempdir() and what packages have in memory start anew" in answer.text
        assert "con (it is an open connection)" in answer.text
        script = await notebook.call("export_notebook", session="r", path="a.R", format="script")
        assert not script.failed, script.text
        about = await notebook.call("list_files", session="r")
        assert ".kernel-mcp" not in about.text


async def test_a_server_without_that_kernel_keeps_them_for_one_that_has_it(state: Path) -> None:
    async with server(state) as notebook:
        await (await opened(notebook)).run("x <- 41", session="r")
    async with server(state, r=False) as notebook:
        answer = await notebook.run("1", session="r")
        assert "it ran the kernel 'r', which --kernel does not name now" in answer.text
    async with server(state) as notebook:
        assert "42" in (await notebook.run("x + 1", session="r")).text


async def test_fresh_forgets_them(state: Path) -> None:
    async with server(state) as notebook:
        await (await opened(notebook)).run("x <- 41", session="r")
    async with server(state) as notebook:
        answer = await notebook.call("create_session", name="r", language="r", fresh=True)
        assert not answer.failed, answer.text
        assert "object 'x' not found" in (await notebook.run("x", session="r")).text


async def test_an_idle_session_is_hibernated_and_comes_back(state: Path) -> None:
    async with server(state, "--idle-timeout", "1s") as notebook:
        await (await opened(notebook)).run("x <- 41", session="r")
        while (await notebook.call("list_sessions")).data["sessions"][0]["state"] != "hibernated":
            await anyio.sleep(0.2)
        listed = await notebook.call("list_variables", session="r")
        assert [each["name"] for each in listed.data["variables"]] == ["x"]
        answer = await notebook.run("x + 1", session="r")
        assert "[1] 42" in answer.text
        assert "had been hibernated" in answer.text


async def test_one_that_would_lose_something_stays_awake(state: Path) -> None:
    async with server(state, "--idle-timeout", "1s", "--max-sessions", "2") as notebook:
        await (await opened(notebook)).run("con <- textConnection('a'); x <- 1", session="r")
        await notebook.run("1")
        for name in ("a", "b"):  # these need its room
            assert not (await notebook.call("create_session", name=name)).failed
        answer = await notebook.run("x", session="r")
        assert "[1] 1" in answer.text
        assert lost(answer) == ["con"]


async def test_what_does_not_fit_is_named(state: Path) -> None:
    async with server(state, "--persist", "20M,1d") as notebook:
        await (await opened(notebook)).run("big <- numeric(5e6); x <- 1", session="r")
    async with server(state, "--persist", "20M,1d") as notebook:
        answer = await notebook.run("x", session="r")
        assert "[1] 1" in answer.text
        assert lost(answer) == ["big"]


async def test_variables_that_were_not_saved_are_named_when_the_kernel_dies(state: Path) -> None:
    async with server(state, "--persist", "off") as notebook:
        await (await opened(notebook)).run("x <- 1; y <- 2\nz <- 3", session="r")
        await notebook.run("rm(y); w <- list(4); .hidden <- 1", session="r")
        died = await notebook.run("tools::pskill(Sys.getpid(), 9)", session="r")
        assert died.status == "killed"
        assert sorted(lost(died)) == ["w", "x", "z"]


async def test_a_killed_kernel_goes_back_to_its_last_save(state: Path) -> None:
    async with server(state) as notebook:
        await (await opened(notebook)).run("x <- 41", session="r")
        while not any(state.glob("kept/**/variables-*")):
            await anyio.sleep(0.2)
        died = await notebook.run("tools::pskill(Sys.getpid(), 9)", session="r")
        assert died.status == "killed"
        assert "[1] 42" in (await notebook.run("x + 1", session="r")).text


async def test_a_session_of_r_is_not_taken_for_one_of_python(state: Path) -> None:
    async with server(state) as notebook:
        await notebook.call("create_session", name="r")
        await notebook.run("x = 1", session="r")
    async with server(state) as notebook:
        answer = await notebook.call("create_session", name="r", language="r")
        told = await notebook.run("1", session="r")
        assert "it ran Python, and this session is to have R" in answer.text + told.text
    async with server(state) as notebook:
        assert (await notebook.run("x", session="r")).text.startswith("1")


async def test_what_is_nested_or_no_longer_installed_is_kept_or_named(state: Path) -> None:
    code = """
    chain <- function(n) { e <- NULL; for (i in seq_len(n)) e <- list2env(list(inner = e)); e }
    few <- chain(100); many <- chain(1000)
    most <- NULL; for (i in 1:60000) most <- list(most)
    deep <- few; while (!is.null(deep$inner)) deep <- deep$inner
    deep$inner <- textConnection("a")
    rm(deep)
    attach(list(one = 1), name = "package:own"); kept <- one
    """
    async with server(state) as notebook:
        assert (await (await opened(notebook)).run(code, session="r")).status == "ok"
    async with server(state) as notebook:
        answer = await notebook.run("kept; exists('few'); exists('many')", session="r")
        assert answer.text.startswith("[1] 1\n[1] FALSE\n[1] TRUE"), answer.text
        assert sorted(lost(answer)) == ["few", "most", "package:own"]
        assert "'package:own' (it cannot be attached now)" in answer.text


async def test_all_that_shares_what_cannot_be_saved_is_named(state: Path) -> None:
    code = """
    e <- new.env(); e$con <- textConnection("abc"); g <- e; h <- local(function() con, e)
    setattr <- structure(list(), kept = list(e)); fine <- new.env(); fine$again <- fine
    """
    async with server(state) as notebook:
        assert (await (await opened(notebook)).run(code, session="r")).status == "ok"
    async with server(state) as notebook:
        answer = await notebook.run("identical(fine$again, fine)", session="r")
        assert "[1] TRUE" in answer.text
        assert sorted(lost(answer)) == ["e", "g", "h", "setattr"]


async def test_classes_settings_and_promises_come_back(state: Path) -> None:
    code = """
    setClass("P", representation(x = "numeric")); p <- new("P", x = 3)
    setGeneric("area", function(o) standardGeneric("area"))
    setMethod("area", "P", function(o) o@x * 2)
    Account <- setRefClass("Account", fields = list(b = "numeric"),
      methods = list(add = function(v) b <<- b + v))
    a <- Account$new(b = 1); a$add(5)
    fixed <- 5; lockBinding("fixed", globalenv())
    delayedAssign("late", { cat("now\n"); 99 }); again <- late; delayedAssign("later", cat("LATER"))
    attach(list(column = 7), name = "frame"); options(digits = 3, own.option = list(1))
    Sys.setenv(MINE = "yes"); setwd("/tmp"); Sys.setlocale("LC_COLLATE", "C")
    """
    back = """
    cat(p@x, area(p), a$b, column, getOption("digits"), length(getOption("own.option")))
    cat("", Sys.getenv("MINE"), getwd(), Sys.getlocale("LC_COLLATE"), bindingIsLocked("fixed",
      globalenv()), late, "\n")
    a$add(1); cat(a$b, Account$new(b = 2)$b)
    """
    async with server(state) as notebook:
        assert (await (await opened(notebook)).run(code, session="r")).status == "ok"
    async with server(state) as notebook:
        answer = await notebook.run(back, session="r")
        assert answer.text.startswith("3 6 6 7 3 1 yes /tmp C TRUE 99 \n7 2"), answer.text
        assert not lost(answer)
        assert "LATER" in (await notebook.run("later", session="r")).text


async def test_names_that_are_too_long_are_left_out(state: Path) -> None:
    code = "assign(strrep('n', 300), 5); MOST <- 'MOST'; FILE <- emptyenv(); `\\n\"é🙂` <- 1"
    async with server(state) as notebook:
        assert (await (await opened(notebook)).run(code, session="r")).status == "ok"
    async with server(state) as notebook:
        answer = await notebook.run('cat(MOST, `\\n"é🙂`, environmentName(FILE))', session="r")
        assert answer.text.startswith("MOST 1 R_EmptyEnv"), answer.text
        assert lost(answer) == ["n" * 200]


async def test_data_that_many_share_count_once(state: Path) -> None:
    code = "e <- new.env(); e$x <- numeric(1e6); big <- numeric(3e6)\n"
    code += "for (i in 1:9) assign(paste0('f', i), local(function() x[1], e))"
    async with server(state, "--persist", "20M,1d") as notebook:
        assert (await (await opened(notebook)).run(code, session="r")).status == "ok"
    async with server(state, "--persist", "20M,1d") as notebook:
        answer = await notebook.run("f9()", session="r")
        assert answer.text.startswith("[1] 0"), answer.text
        assert lost(answer) == ["big"]


async def test_a_session_goes_on_in_its_language_when_the_server_is_killed(state: Path) -> None:
    place, flag = Place(state), ("--kernel", kernel_flag("r"))
    async with place.life(*flag) as first:
        await (await opened(first)).run("x <- 1", session="r")
        first.kill()
    async with place.life(*flag) as notebook:
        answer = await notebook.run("cat(R.version$language)", session="r")
        assert answer.text.startswith("R"), answer.text
        assert "Cell 1 ran after that was saved" in answer.text


async def test_a_save_that_a_full_workspace_has_no_room_for_kills_no_kernel(state: Path) -> None:
    code = "writeBin(raw(40e6), 'f'); big <- runif(4e6); file.create('.kernel-mcp-1-left')"
    async with server(state, "--disk", "50M") as notebook:
        await (await opened(notebook)).run(code, session="r")
        while not any(state.glob("kept/**/variables-*")):
            await anyio.sleep(0.2)
        assert (await notebook.run("length(big)", session="r")).text == "[1] 4000000"
    async with server(state, "--disk", "50M") as notebook:
        answer = await notebook.run("length(big); list.files(all.files = TRUE)", session="r")
        assert "[1] 4000000" in answer.text
        assert "kernel-mcp-1-left" not in answer.text
        assert not lost(answer)
