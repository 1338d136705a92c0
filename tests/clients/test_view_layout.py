"""Charts and tables of the view, laid out by a real browser: no text is cut off or covered."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.tools.app import page
from kernel_mcp.tools.scenes import scene
from tests.conftest import lacking

pytestmark = pytest.mark.full

MEASURE = Path(__file__).with_name("view_layout.html")
"""The page is its own host: its parent is itself."""


def browse(
    folder: Path, outputs: list[dict[str, Any]], width: int = 700, theme: str = "light"
) -> Any:
    """Lay out `outputs` in a view; return what a person sees of it."""
    browser = shutil.which("chromium")
    if browser is None:
        lacking("node", "needs chromium")
    given = json.dumps(outputs).replace("<", "\\u003c")
    script = MEASURE.read_text().replace("OUTPUTS", given).replace("THEME", theme)
    document = folder / "view.html"
    document.write_text(anyio.run(page).replace("</body>", script), encoding="utf-8")
    common = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    done = subprocess.run(
        [browser, *common, "--virtual-time-budget=2000", "--dump-dom", document.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    told = done.stdout.partition('id="found">')[2].partition("</script>")[0]
    return json.loads(told)


def chart(kind: str, elements: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    found = scene({"type": kind, "elements": elements, **fields})
    assert found is not None
    return {"kind": "chart", "data": found}


def line(values: list[float], label: str = "1", xs: list[Any] | None = None) -> dict[str, Any]:
    places = xs or list(range(len(values)))
    return {"label": label, "points": [list(pair) for pair in zip(places, values, strict=True)]}


def bar(label: str, value: float, **fields: float) -> dict[str, Any]:
    return {"label": label, "group": "1", "value": value, **fields}


LONG = "a rather long name of a quantity, with its unit in parentheses (kg per square metre) " * 2
DAYS = [f"2024-01-0{day}T00:00:00" for day in range(1, 6)]
CHARTS = [
    chart("line", [line([27776.1, 27780.5, 27790.25])], title="large"),
    chart("line", [line([-123456.789, 0, 987654.321])], x_label=LONG, y_label=LONG),
    chart("line", [line([1e-7, 2e-7])], y_label="small"),
    chart("line", [line([1.5e9, 2.25e9])]),
    chart("line", [line([2777600.1, 2777600.3])]),
    chart("line", [line([5, 5, 5])]),
    chart("line", [line([1, 2, 3, 4, 5], xs=DAYS)], x_label="day"),
    chart("line", [line([1, 2], xs=["2024-01-01T10:00:00", "2024-01-01T10:07:00"])]),
    chart("line", [line([1, 2], xs=["1900-01-01", "2024-03-01"])]),
    chart("line", [line([n, 2 * n, 3], f"{LONG}{n}") for n in range(15)], title=LONG),
    chart("scatter", [line([1, 2], "a", [0.001, 0.0015])], x_limits=[0, 0.002], y_limits=[3, 0]),
    chart("line", [line([0, 1])], y_ticks=[0, 0.5, 1], y_tick_labels=["0%", "50%", "100%"]),
    chart("bar", [bar(f"{LONG}{n}", n - 3) for n in range(9)], y_label="v"),
    chart("bar", [bar(f"name {n}", n) for n in range(60)]),
    chart("bar", [bar(f"{LONG}{n}", n + 1) for n in range(30)], orientation="horizontal"),
    chart("bar", [bar("alone", 3)]),
    chart("hist", [bar("", 2, **{"from": 0, "to": 1}), bar("", 5, **{"from": 1, "to": 4})]),
    chart("superchart", [{"type": "line", "title": "a", "elements": [line([1e5, 2e5])]}] * 3),
]  # fmt: skip


@pytest.fixture(scope="module", params=[(700, "light"), (330, "dark")])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return browse(tmp_path_factory.mktemp("view"), CHARTS, *request.param)


def test_no_text_of_a_chart_is_cut_off_or_covers_another(seen: Any) -> None:
    assert len(seen["charts"]) == len(CHARTS) + 2
    for each in seen["charts"]:
        boxes = [(text["text"], *text["box"]) for text in each["shown"] if text["text"].strip()]
        assert len(boxes) > 3, each
        for text, left, top, right, bottom in boxes:
            assert left >= 0, (text, each["width"])
            assert top >= 0, (text, each["width"])
            assert right <= each["width"], (text, each["width"])
            assert bottom <= each["height"], (text, each["width"])
        for place, (text, left, top, right, bottom) in enumerate(boxes):
            for other, x0, y0, x1, y1 in boxes[:place]:
                apart = left >= x1 or x0 >= right or top >= y1 or y0 >= bottom
                assert apart, (text, other, each["width"])


def words(seen: Any, place: int) -> list[str]:
    return [each["text"] for each in seen["charts"][place]["shown"]]


def test_ticks_are_round_numbers_whole_moments_or_those_of_the_figure(seen: Any) -> None:
    large = [float(each) for each in words(seen, 0) if float(each) > 100]
    assert len(large) > 2
    assert {after - before for before, after in pairwise(large)} in ({2.0}, {2.5}, {5.0})
    assert all(each % 1 == 0 for each in large)
    assert {"1.6B", "1.8B", "2.0B"} & {*words(seen, 3)}
    assert any(each.startswith("2777600.1") for each in words(seen, 4))
    assert "2024-01-03" in words(seen, 6)
    assert {"10:00", "10:05"} <= {*words(seen, 7)}
    assert "2000" in words(seen, 8)
    assert {"0%", "50%", "100%"} <= {*words(seen, 11)}


def test_a_chart_has_the_colors_of_its_figure_and_breaks_where_it_does(tmp_path: Path) -> None:
    lines = [line([1, 2]), line([1, float("nan"), 2, 3]), line([3, 1])]
    lines[1]["points"][1][1] = None
    colors = ["#ff7f0e", "#2ca02c", "#000000"]
    joined = [True, True, False]
    outputs = [
        chart("line", lines, colors=colors, joined=joined),
        chart("bar", [bar("a", 1), bar("b", 2)], colors=["#d62728", "#1f77b4"], bases=[1, 0]),
    ]
    first, second = browse(tmp_path, outputs, theme="dark")["charts"]
    strokes = [each for each in first["strokes"] if each]
    assert strokes == ["#ff7f0e", "#2ca02c", "#2ca02c"]
    assert any("color-mix" in (each or "") for each in first["fills"])  # black on a dark page
    assert [each for each in second["fills"] if each] == ["#d62728", "#1f77b4"]


def test_tables_tell_their_true_numbers_of_rows(tmp_path: Path) -> None:
    whole = {"kind": "table", "names": ["", "a"], "numeric": [True, True], "gap": -1, "left": ""}
    rows = [[str(n), str(n * n)] for n in range(300)]
    cut = {**whole, "rows": rows[:2], "gap": 1, "count": "2 of 3000 rows", "left": "2998 rows"}
    seen = browse(tmp_path, [{**whole, "rows": rows, "count": "300 rows"}, cut])
    assert seen["words"][1:] == ["300 rows", "2 of 3000 rows"]
    assert seen["rows"] == 300 + 3


def test_an_error_comes_first_and_its_frames_are_folded(tmp_path: Path) -> None:
    error = {"kind": "error", "text": "KeyError: 'a'\na hint", "frames": "Cell In[1]\nKeyError"}
    seen = browse(tmp_path, [error])
    assert seen["summaries"] == ["KeyError: 'a'"]
    assert seen["errors"] == ["Cell In[1]\nKeyError", "a hint"]
    assert seen["open"] == 0
