"""Figures come in less time than `print_figure` takes, with its very pixels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.agent import ANALYSIS
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DATA = ("--allow", ANALYSIS)
FIGURES = Path(__file__).with_name("figures.txt")
COMPARE = """
import base64, datetime, io
import matplotlib, numpy as np, pandas as pd, matplotlib.pyplot as plt
from IPython.core.pylabtools import print_figure
from matplotlib import dates, font_manager, lines, patches, ticker
from matplotlib.figure import Figure
from PIL import Image

drawings = []
drawn = Figure.draw
def counted(figure, renderer):
    drawings.append(renderer)
    return drawn(figure, renderer)

def usual(figure):
    return print_figure(figure, 'png', base64=False)

def shown(figure):
    data = get_ipython().display_formatter.format(figure)[0]['image/png']
    return base64.b64decode(data) if isinstance(data, str) else data

def state(figure):
    texts = figure.findobj(matplotlib.text.Text)
    places = [(each.get_text(), each.get_position()) for each in texts]
    return places, [each.get_position().bounds for each in figure.axes]

def made(code, picture):
    Figure.draw = drawn
    with plt.rc_context():
        exec(code, {**globals(), 'X': np.linspace(0, 10, 200),
                    'rng': lambda: np.random.default_rng(7)})
        figure = plt.gcf()
        drawings.clear()
        Figure.draw = counted
        written = picture(figure)
        count = len(drawings)
        Figure.draw = drawn
        found = state(figure)
        plt.close('all')
    image = Image.open(io.BytesIO(written))
    return (image.mode, image.size, image.info, image.tobytes(), found), count, len(written)

def compare(name, code):
    (before, twice, size), (after, count, own) = made(code, usual), made(code, shown)
    if before != after or twice != 2 or own != size:
        print(name, [a == b for a, b in zip(before, after)], twice, size, own)
    return count
"""
LEFT = """
import gc
figure, _ = plt.subplots()
enabled = []
matplotlib.ticker.ScalarFormatter.format_ticks, before = (
    lambda self, values: enabled.append(gc.isenabled()) or before(self, values),
    matplotlib.ticker.ScalarFormatter.format_ticks,
)
shown(figure)
print({*enabled}, gc.isenabled())
gc.disable(); shown(figure); print(gc.isenabled()); gc.enable()
print('draw' in vars(figure))
plt.close('all')
"""
ODD = """
figure, axes = plt.subplots()
axes.plot([1, 2], label='line'); axes.legend()
matplotlib.__version_info__, before = None, matplotlib.__version_info__
pictures = shown(figure), usual(figure)
matplotlib.__version_info__ = before
print(*(Image.open(io.BytesIO(each)).tobytes() == Image.open(io.BytesIO(pictures[1])).tobytes()
        for each in pictures))
plt.close('all')
"""


@pytest.mark.parametrize(
    "part", [pytest.param(slice(0, None, 16)), pytest.param(slice(None), marks=pytest.mark.ways)]
)
async def test_figures_have_usual_pixels_and_are_drawn_once_where_that_is_enough(
    servers: Servers, part: slice
) -> None:
    found = [each.split("\n", 1) for each in FIGURES.read_text()[2:].split("\n\n# ")]
    assert len(found) > 80
    figures = dict(found[part])
    async with servers.agent(*DATA) as notebook:
        assert (await notebook.run(COMPARE)).text == "(no output)"
        code = f"counts = {{name: compare(name, code) for name, code in {figures!r}.items()}}"
        assert (await notebook.run(code, wait=240)).text == "(no output)"
        twice = await notebook.run("print([name for name, count in counts.items() if count != 1])")
        assert twice.text == str([name for name in figures if name.endswith(", drawn twice")])


async def test_nothing_of_matplotlib_is_changed_once_a_figure_is_shown(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await notebook.run(COMPARE)
        assert (await notebook.run(LEFT)).text == "{False} True\nFalse\nFalse"


async def test_a_matplotlib_that_is_otherwise_costs_no_picture(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await notebook.run(COMPARE)
        assert (await notebook.run(ODD)).text == "True True"


async def test_what_code_says_about_its_pictures_is_kept(servers: Servers) -> None:
    async with servers.agent(*DATA) as notebook:
        await notebook.run(COMPARE)
        await notebook.run(
            "%config InlineBackend.print_figure_kwargs = "
            "{'bbox_inches': None, 'metadata': {'Author': 'me'}, 'facecolor': 'red'}"
        )
        said = await notebook.run(
            "plt.figure(figsize=(2, 1), dpi=100); plt.plot([1])\n"
            "image = Image.open(io.BytesIO(shown(plt.gcf()))); plt.close('all')\n"
            "print(image.size, image.getpixel((0, 0)), image.info['Author'])"
        )
        assert said.text == "(200, 100) (255, 0, 0, 255) me"
