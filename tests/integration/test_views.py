"""The data of `show` for a view of a cell, which any host can read."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from tests.integration.agent import ANALYSIS, Agent
from tests.integration.servers import Servers

pytestmark = pytest.mark.anyio

DATA = ("--allow", ANALYSIS)
PATIENCE_S = 60.0


async def view(notebook: Agent, **arguments: Any) -> dict[str, Any]:
    """Return the data of a view of the last cell."""
    with anyio.fail_after(PATIENCE_S):
        shown = await notebook.call("show", **arguments)
    assert not shown.failed, shown.text
    found = (shown.result.meta or {})["kernel-mcp/view"]
    assert isinstance(found, dict)
    return found


async def kinds(notebook: Agent, code: str) -> list[str]:
    """The kinds of outputs that a view gets of some code."""
    await notebook.run(code)
    return [str(output["kind"]) for output in (await view(notebook))["outputs"]]


NESTED = """
from IPython.display import display
for mime in ("application/json", "application/vnd.kernel-mcp.chart+json"):
    for depth in (150, 250, 900):
        value = "[" * depth + "]" * depth
        if "chart" in mime:
            value = '{"type":"superchart","elements":[' * depth + "]}" * depth
        display({mime: value, "text/plain": "deep"}, raw=True)
for number in ("NaN", "Infinity", "1e999"):
    display({"application/json": f"[{number}]", "text/plain": "no number"}, raw=True)
"""


@pytest.mark.ways
async def test_json_that_a_reader_refuses_is_shown_as_its_words(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        assert await kinds(notebook, NESTED) == ["text"] * 9
        assert await kinds(notebook, "display({'application/json': {'a': [1]}}, raw=True)") == [
            "json"
        ]


LARGE = """
from PIL import Image
import os
Image.frombytes("RGB", (600, 600), os.urandom(600 * 600 * 3))
"""


@pytest.mark.ways
async def test_a_picture_that_is_too_large_for_a_view_is_shown_smaller(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        assert await kinds(notebook, LARGE) == ["image"]
        (shown,) = (await view(notebook))["outputs"]
        assert len(shown["data"]) < 600_000


FIGURES = """
import matplotlib.pyplot as plt, pandas as pd
plt.semilogx([1, 10]); plt.show()
plt.plot(["a 1", "b 2"], [1, 2]); plt.show()
pd.DataFrame({"a": [1], "b": [2]}).plot.bar(stacked=True); plt.show()
plt.plot(pd.date_range("2024-01-01", periods=2), [1, 2]); plt.show()
"""


async def test_figures_that_a_view_would_draw_otherwise_are_pictures(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        assert await kinds(notebook, FIGURES) == ["image"] * 3 + ["chart"]


LONG = """
import pandas as pd
from IPython.display import display
display(pd.DataFrame({"n": range(300), "square": [n * n for n in range(300)]}))
display(pd.DataFrame({"n": range(5000)}))
display(pd.DataFrame({"city": ["A", "A"], "year": [1, 2], "v": [3, 4]}).groupby("city").agg(
    {"v": ["mean", "sum"], "year": ["max"]}))
pd.set_option("display.max_rows", 20)
display(pd.DataFrame({"n": range(300)}))
"""


async def test_the_rows_of_a_long_frame_are_shown_and_counted(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        answer = await notebook.run(LONG)
        assert answer.text.endswith("[300 rows x 1 columns]")
        assert len(answer.text) < 6000
        found = (await view(notebook))["outputs"]
        counts = ["300 rows", "500 of 5000 rows", "1 row", "10 of 300 rows"]
        assert [each["count"] for each in found] == counts
        assert found[0]["rows"][150] == ["150", "150", "22500"]
        assert found[1]["rows"][-1] == ["4999", "4999"]
        assert found[2]["names"] == ["city", "v / mean", "v / sum", "year / max"]
        book = await notebook.call("export_notebook", path="out.ipynb")
        assert not book.failed


async def test_what_a_view_was_answered_is_still_told_to_the_agent(servers: Servers) -> None:
    of_view: Any = {"kernel-mcp/view": True}
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("kept = 1")
        await notebook.run("import time; time.sleep(600)", wait=0.1)
        stopped = await notebook.client.call_tool("interrupt", {"cell": 2}, meta=of_view)
        assert not stopped.is_error
        shown = await notebook.client.call_tool("show", {"cell": 2}, meta=of_view)
        assert (shown.meta or {})["kernel-mcp/view"]["status"] == "interrupted"
        assert (
            "cell 2, which was running, has ended: interrupted" in (await notebook.run("kept")).text
        )
        assert "cell 2" not in (await notebook.run("kept")).text


CHANGE_OF_CLOCKS = """
import pandas as pd, matplotlib.pyplot as plt
hours = pd.date_range("2024-10-27", periods=6, freq="h", tz="Europe/Berlin")
fig, ax = plt.subplots()
ax.plot(hours, range(6))
plt.show()
"""


async def test_hours_are_as_far_apart_where_clocks_change(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await notebook.run(CHANGE_OF_CLOCKS)
        (chart,) = [each["data"] for each in (await view(notebook))["outputs"]]
        (points,) = [shape["line"] for shape in chart["shapes"] if "line" in shape]
        assert [at - points[0][0] for at, _ in points] == [3600.0 * hour for hour in range(6)]
        labels = [label for _, label in chart["x"]["ticks"][0] if label.endswith(":00")]
        assert labels == ["00:00", "01:00", "02:00", "03:00", "04:00"]
