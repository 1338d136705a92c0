"""Every way to die, with every library that is used much: variables as a model outside has them.

What comes back equals the model as of the cell that the answer names, and is of use; what does not
was named before anything built on it.
"""

from __future__ import annotations

import re

import pytest

from tests.integration.agent import Agent, Answer, notices
from tests.integration.agent import agent as serving

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

DEATHS = {
    "a segmentation fault": "import ctypes; ctypes.string_at(0)",
    "an exit": "os._exit(0)",
    "an abort": "os.abort()",
    "SIGKILL to itself": "os.kill(os.getpid(), 9)",
    "SIGTERM to its group": "os.killpg(0, 15); time.sleep(5)",
    "the limit of processor time": (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
    ),
    "another program in its place": "os.execv('/bin/true', ['true'])",
    "a stack without end": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nkind = ctypes.CFUNCTYPE(ctypes.c_int, *"
        "[ctypes.c_void_p] * 2)\nrange_of = ctypes.create_string_buffer(64)\n"
        "kind(lambda a, b: libc.qsort(range_of, 2, 8, again) or 0)\n"
        "again = kind(lambda a, b: libc.qsort(range_of, 2, 8, again) or 0)\n"
        "import sys; sys.setrecursionlimit(10**9); libc.qsort(range_of, 2, 8, again)\nos._exit(1)"
    ),
    "no descriptors": "os.closerange(3, 1000)",
    "no memory for anything": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nos.abort()"
    ),
    "no working folder": "os.mkdir('d'); os.chdir('d'); os.rmdir('../d'); os._exit(1)",
    "children that go on": (
        "import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '999'])\n"
        "if os.fork() == 0: os.setsid(); time.sleep(999)\nos._exit(1)"
    ),
    "children that are waited for": "os.fork() or os._exit(0)\nos.wait()\nos._exit(1)",
    "threads that go on": (
        "import threading\nfor _ in range(5): threading.Thread(target=time.sleep, args=(999,), "
        "daemon=True).start()\nos.abort()"
    ),
    "a stopped checkpoint": (
        "for each in os.listdir('/proc'):\n"
        "  if each.isdigit() and int(each) not in (1, os.getpid()): os.kill(int(each), 19)\n"
        "os._exit(1)"
    ),
    "the alarm of a timer": "import signal; signal.setitimer(0, 0.1); time.sleep(9)",
}
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)"
MODEL = """
import os, random, time
random.seed(1)
data, block, log = {'a': [1]}, bytearray(b'q') * (1 << 20), open('log', 'w')
_ = log.write('not yet written')
"""
CHANGES = (
    "data['a'].append(2); block[:] = bytes(len(block)); _ = log.write('more'); log.flush(); y = 1"
)
SEEN = "print(data, block[:1], len(block), random.random(), log.tell(), 'y' in dir())"
EXPECTED = "{'a': [1]} bytearray(b'q') 1048576 0.13436424411240122 15 False"


async def die(agent: Agent, code: str, *, timeout: float = 20, session: str = "") -> Answer:
    dead = await agent.run(code, timeout=timeout, session=session)
    assert dead.status == "killed", (code, dead.text)
    assert (dead.cell["state_kept"], dead.cell["state_as_of"]) == (True, 1), (code, dead.text)
    [told] = notices(dead)
    assert re.search(r"Variables are as after cell 1; run cells \d+.\d+ again", told)
    assert "Files were not rolled back" in told
    return dead


async def each_death(*flags: str) -> None:
    async with serving("--allow", "*", "--warm", "0", "--grace", "0.3", *flags) as agent:
        await agent.run(MODEL)
        asked = await agent.run("1", checkpoint=True)
        assert not notices(asked), asked.text
        for name, code in DEATHS.items():
            await agent.run(CHANGES)
            dead = await die(agent, code)
            assert "y" in dead.cell["lost"], name
            assert (await agent.run(SEEN)).text == EXPECTED, name
        await agent.run(CHANGES)
        await die(agent, DEAF, timeout=0.5)
        assert (await agent.run(SEEN)).text == EXPECTED


async def test_a_session_survives_every_death() -> None:
    await each_death()


@pytest.mark.full
@pytest.mark.parametrize("python", ["3.10", "3.12", "3.13"])
async def test_a_session_survives_every_death_on_other_versions_of_python(python: str) -> None:
    await each_death("--python", python)


LIBRARIES = {
    "numpy": (
        "import numpy as np\na = np.arange(250000.).reshape(500, 500); b = a @ a",
        "float(b.sum())",
        "float((a @ a).sum())",
    ),
    "numpy's generators": (
        (
            "import numpy as np\nnew, old = np.random.default_rng(1), np.random.RandomState(1)\n"
            "np.random.seed(3)"
        ),
        "new.random(), old.rand(), np.random.rand()",
        "np.random.default_rng().random() != np.random.default_rng().random()",
    ),
    "pandas": (
        "import pandas as pd\ndf = pd.DataFrame({'k': [1, 1, 2], 'v': [1., 2., 3.]})",
        "df.groupby('k').v.sum().to_dict()",
        "df.merge(df, on='k').shape",
    ),
    "pyarrow": (
        (
            "import pyarrow as pa, pyarrow.parquet as pq\n"
            "pq.write_table(pa.table({'a': list(range(9999))}), 't'); t = pq.read_table('t')"
        ),
        "t.num_rows, t['a'][77].as_py()",
        "pq.read_table('t').group_by('a').aggregate([]).num_rows",
    ),
    "scikit-learn": (
        (
            "import numpy as np\nfrom sklearn.cluster import KMeans\n"
            "from sklearn.ensemble import HistGradientBoostingClassifier as Trees\n"
            "x = np.random.RandomState(0).rand(2000, 5); y = x[:, 0] > .5\n"
            "m = Trees(max_iter=9).fit(x, y); _ = m.predict_proba(x)"
        ),
        "float(m.predict_proba(x)[:, 0].sum())",
        "Trees(max_iter=9).fit(x, y).score(x, y) > .5, KMeans(3, n_init=1).fit(x).inertia_ > 0",
    ),
    "scipy": (
        "import numpy as np, scipy.linalg as sl\nlu = sl.lu_factor(np.eye(300) * 3 + 1)",
        "float(lu[0].sum())",
        "float(sl.svdvals(np.eye(300))[0])",
    ),
    "lightgbm": (
        (
            "import lightgbm as lgb, numpy as np\nx = np.random.RandomState(0).rand(2000, 5)\n"
            "g = lgb.LGBMRegressor(n_estimators=9, verbose=-1).fit(x, x[:, 0])"
        ),
        "round(float(g.predict(x).sum()), 6)",
        "lgb.LGBMRegressor(n_estimators=9, verbose=-1).fit(x, x[:, 0]).predict(x).shape",
    ),
    "matplotlib": (
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots(); ax.plot([1]); plt.close(fig)",
        "len(ax.lines)",
        "fig.savefig('f.png')",
    ),
    "sqlite": (
        (
            "import sqlite3\nc = sqlite3.connect(':memory:'); c.execute('create table t (a)')\n"
            "c.execute('insert into t values (5)')"
        ),
        "c.execute('select a from t').fetchall()",
        "c.execute('insert into t values (6)').rowcount",
    ),
    "asyncio": (
        (
            "import asyncio\nhits = []\nasync def tick():\n  while True: hits.append(1); "
            "await asyncio.sleep(.01)\ntask = asyncio.create_task(tick()); await asyncio.sleep(.1)"
        ),
        "task.done()",
        "hits.clear(), await asyncio.sleep(.3), len(hits) > 2",
    ),
    "logging": (
        (
            "import io, logging\nout, log = io.StringIO(), logging.getLogger('q')\n"
            "log.addHandler(logging.StreamHandler(out)); log.propagate = False; log.warning('one')"
        ),
        "out.getvalue()",
        "log.warning('two'), out.getvalue()",
    ),
    "shared memory": (
        (
            "from multiprocessing.shared_memory import SharedMemory\nm = SharedMemory(create=True, "
            "size=4096); m.buf[:3] = b'abc'"
        ),
        "bytes(m.buf[:3])",
        "m.buf.__setitem__(0, 1)",
    ),
}
"""Cells that make something, show it, and use the library again: shown is what was before."""
NAMED = {
    "polars_runtime": "import polars as pl\nx = pl.DataFrame({'a': [1]}).lazy().collect()",
    "duckdb": "import duckdb\nx = duckdb.connect(); x.execute('create table t (a int)')",
    "cv2": (
        "import cv2, numpy as np\nx = np.ones((999, 999, 3), 'u1')\n"
        "x = cv2.GaussianBlur(x, (15, 15), 0)"
    ),
    "numba.np.ufunc.omppool": (
        "import numba, numpy as np\n@numba.njit(parallel=True)\ndef f(a):\n  s = 0.\n"
        "  for i in numba.prange(a.size): s += a[i]\n  return s\nx = f(np.ones(999))"
    ),
    "ExecutorManagerThread": (
        "from joblib import Parallel, delayed\n"
        "x = Parallel(n_jobs=2)(delayed(abs)(-i) for i in range(9))"
    ),
    "ThreadPoolExecutor": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "x = ThreadPoolExecutor(2); x.submit(abs, 1).result()"
    ),
    "asyncio_0": "import asyncio\nx = await asyncio.to_thread(abs, 1)",
    "QueueFeederThread": "import multiprocessing as mp\nx = mp.Queue(); x.put(1)",
}
"""Threads and objects that the answer names, and cells that create them."""
PACKAGES = (
    "numpy,pandas,pyarrow,scikit-learn,scipy,lightgbm,matplotlib,polars,duckdb,numba,"
    "opencv-python-headless"
)


@pytest.mark.full
async def test_what_every_library_has_made_comes_back_or_is_named_before() -> None:
    async with serving("--allow", PACKAGES, "--warm", "1", "--max-sessions", "40") as agent:
        for number, (name, (make, show, use)) in enumerate(LIBRARIES.items()):
            session = f"comes-back-{number}"
            await agent.call("create_session", name=session)
            made = await agent.run(make, session=session, timeout=300, wait=600)
            assert made.status == "ok", (name, made.text)
            asked = await agent.run("import os", session=session, checkpoint=True)
            assert not notices(asked), (name, asked.text)
            before = await agent.run(show, session=session)
            await die(agent, "os.abort()", session=session)
            await agent.run("import os", session=session)
            await die(agent, "os.kill(os.getpid(), 9)", session=session)
            after = await agent.run(show, session=session, timeout=60)
            assert (after.status, after.text) == ("ok", before.text), name
            again = await agent.run(use, session=session, timeout=60)
            assert again.status == "ok", (name, again.text)
            await agent.call("close_session", session=session)
        for number, (name, make) in enumerate(NAMED.items()):
            session = f"named-{number}"
            await agent.call("create_session", name=session)
            made = await agent.run(make, session=session, timeout=300, wait=600)
            assert made.status == "ok", (name, made.text)
            asked = await agent.run("import os", session=session, checkpoint=True)
            assert name in "".join(notices(asked)), (name, asked.text)
            dead = await agent.run("os.abort()", session=session)
            assert not dead.cell["state_kept"]
            assert "x" in dead.cell["lost"], name
            await agent.call("close_session", session=session)


ENDED_BY_AN_INTERRUPT = {
    "signal.signal(signal.SIGINT, signal.SIG_DFL)": "was killed by SIGINT when it was interrupted",
    "signal.signal(signal.SIGINT, lambda *_: os._exit(3))": (
        "exited with code 3 when it was interrupted"
    ),
}


@pytest.mark.parametrize(("handler", "words"), ENDED_BY_AN_INTERRUPT.items())
async def test_a_kernel_that_its_interrupt_ends_is_not_said_to_have_gone_on(
    handler: str, words: str
) -> None:
    async with serving("--allow", "*", "--grace", "30") as notebook:
        answer = await notebook.run(
            f"import os, signal, time\n{handler}\nwhile True: time.sleep(0.1)", timeout=0.5
        )
        assert answer.status == "killed"
        assert words in answer.text
        assert "did not stop" not in answer.text
