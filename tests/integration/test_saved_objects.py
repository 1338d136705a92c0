"""Each kind of object comes back as it was, or the first answer says which is not and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.agent import ANALYSIS, Agent, Answer, agent, lost, notices
from tests.integration.lives import Place
from tests.integration.saved_objects import Case, cases
from tests.integration.test_hibernation_losses import ONE, forced

pytestmark = [pytest.mark.anyio]

AT_ONCE = 30
"""Cases in one cell."""
_CHANGED = re.compile(r"\b(\w+) \(")


async def made(notebook: Agent, every: list[Case]) -> int:
    """Run the code of all cases; the number of the last cell."""
    for place in range(0, len(every), AT_ONCE):
        some = every[place : place + AT_ONCE]
        answer = await notebook.run("\n".join(case.setup for case in some))
        assert answer.status == "ok", answer.text
    return int(answer.cell["cell"])


def checking(every: list[Case], told: set[str]) -> str:
    """A cell that shows the names of the cases that are not as they were."""
    questions = [(case.name, case.check) for case in every]
    return (
        f"def failures(told):\n"
        f"    found = []\n"
        f"    for name, check in {questions!r}:\n"
        f"        try:\n"
        f"            good = eval(check, globals(), {{'told': told}})\n"
        f"        except Exception as error:\n"
        f"            good, name = False, f'{{name}}: {{error!r}}'\n"
        f"        if not good: found.append(name)\n"
        f"    return found\n"
        f"failures({told!r}.__contains__)"
    )


def named(answer: Answer) -> set[str]:
    """The names that are lost, and those of variables that are not as before."""
    (notice,) = notices(answer)
    changed = notice.partition("Not as before: ")[2].partition(". ")[0]
    return {*lost(answer), *_CHANGED.findall(changed)}


@pytest.mark.ways
async def test_a_restarted_server_brings_each_kind_back_or_names_it(tmp_path: Path) -> None:
    place, every = Place(tmp_path), cases()
    async with place.life("--template", "--allow", ANALYSIS) as first:
        cells = await made(first, every)
        await place.saved(cells)
    size = sum(path.stat().st_size for path in place.kept.glob("r/*/variables-*"))
    async with place.life("--template", "--allow", ANALYSIS) as second:
        told = named(await second.run("pass"))
        assert (await second.run(checking(every, told))).text == "[]"
    assert size < 8_000_000  # what is repeated in memory is not in the file


@pytest.mark.full
async def test_hibernation_brings_each_kind_back(tmp_path: Path) -> None:
    every = cases()
    async with agent("--allow", ANALYSIS, *ONE) as notebook:
        await made(notebook, every)
        told = named(await forced(notebook, "pass"))
        assert (await notebook.run(checking(every, told))).text == "[]"


LIBRARIES = """
import numpy as np, polars as pl, pyarrow as pa
from scipy.spatial import KDTree
points = np.arange(6.0).reshape(3, 2); tree = KDTree(points)
numbers = np.arange(4.0); column = pl.Series("x", numbers); frame = pl.DataFrame({"x": numbers})
own = pl.DataFrame({"y": [1.0, 2.0], "z": ["a", "b"]})
raw = bytearray(8); buffer = pa.py_buffer(raw)
table = pa.table({"y": [1, 2]}); part = table.slice(1)
"""


@pytest.mark.full
async def test_memory_that_libraries_share_with_arrays_is_shared_or_told() -> None:
    async with agent("--allow", "numpy,polars,pyarrow,scipy", *ONE) as notebook:
        await notebook.run(LIBRARIES)
        answer = await forced(notebook, "tree.data is points, column.to_list(), own.shape")
        assert answer.text.startswith("(True, [0.0, 1.0, 2.0, 3.0], (2, 2))")
        assert named(answer) == {"column", "frame", "buffer"}


ODD = """
import os, sys, time, warnings, numpy as np, pandas as pd
kept = 1
class Ends:
    def __reduce__(self): return os._exit, (1,)
class Waits:
    def __reduce__(self): return time.sleep, (100000,)
pd.set_option("display.max_columns", 77)
warnings.simplefilter("error")
np.random.set_bit_generator(np.random.PCG64(3))
np.random.rand(); drawn = np.random.get_state(legacy=False)
os.environ = {**os.environ, "ENDS": Ends(), "NEW": "1"}
sys.path.append(["odd"])
def sleeps(*_): time.sleep(100000)
np.seterrcall(sleeps); import random; random.getstate = sleeps
os.makedirs("gone"); os.chdir("gone"); os.rmdir("../gone")
import linecache; linecache.cache[3] = sys.modules[5] = In[0] = 5; os.close(0)
"""
STILL = """
kept, os.environ["NEW"], pd.get_option("display.max_columns"), warnings.filters[0][0], \
    np.random.get_state(legacy=False)["state"] == drawn["state"]
"""


@pytest.mark.ways
async def test_settings_that_cannot_come_back_cost_no_variable_and_are_named(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    async with place.life("--template", "--allow", ANALYSIS) as first:
        cells = int((await first.run(ODD)).cell["cell"])
        await place.saved(cells)
    async with place.life("--template", "--allow", ANALYSIS) as second:
        answer = await second.run(STILL)
        assert answer.text.startswith("(1, '1', 77, 'error', True)"), answer.text
        assert {name for name in lost(answer) if name.startswith("setting ")} == {
            *("setting os.environ: ENDS", "setting os.getcwd", "setting sys.path")
        }


HIDDEN = """
names = globals()
get_ipython().push({"hidden": [5], "again": names}, interactive=False)
_i777, __doc__ = "text", "mine"
names[1] = names["Out[1]"] = names["a" * 201] = names["a" * 202] = 0
"""


async def test_names_that_nobody_sees_come_back_hidden_and_what_is_no_name_is_told() -> None:
    async with agent(*ONE) as notebook:
        await notebook.run(HIDDEN)
        answer = await forced(notebook, "hidden, _i777, __doc__, again is globals()")
        assert answer.text.startswith("([5], 'text', 'mine', True)")
        assert "Back: __doc__, names, _i777 (3)" in answer.text
        long = f"{'a' * 20}…"
        assert {*lost(answer)} == {"globals()[1]", "globals()['Out[1]']", long, f"{long} (2)"}
        listed = await notebook.call("list_variables")
        assert [each["name"] for each in listed.data["variables"]] == ["names"]
