"""Variables restored after hibernation, in real kernels through a real client."""

from __future__ import annotations

import pytest

from tests.integration.agent import ANALYSIS, agent
from tests.integration.sleepers import IDLE, woken

pytestmark = [pytest.mark.anyio]


DEFINITIONS = """
import dataclasses, enum, functools, json as j, math, typing, xml.etree.ElementTree
import numpy as np, pandas as pd
df = pd.DataFrame({"a": np.arange(1000), "b": ["x", "y"] * 500})
column = df["a"].to_numpy()
shared = [1, 2]
alias = {"list": shared}
base = 10
def f(x):
    return x + base
def counter():
    n = 0
    def more():
        nonlocal n
        n += 1
        return n
    def now():
        return n
    return more, now
more, now = counter()
more()
double = lambda x: f(x) * 2
@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
class Color(enum.Enum):
    RED = 1
    BLUE = 2
red = Color.RED
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    tags: list = dataclasses.field(default_factory=list)
    def norm(self):
        return math.hypot(self.x, self.y)
point = Point(3, 4)
class Animal:
    def name(self):
        return "animal"
    @functools.cached_property
    def slow(self):
        return 42
class Cat(Animal):
    def name(self):
        return "cat, " + super().name()
cat = Cat()
ring = []
ring.append(ring)
_private = "kept too"
UserId = typing.NewType("UserId", int)
@functools.singledispatch
def kind(x):
    return "other"
@kind.register
def integer(x: int):
    return "integer"
class Refused(Exception):
    def __init__(self, who, why):
        super().__init__(f"{who}: {why}")
        self.who = who
refused = Refused("me", "no")
"""


BACK = {
    "df.shape, int(df['a'].sum()), df['b'][1]": "((1000, 2), 499500, 'y')",
    "column[-1] + 1": "np.int64(1000)",
    "alias['list'] is shared": "True",
    "f(1), double(1)": "(11, 22)",
    "base = 20; f(1)": "21",
    "more(), now()": "(2, 2)",
    "fib(60), fib.cache_parameters()['maxsize']": "(1548008755920, 7)",
    "red is Color.RED, Color(2)": "(True, <Color.BLUE: 2>)",
    "point, point.norm(), point == Point(3, 4), isinstance(point, Point)": (
        "(Point(x=3, y=4, tags=[]), 5.0, True, True)"
    ),
    "dataclasses.fields(Point)[0].default is dataclasses.MISSING": "True",
    "cat.name(), cat.slow, isinstance(cat, Animal)": "('cat, animal', 42, True)",
    "ring[0] is ring": "True",
    "_private": "'kept too'",
    "UserId(3), kind(1), kind('a')": "(3, 'integer', 'other')",
    "refused.who, str(refused)": "('me', 'me: no')",
    "j.loads('[1]'), xml.etree.ElementTree.__name__": "([1], 'xml.etree.ElementTree')",
    "Out[2]": "'the result of cell 2'",
}


async def test_what_a_notebook_holds_comes_back_and_works() -> None:
    async with agent("--allow", ANALYSIS, *IDLE) as notebook:
        await notebook.run(DEFINITIONS)
        await notebook.run("'the result of cell 2'")
        answer = await woken(notebook, "1 + 1")
        assert answer.text.startswith("2\n")
        assert "had been hibernated after 1 s idle" in answer.text
        assert "Not back" not in answer.text
        assert answer.cell["state_kept"] is True
        names = (
            "dataclasses, enum, functools, j, math, typing, xml, np, pd, df, column, shared, alias"
        )
        assert f"Back: {names}" in answer.text
        assert "(34)" in answer.text
        for code, expected in BACK.items():
            assert (await notebook.run(code)).text == expected, code


@pytest.mark.ways
async def test_cells_and_tracebacks_go_on_as_if_nothing_had_happened() -> None:
    async with agent(*IDLE) as notebook:
        first = await notebook.run("def broken(x):\n    return x / 0  # the culprit")
        answer = await woken(notebook, "import inspect; print(inspect.getsource(broken))")
        assert answer.cell["execution_count"] == first.cell["execution_count"] + 1
        assert "# the culprit" in answer.text
        answer = await notebook.run("broken(1)")
        assert "ZeroDivisionError" in answer.text
        assert "In[1], line 2" in answer.text
        assert "# the culprit" in answer.text
        assert "hibernated" not in answer.text
