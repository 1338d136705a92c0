"""The attacks as cells of the default profile, which refuses none of them: the sandbox is alone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.units import MIB
from tests.escape.host import prepared
from tests.escape.inside import ATTACKS
from tests.integration.agent import Agent, agent
from tests.integration.servers import Servers
from tests.integration.test_fast_starts import ready
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

HERE = Path(__file__).parent
FLAGS = ("--memory", "256M", "--pids", "40", "--disk", "64M")
RUN = """
import os, subprocess, sys
task = open("task.json").read()
os.unlink("task.json")  # it holds the secret that attacks look for
program = [sys.executable, "-I", "-S", "-B", "tests/escape/inside.py"]
subprocess.run(program, input=task, text=True, stdout=open("told.json", "w"), check=True)
"""


async def outcomes(notebook: Agent, names: list[str]) -> dict[str, str]:
    for path in (HERE / "inside.py", *(HERE / "attacks").glob("*.py")):
        place = f"tests/escape/{path.relative_to(HERE)}"
        await notebook.call("write_file", path=place, content=path.read_text())
    with prepared() as target:
        limits = {**target.limits, "tmp_bytes": Limits().tmp_bytes}
        task = {"target": asdict(replace(target, limits=limits)), "names": names, "workspace": "."}
        await notebook.call("write_file", path="task.json", content=json.dumps(task))
        answer = await notebook.call("execute", code=RUN, wait=500)
        assert answer.status == "ok", answer.text
    told = await notebook.call("read_file", path="told.json", limit=MIB)
    found: dict[str, str] = json.loads(told.text)
    return found


@pytest.mark.parametrize(
    "part", [pytest.param(slice(0, None, 4)), pytest.param(slice(None), marks=pytest.mark.ways)]
)
@pytest.mark.parametrize("start", sampled(["cold", "forked"], "forked"))
async def test_cells_attack_in_vain(start: str, part: slice, servers: Servers) -> None:
    """Each attack alone is tried in a forked kernel by `test_template_escapes`."""
    names = [attack.name for attack in ATTACKS][part]
    forked = start == "forked"
    async with ready(servers, *FLAGS, "--warm", "0") if forked else agent(*FLAGS) as notebook:
        assert (await notebook.call("info")).data["policy"].startswith("default: ")
        found = await outcomes(notebook, names)
    assert found.keys() == set(names)
    assert {name: told for name, told in found.items() if not told.startswith("held")} == {}
