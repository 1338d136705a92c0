"""One-shot scripts, and sessions with an environment of their own."""

from __future__ import annotations

import anyio
import pytest

from tests.integration.ordinary_scripts import SCRIPTS
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

PANDAS = """\
# /// script
# dependencies = ["pandas", "matplotlib"]
# ///

import pandas as pd
print(pd.DataFrame({'a': [1,2,3]}).describe())
"""
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.savefig('plot.png')\nplt.show()"


async def test_a_script_with_metadata_runs_unchanged_and_at_once_the_second_time(
    servers: Servers,
) -> None:
    async with servers.agent("--allow-install", "pandas,matplotlib") as notebook:
        first = await notebook.call("run_script", script=PANDAS)
        assert "count  3.0" in first.text
        assert first.status == "ok"
        steps = list[str | None]()
        again = await notebook.call(
            "run_script", script=PANDAS, on_progress=lambda _value, _total, text: steps.append(text)
        )
        assert again.text == first.text
        assert not any("Building" in (step or "") for step in steps)
        plot = await notebook.call("run_script", script=PLOT, dependencies=["matplotlib", "pandas"])
        assert [image.mime_type for image in plot.images] == ["image/png"]
        assert "plot.png" in plot.text
        assert (await notebook.call("list_sessions")).data["sessions"] == []


async def test_scripts_end_as_cells_do_and_leave_no_session(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.call("run_script", script="x = 1\nx / 0")
        assert answer.status == "error"
        assert "ZeroDivisionError" in answer.text
        answer = await notebook.call("run_script", script="while True: pass", timeout=0.5)
        assert answer.status == "timeout"
        assert "Variables are kept" not in answer.text
        answer = await notebook.call("run_script", script="import sklearn")
        assert "Start the server with --allow scikit-learn to have it" in answer.text
        answer = await notebook.call("run_script", script="print('x' * 100_000)")
        assert answer.cell["omitted"] > 0
        assert "can be read for 10 minutes" in answer.text
        (link,) = answer.links
        whole = (await notebook.client.read_resource(link.uri)).contents[0]
        assert whole.text == "x" * 100_000 + "\n"  # type: ignore[union-attr]
        page = await notebook.call("read_file", path=link.uri)
        assert "xxx" in page.text
        assert (await notebook.call("list_sessions")).data["sessions"] == []


async def test_a_script_that_cannot_be_understood_is_refused_with_line_and_reason(
    servers: Servers,
) -> None:
    async with servers.agent() as notebook:
        text = await notebook.refused(
            "run_script", script="# /// script\n# dependencies = [pandas]\n# ///\nprint(1)"
        )
        assert "line 2 of the script" in text
        assert "TOML" in text
        await notebook.refused("run_script", script="")
        await notebook.refused("run_script", script="print(1)", timeout=-1)
        text = await notebook.refused("run_script", script="print(1)", python="3.9")
        assert "3.10 to 3.15" in text


@pytest.mark.ways
async def test_requires_python_chooses_the_interpreter(servers: Servers) -> None:
    block = "# /// script\n# requires-python = '{}'\n# dependencies = ['tabulate']\n# ///\n"
    code = "import sys\nprint('%d.%d' % sys.version_info[:2])"
    async with servers.agent("--allow", "sys", "--allow-install", "tabulate") as notebook:
        answer = await notebook.call("run_script", script=block.format("==3.13.*") + code)
        if "no Python 3.13" in answer.text:
            pytest.skip("Python 3.13 is not installed here")
        assert answer.text == "3.13"
        text = await notebook.refused(
            "run_script", script=block.format(">=3.12") + code, python="3.11"
        )
        assert "requires-python" in text


@pytest.mark.parametrize("python", sampled(["3.10", "3.11", "3.12", "3.13"], "3.13"))
async def test_a_session_has_the_python_and_the_packages_it_asks_for(
    python: str, servers: Servers
) -> None:
    async with servers.agent("--allow", "sys", "--allow-install", "tabulate,toolz") as notebook:
        created = await notebook.call("create_session", packages=["tabulate"], python=python)
        if created.failed and "there is no Python" in created.text:
            pytest.skip(f"Python {python} is not installed here")
        session = created.data["session"]
        code = "import sys, tabulate\nprint('%d.%d' % sys.version_info[:2])"
        assert (await notebook.run(code, session=session)).text == python
        answer = await notebook.call("install", packages=["toolz"], session=session)
        assert not answer.failed, answer.text
        code = "import toolz\nlist(toolz.unique([1, 1, 2]))"
        assert (await notebook.run(code, session=session)).text == "[1, 2]"


@pytest.mark.ways
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--allow-install", "tabulate"), "sessions may fetch none"),
        (("--allow-install", "*", "--offline"), "none could be fetched"),
    ],
)
async def test_a_python_that_is_not_there_is_told_with_those_that_are(
    flags: tuple[str, ...], why: str, servers: Servers
) -> None:
    async with servers.agent(*flags) as notebook:
        answer = await notebook.call("create_session", python="3.14")
        if not answer.failed:
            pytest.skip("Python 3.14 is installed here")
        assert why in answer.text
        assert "Installed: 3." in answer.text
        assert (await notebook.call("list_sessions")).data["sessions"] == []
        if "--offline" in flags:
            return  # each look for a Python that is missing takes seconds
        code = '# /// script\n# requires-python = ">=3.14"\n# ///\n'
        for text, python in ((code, ""), ("1", "3.14")):
            report = (await notebook.call("check_syntax", code=text, python=python)).data
            assert not report["valid"]
            assert "no Python 3." in report["summary"]


async def test_check_syntax_validates_metadata_and_names(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("known = 1")
        code = "# /// script\n# dependencies = 5\n# ///\nprint(known, unknown)"
        report = (await notebook.call("check_syntax", code=code)).data
        assert report["valid"] is False
        found = {(item["kind"], item["line"], item["severity"]) for item in report["diagnostics"]}
        assert found == {("pep723", 2, "error"), ("name", 4, "warning")}
        assert "'unknown'" in report["summary"]
        report = (await notebook.call("check_syntax", code=PANDAS)).data
        assert {item["name"]: item["allowed"] for item in report["imports"]} == {"pandas": False}


@pytest.mark.parametrize("start", sampled(["cold", "forked"], "forked"))
async def test_ordinary_scripts_run_as_with_python(start: str, servers: Servers) -> None:
    flags = ("--warm", "1") if start == "forked" else ("--warm", "0", "--no-template")
    async with servers.agent("--allow", "*", *flags) as notebook:
        for name, (script, status, text) in SCRIPTS.items():
            answer = await notebook.call("run_script", script=script)
            assert answer.status == status, (name, answer.text)
            assert text in answer.text, (name, answer.text)
            assert "the script wrote" not in answer.text, (name, answer.text)


@pytest.mark.ways
async def test_a_script_that_waits_for_its_threads_can_be_stopped(servers: Servers) -> None:
    script = "import threading\nthreading.Thread(target=threading.Event().wait).start()\nprint(1)"
    async with servers.agent("--allow", "threading") as notebook:
        answer = await notebook.call("run_script", script=script, timeout=1)
        assert answer.status == "timeout", answer.text


@pytest.mark.ways
async def test_cells_see_no_command_line_of_the_server(servers: Servers) -> None:
    async with servers.agent("--allow", "sys", "--warm", "1") as notebook:
        assert (await notebook.run("import sys\nsys.argv")).text == "['']"
        await notebook.call("reset")
        assert (await notebook.run("import sys\nsys.argv")).text == "['']"


async def test_a_script_that_starts_makes_no_room_for_another(servers: Servers) -> None:
    async with servers.agent("--max-sessions", "2", "--warm", "0") as notebook:
        told = dict[int, str]()

        async def run(number: int) -> None:
            code = f"import time\ntime.sleep(1)\nprint({number})"
            told[number] = (await notebook.call("run_script", script=code)).text

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(run, number)
        others = [text for number, text in told.items() if text != str(number)]
        assert len(others) < len(told)
        assert all("--max-sessions" in text for text in others), others
