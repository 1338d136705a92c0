"""Every picture and every table: what code draws is seen, whatever it is drawn with."""

from __future__ import annotations

import json

import pytest

from tests.integration.agent import ANALYSIS, Agent, Answer
from tests.integration.servers import Servers
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DATA = ("--allow", ANALYSIS)


def kinds(answer: Answer) -> list[str]:
    """The content of an answer, texts by their first line."""
    return [
        block.text.partition("\n")[0] if block.type == "text" else block.type
        for block in answer.result.content
        if block.type != "resource_link"
    ]


async def run(notebook: Agent, code: str, session: str = "") -> Answer:
    return await notebook.call("execute", code=code, session=session, timeout=120, wait=120)


BACKENDS = {
    "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt": "before",
    "import matplotlib.pyplot as plt, matplotlib\nmatplotlib.use('Agg')": "after",
    "import matplotlib.pyplot as plt\nplt.switch_backend('svg')": "switched",
    "import os\nos.environ['MPLBACKEND'] = 'Agg'\nimport matplotlib.pyplot as plt": "environment",
    "import matplotlib\nmatplotlib.use('TkAgg')\nimport matplotlib.pyplot as plt": "windows",
    "import matplotlib.pyplot as plt\nplt.switch_backend('QtAgg')": "windows later",
    "%matplotlib qt\nimport matplotlib.pyplot as plt": "magic",
    "import matplotlib.pyplot as plt\nplt.ioff()": "not interactive",
}


@pytest.mark.ways
@pytest.mark.parametrize("start", sampled(["cold", "forked"], "forked"))
async def test_figures_are_shown_and_closed_under_every_backend(
    start: str, servers: Servers
) -> None:
    flags = ("--warm", "1") if start == "forked" else ()
    async with servers.agent(*DATA, *flags) as notebook:
        for choice, name in BACKENDS.items():
            if start == "cold" and name not in ("before", "environment", "windows"):
                continue
            session = (await notebook.call("create_session")).data["session"]
            first = await run(notebook, f"{choice}\nplt.plot([1, 2]);", session=session)
            assert len(first.images) == 1, name
            later = await run(notebook, "print(plt.get_fignums())", session=session)
            assert (later.text, later.images) == ("[]", []), name
            shown = "print('a'); plt.plot([1]); plt.show(); print('b')"
            answer = await run(notebook, shown, session=session)
            assert kinds(answer) == ["a", "image", "b"], name
            failed = await run(
                notebook, "plt.plot([1]); plt.savefig('p.png'); 1/0", session=session
            )
            assert (failed.status, len(failed.images)) == ("error", 1), name
            none = await run(notebook, "plt.plot([1]); plt.close('all')", session=session)
            assert kinds(none) == ["(no output)"], name
            await notebook.call("close_session", session=session)


OPEN = [  # as ipykernel shows them with its inline backend: code, pictures, open figures
    ("import matplotlib.pyplot as plt\nplt.ioff()\nplt.plot([1, 2]);", 1, "[]"),
    ("plt.ioff()\nplt.plot([1, 2]);", 0, "[1]"),
    ("plt.plot([2, 1]); plt.show(close=False)", 1, "[1]"),
    ("plt.show()", 1, "[]"),
    ("figure = plt.figure(); plt.plot([1, 2]); figure", 1, "[1]"),
    ("plt.ion(); plt.close('all')", 0, "[]"),
    ("with plt.ioff():\n    plt.plot([1, 2])", 0, "[1]"),
    ("plt.plot([2, 1]);", 0, "[1]"),
    ("plt.figure(); plt.plot([1, 2]);", 2, "[]"),
    ("plt.plot([1, 2]); plt.show(close=False); plt.title('t');", 2, "[]"),
]


@pytest.mark.parametrize("start", sampled(["cold", "forked"], "forked"))
async def test_figures_that_code_keeps_stay_open(start: str, servers: Servers) -> None:
    flags = ("--warm", "1") if start == "forked" else ()
    async with servers.agent(*DATA, *flags) as notebook:
        for code, pictures, left in OPEN:
            answer = await run(notebook, code)
            assert (len(answer.images), answer.status) == (pictures, "ok"), code
            assert (await run(notebook, "print(plt.get_fignums())")).text == left, code


@pytest.mark.ways
async def test_warnings_of_a_figure_name_no_file_of_the_kernel(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.title('\u65e5');"
        answer = await run(notebook, code)
    assert "missing from font" in answer.text
    assert "kernel_specs" not in answer.text


async def test_an_image_is_shown_in_the_output_where_a_program_for_pictures_is_installed(
    servers: Servers,
) -> None:
    program = (
        "import os, pathlib\n"
        "pathlib.Path('bin').mkdir(); pathlib.Path('bin/xdg-open').write_text('#!/bin/sh\\n')\n"
        "os.chmod('bin/xdg-open', 0o755); os.environ['PATH'] = os.path.abspath('bin')\n"
    )
    async with servers.agent(*DATA) as notebook:
        await run(notebook, program)
        shown = await run(notebook, "from PIL import Image\nImage.new('RGB', (30, 20)).show()")
    assert kinds(shown) == ["image"]


async def test_what_is_drawn_comes_as_a_picture_and_data_as_a_table(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await run(notebook, "from IPython.display import *\nimport pandas as pd, numpy as np\n")
        drawing = (
            "<svg xmlns='http://www.w3.org/2000/svg' width='90' height='60'>"
            "<circle cx='30' cy='30' r='20'/><text x='9' y='50'>Hi</text></svg>"
        )
        for code in (
            f'SVG("{drawing}")',
            f'HTML("<div>{drawing}</div>")',
            f'class Drawn:\n    def _repr_svg_(self): return "{drawing}"\nDrawn()',
            "pd.DataFrame({'a': [1, 3, 2]}).plot()",
            "%config InlineBackend.figure_formats = ['svg']\npd.Series([1, 2]).plot()",
            "%config InlineBackend.figure_formats = ['png']\npd.Series([1, 2]).plot()",
            "from PIL import Image as P\nP.new('RGB', (30, 20))",
            "P.new('RGB', (30, 20)).show()",
            "P.new('L', (9000, 9000), 128)",
        ):
            answer = await run(notebook, code)
            assert len(answer.images) == 1, (code, answer.text)
        assert "original: kernel://" in answer.text
        frame = "df = pd.DataFrame({f'column_{n}': [n] for n in range(12)})\ndf"
        wide = await run(notebook, frame)
        assert len(wide.text.splitlines()) == 2
        assert not wide.links
        styled = await run(notebook, "pd.DataFrame({'a': [1, 2]}).style.format('{:.2f}')")
        assert ("1.00" in styled.text) or "jinja2" in styled.text
        table = await run(notebook, "HTML(pd.DataFrame({'a': [1, 2]}).to_html())")
        assert "0 | 1" in table.text
        own = await run(notebook, "pd.set_option('display.max_columns', 4)\ndf")
        assert "..." in own.text
        huge = await run(
            notebook,
            "import matplotlib.pyplot as plt\nplt.figure(figsize=(40, 30), dpi=300)\n"
            "plt.imshow(np.random.default_rng(1).random((3000, 3000)));",
        )
        assert len(huge.images) == 1
        assert "scaled from" in huge.text
        book = await notebook.call("export_notebook", path="out.ipynb")
        content = (await notebook.client.read_resource(book.links[0].uri)).contents[0]
        assert "image/svg+xml" in content.text  # type: ignore[union-attr]


SAID = {
    "HTML('<div></div><script>x</script>')": "[HTML without words, 29 characters: div, script]",
    "IFrame('https://example.org/x', 9, 9)": "iframe https://example.org/x]",
    "Image(url='https://example.org/x.png')": "img https://example.org/x.png]",
    "Audio(data=bytes(2000), rate=8000)": "audio",
    "Video('https://example.org/x.mp4')": "video https://example.org/x.mp4",
    "GeoJSON({'type': 'Point'})": '{"type": "Point"}',
    "JSON({'a': 1})": '{"a": 1}',
    "Javascript('alert(1)')": "[JavaScript, 8 characters, which is not run here]",
    "Markdown('# T')": "# T",
    "Math('x')": "x",
    "Code('def f(): pass', language='python')": "def f(): pass",
    "Pretty('hello')": "hello",
    "for _ in ProgressBar(5): pass": "5/5",
    "display({'text/html': '<p>' + 'x' * 20_000_000, 'text/plain': 'big'}, raw=True)": "big",
    "display({'text/plain': 'y' * 20_000_000}, raw=True)": "yyy",
    "display({'a/own.json': {'b': 1}, 'text/plain': 'own'}, raw=True)": "own",
}


@pytest.mark.ways
async def test_displays_of_every_kind_say_something(servers: Servers) -> None:
    async with servers.agent() as notebook:
        await run(notebook, "from IPython.display import *")
        for code, said in SAID.items():
            answer = await run(notebook, code)
            assert answer.status == "ok"
            assert said in answer.text, (code, answer.text[:500])
        results = "ip = get_ipython()\nfor n in range(1200): ip.displayhook(n)"
        assert "Output cache" not in (await run(notebook, results)).text
        for code, kind in {
            "print('x'": "SyntaxError: '(' was never closed",
            "for i in x:": "IndentationError: expected an indented block",
            "eval('(1')": "SyntaxError: '(' was never closed",
        }.items():
            text = (await run(notebook, code)).text
            assert kind in text
            assert "interactiveshell" not in text


async def test_scripts_show_their_figures_whatever_backend_they_choose(servers: Servers) -> None:
    script = (
        "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt\n"
        "print('a')\nplt.plot([1, 2])\nplt.show()\nprint('b')\nplt.plot([2, 1])\n"
    )
    async with servers.agent(*DATA) as notebook:
        answer = await notebook.call("run_script", script=script, timeout=120)
        assert kinds(answer) == ["a", "image", "line chart", "image", "line chart"]
        assert "1 element: 1\nb\n" in answer.text


CHARTS = """
import json
import matplotlib.pyplot as plt, numpy as np
from IPython import get_ipython
formatter = get_ipython().display_formatter
def chart(draw):
    figure, axes = plt.subplots()
    draw(axes)
    data = formatter.format(figure)[0]
    plt.close(figure)
    return data.get("application/vnd.kernel-mcp.chart+json", {}), data["text/plain"]
def line(axes):
    axes.plot([1, 2, float("nan")], [1, 4, 9], label="a")
    axes.plot(range(100_000), range(100_000), label="b")
    axes.set(title="T", xlabel="time", yscale="log")
found, words = chart(line)
found["lengths"] = [len(each["points"]) for each in found["elements"]]
found["elements"] = found["elements"][0]
print(json.dumps({key: found[key] for key in ("type", "title", "y_scale", "elements", "lengths")}))
print(words)
draws = {
    "scatter": lambda axes: axes.scatter([1, 2], [3, 4]),
    "bar": lambda axes: axes.bar(["x", "y"], [3, 4]),
    "hist": lambda axes: axes.hist([1, 1, 2, 3], bins=2),
    "box_and_whisker": lambda axes: axes.boxplot([[1, 2, 3, 4, 100]]),
    "heatmap": lambda axes: axes.imshow([[1, 2], [3, 4]]),
    "nothing": lambda axes: axes.fill_between([1, 2], [1, 2], [3, 4]),
    "too much": lambda axes: axes.imshow(np.random.rand(500, 500)),
    "too many": lambda axes: [axes.plot([1, 2]) for _ in range(21)],
}
for name, draw in draws.items():
    found, words = chart(draw)
    print(name, json.dumps(found.get("elements")), found.get("type"))
    if "left out" in words:
        print(words)
styles = {
    "colors": lambda axes: axes.plot([1, 2], "r", [2, 1], "k--"),
    "bars": lambda axes: axes.bar([1, 2], [3, 4], bottom=[1, 0], color=["red", "blue"]),
    "limits": lambda axes: (axes.plot([1, 2]), axes.set(xlim=(0, 4), ylim=(3, 0))),
    "offset": lambda axes: axes.plot([1e7 + 0.5, 1e7 + 0.75]),
    "by value": lambda axes: axes.scatter([1, 2], [3, 4], c=[1, 2]),
    "noted": lambda axes: (axes.plot([1, 2]), axes.annotate("here", (0, 1))),
    "steps": lambda axes: axes.step([1, 2], [1, 2]),
    "long": lambda axes: axes.plot(range(4001)),
}
keys = ("colors", "bases", "steps", "partial")
for name, draw in styles.items():
    found, _ = chart(draw)
    print(name, json.dumps({key: found[key] for key in keys if key in found}), end=" ")
    print(found["x_limits"] + found["y_limits"] if name == "limits" else "", end=" ")
    print(found["y_tick_labels"][1] if name == "offset" else "")
"""


async def test_figures_of_known_kinds_carry_their_numbers(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        answer = await run(notebook, CHARTS)
        first, *rest = map(str.rstrip, answer.text.splitlines())
        assert json.loads(first) == {
            "type": "line",
            "title": "T",
            "y_scale": "log",
            "elements": {"label": "a", "points": [[1.0, 1.0], [2.0, 4.0], [None, 9.0]]},
            "lengths": [3, 2000],
        }
        assert rest == [
            "line chart 'T': x 'time'",
            "2 elements: a, b",
            'scatter [{"label": "1", "points": [[1.0, 3.0], [2.0, 4.0]]}] scatter',
            (
                'bar [{"label": "x", "group": "1", "value": 3.0}, '
                '{"label": "y", "group": "1", "value": 4.0}] bar'
            ),
            (
                'hist [{"label": "1.5", "group": "1", "value": 2.0, "from": 1.0, "to": 2.0}, '
                '{"label": "2.5", "group": "1", "value": 2.0, "from": 2.0, "to": 3.0}] hist'
            ),
            (
                'box_and_whisker [{"label": "1", "min": 1.0, "first_quartile": 2.0, "median": 3.0, '
                '"third_quartile": 4.0, "max": 4.0, "outliers": [100.0]}] box_and_whisker'
            ),
            'heatmap [{"rows": [[1.0, 2.0], [3.0, 4.0]]}] heatmap',
            "nothing null None",
            "too much null None",
            "[the numbers of this figure are left out: more than 20,000 values]",
            "too many null None",
            "[the numbers of this figure are left out: more than 20 parts]",
            'colors {"colors": ["#ff0000", "#000000"]}',
            'bars {"colors": ["#ff0000", "#0000ff"], "bases": [1.0, 0.0]}',
            'limits {"colors": ["#1f77b4"]} [0.0, 4.0, 3.0, 0.0]',
            'offset {"colors": ["#1f77b4"]}  10000000.5',
            'by value {"colors": [""], "partial": true}',
            'noted {"colors": ["#1f77b4"], "partial": true}',
            'steps {"colors": ["#1f77b4"], "partial": true}',
            'long {"colors": ["#1f77b4"], "steps": [3], "partial": true}',
        ]


MISTAKABLE = """
import datetime, json, time
import matplotlib.pyplot as plt, numpy as np, pandas as pd
from IPython import get_ipython
chart_of = type(get_ipython().display_formatter).format.__globals__["charts"].chart_of
days = pd.date_range("2024-01-01", periods=2)
boxes = [[1, 2, 3, 4, 100], [2, 3, 4, 5, 6]]
table = pd.DataFrame({"p": [1, 2], "q": [3, 4]}, index=["x", "y"])
def grouped(axes):
    axes.bar(np.arange(500) - 0.2, np.ones(500), 0.4)
    axes.bar(np.arange(500) + 0.2, np.ones(500), 0.4)
    axes.set_xticks(range(500), [f"name{n}" for n in range(500)])
draws = {
    "few rows": lambda axes: pd.DataFrame(np.ones((5, 7))).plot(ax=axes),
    "level": lambda axes: (axes.plot([1, 2]), axes.axhline(3), axes.set_xlim(0, 4)),
    "many": lambda axes: [axes.plot([1, 2]) for _ in range(30)],
    "bins": lambda axes: axes.hist(np.arange(3000), bins=3000),
    "days": lambda axes: axes.scatter(days, [1, 2]),
    "series": lambda axes: pd.Series([1, 2], index=days).plot(ax=axes),
    "day bars": lambda axes: axes.bar(pd.date_range("2024-01-01", periods=30), range(30)),
    "words": lambda axes: axes.scatter(["a", "b"], [1, 2]),
    "wide": lambda axes: axes.bar(["a", "b"], [1, 2], width=1),
    "groups": lambda axes: table.plot.bar(ax=axes),
    "flat": lambda axes: axes.boxplot(boxes, vert=False),
    "notch": lambda axes: axes.boxplot(boxes, notch=True),
    "means": lambda axes: axes.boxplot(boxes, showmeans=True, showcaps=False),
    "box and line": lambda axes: (axes.boxplot(boxes), axes.plot([1, 2], [3, 4])),
    "holes": lambda axes: axes.imshow([[1, float("nan")]]),
    "over": lambda axes: (axes.imshow([[1, 2]]), axes.plot([0, 1], [0, 0])),
    "gap": lambda axes: axes.scatter([1, float("nan")], [1, 2]),
    "points": lambda axes: (axes.plot([1, 2]), axes.plot([1], [2], "o")),
}
import warnings
warnings.simplefilter("ignore")
for name, draw in draws.items():
    figure, axes = plt.subplots()
    draw(axes)
    found = chart_of(figure)
    plt.close(figure)
    print(json.dumps([name, found.get("type"), found.get("elements")]))
figure, axes = plt.subplots(subplot_kw={"projection": "polar"})
axes.plot([0, 1], [1, 2])
print(json.dumps(["polar", chart_of(figure).get("type"), None]))
figure, axes = plt.subplots()
grouped(axes)
began = time.process_time()
figure.canvas.draw()
drawn = time.process_time()
found = chart_of(figure)
read = time.process_time()
plt.close("all")
print(json.dumps(["grouped", read - began > 5 * (read - drawn), found["elements"][999]["label"]]))
"""


@pytest.mark.ways
async def test_figures_that_could_be_mistaken_are_told_rightly_or_have_no_numbers(
    servers: Servers,
) -> None:
    async with servers.agent(*DATA) as notebook:
        answer = await run(notebook, MISTAKABLE)
        found = {
            name: (kind, each) for name, kind, each in map(json.loads, answer.text.splitlines())
        }
    assert (found["few rows"][0], len(found["few rows"][1])) == ("line", 7)
    assert found["level"][1][1]["points"] == [[0.0, 3.0], [4.0, 3.0]]
    for name in ("many", "bins", "box and line", "over", "polar"):
        assert found[name] == (None, None)
    moments = ["2024-01-01T00:00:00", "2024-01-02T00:00:00"]
    for name in ("days", "series"):
        assert [point[0] for point in found[name][1][0]["points"]] == moments
    assert [bar["label"] for bar in found["day bars"][1][:2]] == ["2024-01-01", "2024-01-02"]
    assert [point[0] for point in found["words"][1][0]["points"]] == ["a", "b"]
    assert (found["wide"][0], [bar["label"] for bar in found["wide"][1]]) == ("bar", ["a", "b"])
    groups = [(bar["label"], bar["group"], bar["value"]) for bar in found["groups"][1]]
    assert groups == [("x", "p", 1.0), ("y", "p", 2.0), ("x", "q", 3.0), ("y", "q", 4.0)]
    for name in ("flat", "notch", "means"):
        kind, (first, second) = found[name]
        assert (kind, first["outliers"], second["label"]) == ("box_and_whisker", [100.0], "2")
        assert [first[each] for each in ("min", "first_quartile", "median", "max")] == [1, 2, 3, 4]
    assert found["holes"][1] == [{"rows": [[1.0, None]]}]
    assert found["gap"][1][0]["points"] == [[1.0, 1.0], [None, None]]
    assert [len(each["points"]) for each in found["points"][1]] == [2, 1]
    assert found["grouped"] == (True, "name499")


async def test_a_cell_is_shown_with_its_charts_and_tables(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await run(
            notebook,
            "import matplotlib.pyplot as plt, pandas as pd\nplt.plot([1, 2]); plt.show()\n"
            "print('text')\npd.DataFrame({'a': [2, 1]})",
        )
        shown = await notebook.call("show")
        assert kinds(shown)[0] == "image"
        assert "line chart" in shown.text
        view = (shown.result.meta or {})["kernel-mcp/view"]
        assert [output["kind"] for output in view["outputs"]] == ["chart", "text", "table"]
        assert (view["cell"], view["status"], view["running"]) == (1, "ok", False)
        await notebook.call("execute", code="import time; time.sleep(60)", wait=0)
        view = ((await notebook.call("show")).result.meta or {})["kernel-mcp/view"]
        assert (view["cell"], view["running"]) == (2, True)
        await notebook.call("interrupt", cell=2)
        tools = (await notebook.client.list_tools()).tools
        (address,) = [each.meta for each in tools if each.name == "show"]
        listed = (await notebook.client.list_resources()).resources[0]
        assert address == {"ui": {"resourceUri": listed.uri}}
        (page,) = (await notebook.client.read_resource(listed.uri)).contents
        assert page.mime_type == "text/html;profile=mcp-app"
        assert len(getattr(page, "text", "")) < 15_000
