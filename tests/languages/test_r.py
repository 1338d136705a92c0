"""Sessions of R: answers as its users read them, and the tools that ask its kernel."""

from __future__ import annotations

import base64
import io
import subprocess
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from tests.integration.agent import Agent, notices
from tests.integration.servers import Servers
from tests.languages.kernels import kernel_flag

pytestmark = [pytest.mark.anyio, pytest.mark.ways]


@pytest.fixture(scope="module")
async def notebook(servers: Servers) -> AsyncIterator[Agent]:
    """A client whose session `r` runs R."""
    async with servers.agent("--kernel", kernel_flag("r")) as notebook:
        opened = await notebook.call("create_session", name="r", language="r")
        assert not opened.failed, opened.text
        yield notebook


async def test_help_is_shown_as_text_after_what_was_printed(notebook: Agent) -> None:
    answer = await notebook.run("cat('first\\n'); ?mean", session="r")
    assert answer.text.startswith("first\n")
    assert "Arithmetic Mean" in answer.text
    assert "\x08" not in answer.text
    answer = await notebook.run("print(help('sum'))", session="r")
    assert "Sum of Vector Elements" in answer.text


async def test_a_value_is_its_text_alone(notebook: Agent) -> None:
    for code, text in (
        ("1 + 1", "[1] 2"),
        ("head(data.frame(a = 1:2, b = c('x', 'é')))", "  a b\n1 1 x\n2 2 é"),
        ("factor(c('a', 'b'))", "[1] a b\nLevels: a b"),
        ("as.Date('2024-02-29')", '[1] "2024-02-29"'),
        ("f <- function(x) x; f", "function(x) x"),
    ):
        answer = await notebook.run(code, session="r")
        assert (answer.text, answer.links) == (text, [])


async def test_an_error_is_told_once(notebook: Agent) -> None:
    answer = await notebook.run("f <- function(x) stop('no ', x); f(3)", session="r")
    assert answer.text == (
        'Error in f(3): no 3\nTraceback:\n1. f(3)\n2. stop("no ", x)   # at line 1 of file <text>'
    )
    plot = "library(ggplot2); ggplot(mtcars, aes(wt, nosuch)) + geom_point()"
    answer = await notebook.run(plot, session="r")
    assert answer.status == "error"
    assert answer.text.count("object 'nosuch' not found") == 1
    assert "tryCatch" not in answer.text
    answer = await notebook.run("1 +", session="r")
    assert answer.text.count("unexpected end of input") == 1
    assert "Traceback" not in answer.text


async def test_quit_ends_nothing_and_says_so(notebook: Agent) -> None:
    answer = await notebook.run("kept <- 5; quit()", session="r")
    assert "close_session" in "".join(notices(answer))
    assert (await notebook.run("kept", session="r")).text == "[1] 5"


async def test_syntax_is_checked_by_r_itself_and_nothing_runs(notebook: Agent) -> None:
    async def check(code: str) -> dict[str, Any]:
        return (await notebook.call("check_syntax", session="r", code=code)).data

    good = await check("ran <- TRUE\nx %>% f(y = 1) # \u00e9\n`odd name` <- 'a\\nb'")
    assert (good["valid"], good["diagnostics"]) == (True, [])
    assert (await notebook.run("exists('ran')", session="r")).text == "[1] FALSE"
    (found,) = (await check("x <- 1\ny <- c('\u00e9', ))"))["diagnostics"]
    assert (found["line"], found["column"]) == (2, 14)
    assert found["message"] == "unexpected ')'"
    assert found["source_line"] == "y <- c('\u00e9', ))"
    (found,) = (await check("f <- function(x) {"))["diagnostics"]
    assert (found["line"], found["message"]) == (1, "unexpected end of input")
    assert (await check("'\\d'"))["valid"] is False
    assert (await check("x <- 1 + 1\n" * 50_000))["valid"]


async def test_nobody_can_be_asked_and_the_cell_goes_on(notebook: Agent) -> None:
    for code in ("x <- readline('name? '); nchar(x)", "nchar(readLines('stdin')); nchar('')"):
        answer = await notebook.run(code, session="r", timeout=20)
        said = [line for line in answer.text.splitlines() if not line.startswith("[kernel-mcp]")]
        assert (answer.status, said[-1]) == ("ok", "[1] 0")
    answer = await notebook.run("readline()", session="r", timeout=20)
    assert "had nobody to ask" in answer.text
    answer = await notebook.run("browser(); for (i in 1:2) i; 3", session="r", timeout=20)
    assert "no browser" in answer.text
    assert "debug" not in answer.text
    assert (await notebook.run("menu('a')", session="r", timeout=20)).status == "error"


@pytest.mark.parametrize("code", ["f(1)", "tryCatch(f(1), finally = cat(''))", "lapply(1, f)"])
async def test_recursion_without_end_is_an_error_that_keeps_variables(
    notebook: Agent, code: str
) -> None:
    answer = await notebook.run(f"kept <- 1; f <- function(n) f(n + 1)\n{code}\n2", session="r")
    assert answer.status == "error"
    assert answer.text.count("Error: C stack usage") == 1
    assert "[1] 2" not in answer.text
    answer = await notebook.run("try(f(1), silent = TRUE); kept", session="r")
    assert (answer.status, answer.text) == ("ok", "[1] 1")
    code = "tryCatch(f(1), error = function(e) 'caught')"
    assert (await notebook.run(code, session="r")).text == '[1] "caught"'


async def test_what_an_interrupted_cell_has_printed_is_shown(notebook: Agent) -> None:
    code = "kept <- 7; cat('before\\n'); for (i in 1:9999) { cat(i, ''); Sys.sleep(0.01) }"
    answer = await notebook.run(code, session="r", timeout=1)
    assert answer.status == "timeout"
    assert answer.text.startswith("before\n1 2 3 ")
    assert (await notebook.run("kept", session="r")).text == "[1] 7"


async def test_much_output_is_bounded_and_keeps_variables(notebook: Agent) -> None:
    await notebook.run("kept <- 8", session="r")
    for code in (
        "for (i in 1:10000) cat(i, '\\n')",
        "cat(strrep('123456789\\n', 7e5))",
        "cat(strrep('é', 2e7))",
        "strrep('x', 2e7)",
    ):
        answer = await notebook.run(code, session="r", timeout=60)
        assert answer.status == "ok"
        assert answer.cell["omitted"] > 0
        assert len(answer.text) < 40_000
    assert (await notebook.run("kept", session="r")).text == "[1] 8"


async def test_printed_bytes_that_are_no_text_are_shown_as_numbers(notebook: Agent) -> None:
    answer = await notebook.run("cat('a\\xff b\\n'); cat('no line end'); 1", session="r")
    assert answer.text == "a<ff> b\nno line end\n[1] 1"
    bar = "b <- txtProgressBar(0, 50, style = 3); for (i in 1:50) setTxtProgressBar(b, i); close(b)"
    answer = await notebook.run(f"cat('a\\rb\\n'); {bar}", session="r")
    assert (answer.text.splitlines()[0], answer.text.count("%")) == ("b", 1)


async def test_sinks_of_a_cell_end_with_it(notebook: Agent) -> None:
    code = "sink('out.txt'); print(1)\nsink()\nprint(2)"
    assert "[1] 2" in (await notebook.run(code, session="r")).text
    await notebook.run("closeAllConnections()", session="r")
    assert (await notebook.run("cat('still here')", session="r")).text == "still here"


async def test_variables_are_described_and_none_is_computed(notebook: Agent) -> None:
    await notebook.run(
        "rm(list = ls())\n"
        "x <- c(a = 1.5, b = 2); df <- data.frame(n = 1:3, s = letters[1:3])\n"
        "f <- function(y, z) y\n"
        "e <- new.env(); `a \"b\"\\n` <- 1L; `é` <- factor('u'); .hidden <- 1\n"
        "delayedAssign('later', { cat('forced'); 1 })\n"
        "makeActiveBinding('now', function() { cat('called'); 1 }, globalenv())\n"
        "huge <- as.character(1:2e6); c <- 3\n"
        "m <- matrix(0, 10, 20); s <- structure(list(), class = 'mine')\n"
        "dim.mine <- function(x) repeat {}; length.mine <- function(x) stop('no')\n"
        "list <- function(...) stop('mine'); options(OutDec = ',', warn = 2); 42",
        session="r",
    )
    answer = await notebook.call("list_variables", session="r")
    found = {each["name"]: each for each in answer.data["variables"]}
    assert "forced" not in answer.text
    assert "called" not in answer.text
    assert (found["later"]["type"], found["now"]["type"]) == ("promise", "active binding")
    assert (found["x"]["type"], found["x"]["length"], found["x"]["size"]) == ("numeric", 2, 352)
    assert (found["df"]["type"], found["df"]["shape"]) == ("data.frame", [3, 2])
    assert found["df"]["preview"].startswith("'data.frame': 3 obs. of 2 variables: ")
    assert (found["m"]["shape"], found["f"]["preview"]) == ([10, 20], "function (y, z)")
    assert found["huge"]["length"] == 2_000_000
    assert 'a "b"\\x0a' in found
    assert "é" in found
    assert found["s"]["type"] == "mine"
    assert ".hidden" not in found
    assert (await notebook.run(".Last.value", session="r")).text == "[1] 42"
    await notebook.run("options(OutDec = '.', warn = 0); rm(list = ls())", session="r")


async def test_variables_are_found_by_name_and_read_on(notebook: Agent) -> None:
    await notebook.run(
        "rm(list = ls()); for (i in 1:1203) assign(sprintf('v%04d', i), i)", session="r"
    )
    answer = await notebook.call("list_variables", session="r", match="v00?1", offset=1)
    assert [each["name"] for each in answer.data["variables"]] == [f"v00{n}1" for n in range(1, 10)]
    answer = await notebook.call("list_variables", session="r", match="v", offset=1200)
    assert [each["name"] for each in answer.data["variables"]] == ["v1201", "v1202", "v1203"]
    answer = await notebook.call("list_variables", session="r", offset=100)
    assert answer.data["variables"][0]["name"] == "v0100"  # after i
    assert len(answer.data["variables"]) + answer.data["omitted"] == 1104
    await notebook.run("rm(list = ls())", session="r")


async def test_output_of_programs_is_shown(notebook: Agent) -> None:
    answer = await notebook.run("system('echo hé; echo err >&2')\n2", session="r")
    assert answer.text == "hé\nerr\n[1] 2"
    answer = await notebook.run("system('seq 100000')", session="r")
    assert answer.text.startswith("1\n2\n")
    assert answer.text.endswith("\n100000")
    assert answer.cell["omitted"] > 0
    code = "system('(sleep 0.3; echo late) &'); Sys.sleep(0); 3"
    assert (await notebook.run(code, session="r")).text == "[1] 3"
    assert "late" in (await notebook.run("Sys.sleep(0.5)", session="r")).text


class Repository(SimpleHTTPRequestHandler):
    """A repository of R packages as CRAN has them."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as its base has it
        """Say nothing."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a repository whose only package, `little`, says hello."""
    folder = tmp_path_factory.mktemp("cran")
    contrib = folder / "src" / "contrib"
    contrib.mkdir(parents=True)
    description = (
        "Package: little\nVersion: 1.2.3\nTitle: Little\nLicense: MIT\nNeedsCompilation: no\n"
    )
    (contrib / "PACKAGES").write_text(description)
    with tarfile.open(contrib / "little_1.2.3.tar.gz", "w:gz") as archive:
        for name, text in (
            (
                "DESCRIPTION",
                f"{description}Description: Says hello.\nAuthor: A\nMaintainer: A <a@b.c>\n",
            ),
            ("NAMESPACE", "export(hello)\n"),
            ("R/hello.R", "hello <- function() 'hello from little'\n"),
        ):
            member = tarfile.TarInfo(f"little/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Repository, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_packages_are_installed_into_the_sessions_library_and_stay(
    servers: Servers, repository: str
) -> None:
    async with servers.agent("--kernel", kernel_flag("r"), "--network", repository) as notebook:
        await notebook.call("create_session", name="with", language="r")
        code = f"options(repos = 'http://{repository}'); install.packages('little')"
        answer = await notebook.run(code, session="with", timeout=300)
        assert (answer.status, answer.failed) == ("ok", False), answer.text
        answer = await notebook.run("library(little); hello()", session="with")
        assert answer.text == '[1] "hello from little"'
        listed = await notebook.call("list_packages", session="with", match="little")
        own = {each["name"]: each for each in listed.data["packages"]}["little"]
        assert (own["version"], own["source"]) == ("1.2.3", "installed")
        await notebook.call("reset", session="with")
        answer = await notebook.run("little::hello()", session="with")
        assert answer.text == '[1] "hello from little"'


async def test_without_network_an_installation_says_what_to_do(notebook: Agent) -> None:
    answer = await notebook.run("install.packages('little')", session="r", timeout=300)
    assert "--network" in answer.text
    answer = await notebook.run("library(little)", session="r")
    assert "--network" in answer.text
    text = await notebook.refused("install", session="r", packages=["six"])
    assert "install.packages" in text
    answer = await notebook.call("reset", session="r", packages=True)
    assert "remove.packages" in answer.text


async def test_interrupts_before_and_after_a_cell_end_nothing(notebook: Agent) -> None:
    await notebook.run("kept <- 9", session="r")
    pid = int((await notebook.run("cat(Sys.getpid())", session="r")).text)
    code = f"system('(for i in $(seq 300); do kill -INT {pid}; sleep 0.003; done) &')"
    await notebook.run(code, session="r")
    for _ in range(40):
        answer = await notebook.run("x <- 1", session="r")
        assert answer.status in ("ok", "error")
    while (await notebook.run("Sys.sleep(0.3)", session="r")).status != "ok":
        pass
    assert (await notebook.run("kept", session="r")).text == "[1] 9"


async def test_pictures_have_the_size_that_was_asked_for(notebook: Agent) -> None:
    code = (
        "options(repr.plot.width = 4, repr.plot.height = 3, repr.plot.res = 100)\n"
        "plot(1:3); lines(3:1); hist(c(1, 2, 2))\nlibrary(ggplot2)\n"
        "ggplot(mtcars, aes(wt, mpg)) + geom_point()"
    )
    answer = await notebook.run(code, session="r")
    assert answer.status == "ok"
    sizes = [Image.open(io.BytesIO(base64.b64decode(each.data))).size for each in answer.images]
    assert sizes == [(400, 300)] * 3


async def test_a_data_frame_is_text_for_the_model_and_a_table_in_notebooks(
    notebook: Agent,
) -> None:
    code = "df <- data.frame(n = 1:500, s = '<b>é</b>'); df; as.data.frame(matrix(0, 3, 300))"
    answer = await notebook.run(code, session="r")
    assert (answer.links, "⋮" in answer.text, "⋯" in answer.text) == ([], True, True)
    assert len(answer.text) < 15_000
    shown = await notebook.call("show", session="r")
    assert "<b>é</b>" in shown.text
    await notebook.call("export_notebook", session="r", path="a.ipynb")
    written = await notebook.run("cat(readLines('a.ipynb'), sep = '\\n')", session="r")
    assert "&lt;b&gt;" in written.text or written.cell["omitted"] > 0


async def test_elements_of_html_are_words_and_a_page_and_no_browser_is_started(
    notebook: Agent,
) -> None:
    answer = await notebook.run("htmltools::tags$p('some words')", session="r")
    assert answer.text == "some words"
    assert [link.mime_type for link in answer.links] == ["text/html"]
    answer = await notebook.run("browseURL('http://example.com')", session="r")
    assert answer.text == "[there is no web browser here]"


async def test_it_knows_its_system_and_its_time_zone_as_outside(notebook: Agent) -> None:
    told = await notebook.run("sessionInfo()$running; Sys.timezone()", session="r")
    outside = subprocess.run(
        ["Rscript", "-e", "sessionInfo()$running; Sys.timezone()"], capture_output=True, text=True
    )
    assert told.text == outside.stdout.strip()


async def test_a_fresh_kernel_has_no_variables_of_an_image(notebook: Agent) -> None:
    await notebook.run("mine <- 1; save.image()", session="r")
    await notebook.call("reset", session="r")
    assert (await notebook.run("exists('mine')", session="r")).text == "[1] FALSE"
    assert (await notebook.run("load('.RData'); mine", session="r")).text == "[1] 1"
