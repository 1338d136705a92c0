"""Libraries that draw or lay out tables, as a model uses them: what is seen of each."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.integration.agent import PREFIX, Answer, agent

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.timeout(900)]

PACKAGES = (
    "numpy,pandas,matplotlib,seaborn,altair,plotly,bokeh,folium,polars,pyarrow,sympy,networkx,"
    "graphviz,tqdm,ipywidgets,jinja2,lxml,pillow"
)


@dataclass(frozen=True)
class Seen:
    """A cell, what its text holds, how many pictures and which further forms come with it."""

    code: str
    said: str = ""
    pictures: int = 0
    links: tuple[str, ...] = ()


DATA = "import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': [3, 1, 2]})"
VEGALITE = "application/vnd.vegalite.v6+json"
PLOTLY = "application/vnd.plotly.v1+json"
CHART = "alt.Chart(df).mark_bar().encode(x='a:O', y='b')"
CELLS = (
    Seen(DATA, "(no output)"),
    Seen("import seaborn as sns\nsns.lineplot(df, x='a', y='b')", pictures=1),
    Seen("sns.pairplot(df)", pictures=1),
    Seen("df.plot(); df.plot.bar();", pictures=2),
    Seen("import networkx as nx\nnx.draw(nx.path_graph(4))", pictures=1),
    Seen("nx.path_graph(4)", "Graph with 4 nodes and 3 edges"),
    Seen("import sympy as sp\nfrom sympy.abc import x\nsp.plot(x**2)", pictures=1),
    Seen("sp.Integral(sp.sqrt(1 / x), x)", "Integral(sqrt(1/x), x)", links=("text/latex",)),
    Seen(f"import altair as alt\n{CHART}", "bar: x: a (ordinal)", 1, (VEGALITE, "text/html")),
    Seen(f"{CHART}.show()", '{"a": 1, "b": 3}', 1, (VEGALITE,)),
    Seen(f"alt.renderers.enable('mimetype')\n{CHART}", "3 rows", 1, (VEGALITE,)),
    Seen(f"class Own(alt.Chart): pass\n{CHART.replace('alt.Chart', 'Own')}", "bar", 1),
    Seen("import plotly.express as px\npx.scatter(df, x='a', y='b', title='T')",
         "plotly figure 'T', 1 trace\n1. scatter (markers): 3 points\n   x: 1 to 3; 1, 2, 3",
         links=(PLOTLY,)),
    Seen("px.bar(df, x='a', y='b').show()", "1. bar: 3 points", links=(PLOTLY,)),
    Seen("px.line(df).show(renderer='browser')", "scatter (lines) 'a'", links=(PLOTLY,)),
    Seen("px.line(df).show(renderer='png')", "scatter (lines) 'a'", links=(PLOTLY,)),
    Seen("from IPython.display import HTML\nHTML(px.line(df).to_html())", "scatter (lines) 'a'"),
    Seen("import matplotlib.pyplot as plt, matplotlib.animation as animation\n"
         "f, ax = plt.subplots()\nline, = ax.plot([0, 1])\n"
         "moves = animation.FuncAnimation(f, lambda n: line.set_ydata([0, n]), frames=3)\n"
         "page = moves.to_jshtml()\nplt.close(f)\nHTML(page)", pictures=1),
    Seen("pd.options.plotting.backend = 'plotly'\ndf.plot()", "plotly figure", links=(PLOTLY,)),
    Seen("pd.options.plotting.backend = 'matplotlib'", "(no output)"),
    Seen("from bokeh.plotting import figure, show\np = figure(title='B')\np.line([1, 2], [3, 4])\n"
         "show(p)", "bokeh plot 'B'\nLine: x: 1, 2; y: 3, 4", links=("text/html",)),
    Seen("p", "bokeh plot 'B'", links=("text/html",)),
    Seen("import folium\nm = folium.Map([48, 11], zoom_start=5)\n"
         "folium.Marker([48, 11], popup='hi').add_to(m)\nm",
         "map at [48.0, 11.0], zoom 5", links=("text/html",)),
    Seen("import graphviz\ng = graphviz.Digraph()\ng.edge('a', 'b')\ng", "a -> b"),
    Seen("df.style.format('{:.2f}')", "0 | 1.00 | 3.00", links=("text/html",)),
    Seen("from IPython.display import HTML\nHTML(df.to_html())", "0 | 1 | 3"),
    Seen("pd.DataFrame({f'column_{n}': [n] for n in range(12)})", "11"),
    Seen("import polars as pl\npl.DataFrame({f'c{n}': [n] for n in range(20)})", "┆ c19 │"),
    Seen("pl.DataFrame({'a': [1], 'b': [2]}).plot.point(x='a', y='b')", "point", 1, (VEGALITE,)),
    Seen("import pyarrow as pa\npa.table({'a': [1, 2]})", "a: [[1,2]]"),
    Seen("from PIL import Image\nImage.new('RGB', (30, 20), 'red')", pictures=1),
    Seen("from tqdm.auto import tqdm\nfor _ in tqdm(range(9), desc='work'): pass", "work: 100%"),
    Seen("from tqdm.notebook import tqdm, trange\nfor _ in tqdm(range(9)): pass", "100%"),
    Seen("for _ in trange(3):\n    for _ in trange(9, leave=False): pass", "3/3"),
    Seen("import ipywidgets\nipywidgets.IntSlider(3)", "IntSlider(value=3)"),
    Seen("df['zz']", "frames inside pandas …]\nKeyError: 'zz'"),
    Seen("from lxml import etree\netree.fromstring('<a>')", "inside lxml …]"),
)  # fmt: skip


def own_lines(answer: Answer) -> list[str]:
    """Return the lines of an answer without the server's notices, which a slow machine causes."""
    return [line for line in answer.text.splitlines() if not line.startswith(PREFIX)]


@pytest.mark.parametrize("start", ["cold", "forked"])
async def test_every_library_shows_a_picture_or_says_what_it_holds(start: str) -> None:
    flags = ("--warm", "1") if start == "forked" else ()
    async with agent("--allow", PACKAGES, *flags) as notebook:
        for cell in CELLS:
            answer = await notebook.call("execute", code=cell.code, timeout=300, wait=300)
            assert len(answer.images) == cell.pictures, (cell.code, answer.text)
            assert cell.said in answer.text, (cell.code, answer.text)
            assert set(cell.links) <= {link.mime_type for link in answer.links}, cell.code
            if "Error" not in cell.said and "lxml" not in cell.said:
                assert answer.status == "ok", answer.text
            if "tqdm" in cell.code or "trange" in cell.code:
                assert len(own_lines(answer)) == 1, answer.text
        book = await notebook.call("export_notebook", path="out.ipynb")
        content = (await notebook.client.read_resource(book.links[0].uri)).contents[0]
        cells = json.loads(content.text)["cells"]  # type: ignore[union-attr]
        kept = {mime for cell in cells for out in cell["outputs"] for mime in out.get("data", ())}
        assert {"image/png", "text/html", "text/latex", PLOTLY, VEGALITE} <= kept


async def test_charts_are_drawn_where_altair_came_by_install() -> None:
    async with agent("--allow-install", "*") as notebook:
        await notebook.run("kept = 1")
        installed = await notebook.call("install", packages=["altair", "pandas"])
        assert not installed.failed, installed.text
        answer = await notebook.run(f"{DATA}\nimport altair as alt\n{CHART}", wait=120)
        assert len(answer.images) == 1
        assert (await notebook.run("kept")).text == "1"
