"""Exports of a session: what they say of its log, and what runs elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mcp_types import TextContent

from tests.integration.agent import Agent
from tests.integration.servers import Servers

pytestmark = pytest.mark.anyio


async def text_of(notebook: Agent, path: str) -> str:
    answer = await notebook.call("read_file", path=path, limit=100_000)
    first = answer.result.content[0]
    assert isinstance(first, TextContent), answer.text
    return first.text


async def cells_of(notebook: Agent, path: str) -> list[Any]:
    found = json.loads(await text_of(notebook, path))["cells"]
    assert isinstance(found, list)
    return found


async def test_the_places_where_variables_were_lost_are_in_every_export(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        await notebook.call("reset")
        await notebook.run("y = 2")
        await notebook.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        await notebook.run("z = 3")
        await notebook.call("export_notebook", path="a.ipynb")
        cells = await cells_of(notebook, "a.ipynb")
        lost = [each["source"] for each in cells if each["cell_type"] == "markdown"]
        assert [each["cell_type"] for each in cells].count("code") == 4
        assert len(lost) == 2
        assert lost[0].startswith("**Kernel boundary. The session was reset: ")
        assert lost[1].startswith("**Kernel boundary. Cell 3 was killed ")
        await notebook.call("export_notebook", path="a.py", format="script")
        script = (await text_of(notebook, "a.py")).splitlines()
        assert sum(row.startswith("# Kernel boundary. ") for row in script) == 2


async def test_cells_of_notebooks_name_their_records(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        first = await notebook.run("x = 1")
        place = {"session": first.cell["session"], "cell": 2}
        await notebook.call("open_notebook", path="b.ipynb")
        await notebook.run("x")
        (cell,) = await cells_of(notebook, "b.ipynb")
        assert cell["metadata"] == {"kernel-mcp": place}
        await notebook.call("run_cells", path="b.ipynb", cells=[cell["id"]])
        (cell,) = await cells_of(notebook, "b.ipynb")
        assert cell["metadata"] == {"kernel-mcp": {**place, "cell": 3}}
        await notebook.call("export_notebook", path="a.ipynb")
        own = [each["metadata"]["kernel-mcp"] for each in await cells_of(notebook, "a.ipynb")]
        assert own == [{**place, "cell": n, "status": "ok"} for n in (1, 2, 3)]
