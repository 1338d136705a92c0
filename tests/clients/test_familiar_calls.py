"""The examples of other Python servers' tools, called on this one.

The flags are those of the README's client line.
"""

from __future__ import annotations

import pytest

from tests.integration.agent import Agent, agent

pytestmark = [pytest.mark.anyio, pytest.mark.full]

FLAGS = ("--allow", "numpy,pandas,matplotlib", "--allow-install", "*", "--wait", "280")
STDLIB = (
    "collections",
    *("datetime", "itertools", "math", "queue", "random", "re", "stat", "statistics", "time"),
    "unicodedata",
)
PRIMES = "[n for n in range(2, 101) if all(n % d for d in range(2, int(n**0.5) + 1))]"
ROOTS = "import cmath\nd = cmath.sqrt(5**2 - 4 * 6)\n((-5 + d) / 2, (-5 - d) / 2)"
BLOCK = """
# /// script
# dependencies = ["pandas", "matplotlib"]
# ///

import pandas as pd
print(pd.DataFrame({'a': [1,2,3]}).describe())
"""


async def said(notebook: Agent, code: str, **options: object) -> str:
    answer = await notebook.run(code, **options)
    assert answer.status == "ok", answer.text
    return answer.text


async def test_snippets_run_and_keep_their_state() -> None:
    async with agent(*FLAGS) as notebook:
        assert await said(notebook, "import math\nmath.factorial(5)") == "120"
        assert "97" in await said(notebook, PRIMES)
        assert await said(notebook, ROOTS) == "((-2+0j), (-3+0j))"
        await said(notebook, f"import {', '.join(STDLIB)}")
        assert await said(notebook, "print('Hello, World!')", timeout=60) == "Hello, World!"
        assert await said(notebook, "import math; print(math.sqrt(16))") == "4.0"


async def test_packages_are_installed_listed_and_reset() -> None:
    async with agent(*FLAGS) as notebook:
        for packages in ("numpy", "pandas matplotlib seaborn", ["requests>=2.28.0"]):
            answer = await notebook.call("install", packages=packages)
            assert not answer.failed, answer.text
        there = (await notebook.call("list_packages")).data["packages"]
        assert {"numpy", "seaborn", "requests"} <= {each["name"] for each in there}
        await said(notebook, "import seaborn, requests")
        assert "fresh kernel" in (await notebook.call("reset", packages=True)).text
        there = (await notebook.call("list_packages")).data["packages"]
        assert "seaborn" not in {each["name"] for each in there}
        about = (await notebook.call("info")).data
        assert about["python"]
        assert about["sandbox"]


async def test_scripts_bring_their_packages_and_end_with_streams_and_exit_code() -> None:
    async with agent(*FLAGS) as notebook:
        script = "import requests; print(requests.__version__)"
        answer = await notebook.call("run_script", script=script, dependencies=["requests"])
        assert answer.cell["exit_code"] == 0, answer.text
        answer = await notebook.call("run_script", script=BLOCK, timeout=30)
        assert "mean   2.0" in answer.cell["stdout"]
        failing = "print('Hello, world!')\nx = 1 / 0"
        answer = await notebook.call("run_script", script=failing, timeout=10, memory="200M")
        assert (answer.cell["stdout"], answer.cell["exit_code"]) == ("Hello, world!\n", 1)
        assert answer.cell["stderr"].endswith("ZeroDivisionError: division by zero\n")
        assert answer.cell["phase"] == "run"
        answer = await notebook.call("run_script", script="while True: pass", cpu="1s")
        assert answer.status == "timeout"
        answer = await notebook.call("run_script", script="bytearray(10**9)", memory="200M")
        assert "MemoryError" in answer.cell["stderr"]


async def test_code_is_checked_without_running_it() -> None:
    async with agent(*FLAGS) as notebook:
        good = await notebook.call("check_syntax", code="print(1)")
        assert good.data["valid"]
        bad = (await notebook.call("check_syntax", code="x = 1\nprint(2")).data
        (found,) = bad["diagnostics"]
        assert (bad["valid"], found["line"], found["source_line"]) == (False, 2, "print(2")
        block = await notebook.call("check_syntax", code=BLOCK.replace('"]', ""))
        assert block.data["diagnostics"][0]["kind"] == "pep723"


async def test_a_sandbox_is_made_used_by_its_name_and_closed() -> None:
    async with agent(*FLAGS) as notebook:
        box = "sandbox"
        await notebook.call("create_session", name=box)
        await notebook.call("write_file", path="data/in.txt", content="1\n2", session=box)
        await notebook.call(
            "write_file", path="up.bin", content="AAEC", encoding="base64", session=box
        )
        listed = (await notebook.call("list_files", session=box)).data["entries"]
        assert {each["path"] for each in listed} == {"data", "up.bin"}
        assert await said(notebook, "print(open('data/in.txt').read())", session=box) == "1\n2"
        assert (await notebook.call("read_file", path="data/in.txt", session=box)).text == "1\n2"
        assert not (await notebook.call("install", packages=["cowsay"], session=box)).failed
        (state,) = (await notebook.call("list_sessions")).data["sessions"]
        assert (state["name"], state["state"]) == ("sandbox", "idle")
        assert not (await notebook.call("close_session", session=box)).failed
        once = await notebook.call("run_script", script="print('made, run and closed')")
        assert once.text == "made, run and closed"
        assert (await notebook.call("list_sessions")).data["sessions"] == []
