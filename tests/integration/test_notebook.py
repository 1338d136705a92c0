"""The main job through a real client: a notebook that keeps its state."""

from __future__ import annotations

import anyio
import pytest

from tests.integration.agent import ANALYSIS, ERAS
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]


@pytest.mark.parametrize("era", sampled(ERAS, "legacy"))
async def test_variables_stay_for_the_next_call(era: str, servers: Servers) -> None:
    async with servers.agent(era=era) as notebook:
        await notebook.run("total = 40")
        answer = await notebook.run("total + 2")
        assert answer.text == "42"
        assert answer.status == "ok"
        assert answer.cell["state_kept"] is True
        assert answer.cell["cell"] == 2


@pytest.mark.ways
async def test_state_survives_two_hundred_calls(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("n = 0")
        for _ in range(200):
            await notebook.run("n += 1")
        assert (await notebook.run("n")).text == "200"


async def test_output_keeps_the_order_of_stdout_stderr_and_result(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run(
            "print('one')\nimport warnings\nwarnings.warn('two')\nprint('three')\n'four'"
        )
        words = [w for w in ("one", "two", "three", "four") if w in answer.text]
        assert sorted(words, key=answer.text.index) == ["one", "two", "three", "four"]


async def test_an_exception_is_a_result_with_a_short_traceback(servers: Servers) -> None:
    async with servers.agent() as notebook:
        answer = await notebook.run("def f(x):\n    return 1 / x\nf(0)")
        assert answer.failed
        assert answer.status == "error"
        assert "ZeroDivisionError: division by zero" in answer.text
        assert "return 1 / x" in answer.text
        assert "\x1b" not in answer.text


async def test_a_picture_comes_back_as_an_image(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run(
            "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2])\nplt.show()"
        )
        assert [image.mime_type for image in answer.images] == ["image/png"]
        assert "image/png" in answer.cell["outputs"]


async def test_a_refused_import_names_the_flag_and_runs_nothing(servers: Servers) -> None:
    async with servers.agent("--profile", "guarded") as notebook:
        answer = await notebook.run("ran = True\nimport os")
        assert answer.status == "error"
        assert "--allow os" in answer.text
        assert "NameError" in (await notebook.run("ran")).text


async def test_an_allowed_package_imports_what_it_needs_itself(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answer = await notebook.run("import numpy as np\nint(np.arange(4).sum())")
        assert answer.text == "6"


@pytest.mark.ways
async def test_c_code_imports_what_it_needs_when_a_cell_calls_it(servers: Servers) -> None:
    async with servers.agent("--profile", "guarded", "--allow", "pandas,matplotlib") as notebook:
        code = "import pandas as pd\nv = pd.DataFrame({'a': [1, 2]})['a'].values\n"
        answer = await notebook.run(code + "int(v.sum()), str(v), v.dtype.name", wait=300)
        assert answer.text == "(3, '[1 2]', 'int64')"
        for refused in ("exec('import os')", "eval('__import__(\"os\")')"):
            assert "import of 'os' is not allowed" in (await notebook.run(refused)).text


async def test_two_sessions_do_not_see_each_other(servers: Servers) -> None:
    async with servers.agent() as notebook:
        first = (await notebook.call("create_session")).data["session"]
        second = (await notebook.call("create_session")).data["session"]
        await notebook.run("secret = 1; open('mine.txt', 'w').write('x')", session=first)
        answer = await notebook.run("secret", session=second)
        assert "NameError" in answer.text
        listing = await notebook.call("list_files", session=second)
        assert listing.data["entries"] == []


async def test_sessions_run_side_by_side(servers: Servers) -> None:
    async with servers.agent() as notebook:
        first = (await notebook.call("create_session")).data["session"]
        second = (await notebook.call("create_session")).data["session"]
        await notebook.run("import threading", session=first)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: notebook.run("threading.Event().wait(30)", session=first))
            with anyio.fail_after(60):
                assert (await notebook.run("1", session=second)).text == "1"
            await notebook.call("interrupt", session=first)


async def test_check_syntax_finds_errors_without_running(servers: Servers) -> None:
    async with servers.agent() as notebook:
        report = (await notebook.call("check_syntax", code="x = (1,\nimport os")).data
        assert report["valid"] is False
        assert report["diagnostics"][0]["line"] >= 1
        await notebook.run("1")
        code = "import os, IPython\nimport seaborn"
        report = (await notebook.call("check_syntax", code=code)).data
        assert {item["name"]: item["allowed"] for item in report["imports"]} == {
            "os": True,
            "IPython": True,
            "seaborn": False,
        }
        assert "Start the server with --allow seaborn to have it" in report["summary"]


async def test_info_tells_what_is_in_force(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS, "--memory", "1G") as notebook:
        info = (await notebook.call("info")).data
        assert info["sandbox"] == "bwrap"
        assert info["limits"]["memory_mb"] == 1024
        assert info["allowed_imports"] == ["*"]
        assert info["policy"].startswith("default: the whole standard library")
        assert "the boundary is the sandbox (bwrap)" in info["policy"]
        assert any(package.startswith("numpy==") for package in info["packages"])


async def test_reset_gives_a_fresh_kernel_and_keeps_files(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("x = 1; open('kept.txt', 'w').write('kept')")
        await notebook.call("reset")
        assert "NameError" in (await notebook.run("x")).text
        assert (await notebook.call("read_file", path="kept.txt")).text == "kept"
        await notebook.call("reset", files=True)
        assert (await notebook.call("list_files")).data["entries"] == []


async def test_files_go_in_and_out(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.call("write_file", path="data/in.csv", content="a,b\n1,2\n")
        answer = await notebook.run("open('data/in.csv').read()")
        assert "1,2" in answer.text
        await notebook.run("open('out.txt', 'w').write('from the kernel')")
        assert (await notebook.call("read_file", path="out.txt")).text == "from the kernel"


async def test_list_variables_describes_what_is_there(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await notebook.run("numbers = [1, 2, 3]; name = 'x'")
        found = {
            item["name"]: item for item in (await notebook.call("list_variables")).data["variables"]
        }
        assert found["numbers"]["type"] == "list"
        assert found["numbers"]["length"] == 3
        assert "In" not in found
