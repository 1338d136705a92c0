"""The profiles through a real client: what each refuses, and that ordinary code is left alone."""

from __future__ import annotations

import pytest

from kernel_mcp.policy import DATA_MODULES
from tests.integration.agent import ANALYSIS
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

STRICT_MODULES = (
    "collections, datetime, itertools, math, queue, random, re, stat, statistics, time, unicodedata"
)
DENIED = {
    "open": "open('x.txt', 'w')",
    "eval": "eval('1 + 1')",
    "exec": "exec('x = 1')",
    "compile": "compile('1', 'x', 'eval')",
    "input": "input()",
    "breakpoint": "breakpoint()",
    "globals": "globals()",
    "vars": "vars()",
    "__import__": "__import__('math')",
}
ORDINARY = """
import datetime, math, random, re, statistics
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterable
from itertools import islice

Point = namedtuple("Point", "x y")
class Model:
    def eval(self): return "evaluated"
    def open(self): return "opened"
pattern = re.compile(r"(\\d+)-(\\d+)")
assert pattern.match("12-34").groups() == ("12", "34")
assert Model().eval() == "evaluated" and Model().open() == "opened"
assert datetime.datetime.strptime("2024-01-02", "%Y-%m-%d").year == 2024
assert Counter("aab").most_common(1) == [("a", 2)]
assert math.isclose(statistics.mean([1, 2, 3]), 2)
assert isinstance(Point(1, 2), Iterable) and sorted([3, 1, 2], key=lambda n: -n) == [3, 2, 1]
print(sum(islice((n * n for n in range(100)), 10)), f"{math.pi:.3f}")
"""


async def test_strict_computes_with_its_modules(servers: Servers) -> None:
    async with servers.agent("--profile", "strict") as notebook:
        assert (await notebook.run(f"import {STRICT_MODULES}\nmath.factorial(5)")).text == "120"
        answer = await notebook.run(ORDINARY)
        assert answer.text == "285 3.142"
        answer = await notebook.run("import json")
        assert "import of 'json' is not allowed" in answer.text
        info = (await notebook.call("info")).data
        assert "math" in info["allowed_imports"]
        assert "json" not in info["allowed_imports"]


async def test_strict_refuses_its_builtins_before_anything_runs(servers: Servers) -> None:
    async with servers.agent("--profile", "strict") as notebook:
        for name, code in DENIED.items():
            answer = await notebook.run(f"ran = True\n{code}")
            assert answer.status == "error", name
            assert f"{name} is not allowed in this session" in answer.text
            assert "line 2, column 1" in answer.text
        assert "NameError" in (await notebook.run("ran")).text
        report = (await notebook.call("check_syntax", code="eval('1')")).data
        assert report["valid"] is False
        assert report["diagnostics"][0]["kind"] == "builtin"


async def test_strict_refuses_its_builtins_where_the_check_cannot_see_them(
    servers: Servers,
) -> None:
    module = "\n\n".join(
        f"def try_{name.strip('_')}():\n    return {code}" for name, code in DENIED.items()
    )
    async with servers.agent("--profile", "strict") as notebook:
        await notebook.call("write_file", path="helper.py", content=f"import math\n{module}\n")
        assert (await notebook.run("import helper\nhelper.math.floor(2.5)")).text == "2"
        for name in DENIED:
            answer = await notebook.run(f"helper.try_{name.strip('_')}()")
            assert answer.status == "error", name
            assert "BuiltinNotAllowedError" in answer.text
            assert f"{name} is not allowed in this session" in answer.text
            assert "--profile default" in answer.text
        answer = await notebook.run("from helper import *\nlist(map(type(helper), ['a']))")
        assert answer.status == "ok"


async def test_strict_still_holds_after_the_names_of_the_session_are_reset(
    servers: Servers,
) -> None:
    async with servers.agent("--profile", "strict") as notebook:
        await notebook.call(
            "write_file", path="helper.py", content="def read(path):\n    return open(path)\n"
        )
        await notebook.run("%reset -f")
        answer = await notebook.run("import helper\nhelper.read('helper.py')")
        assert "open is not allowed in this session" in answer.text
        answer = await notebook.run("list(map(__builtin__.open, ['helper.py']))")
        assert "open is not allowed in this session" in answer.text


@pytest.mark.ways
async def test_in_strict_sessions_libraries_go_on_working(servers: Servers) -> None:
    flags = ("--profile", "strict", "--allow", ANALYSIS)
    async with servers.agent(*flags) as notebook:
        answer = await notebook.run(
            "import matplotlib.pyplot as plt\nimport pandas as pd\n"
            "frame = pd.DataFrame({'os': [1, 2, 3]})\n"
            "print(frame.query('os > 1').eval('os * 2').tolist())\n"
            "plt.plot(frame.os)\nplt.title('$x^2$')\nplt.show()"
        )
        assert answer.status == "ok", answer.text
        assert "[4, 6]" in answer.text
        assert [image.mime_type for image in answer.images] == ["image/png"]


FREE = [
    "df = pd.DataFrame({'os': ['linux', 'mac'], 'sys': [1, 2]})\ndf.os.tolist()",
    "df['os'].str.upper().tolist(), df.sys.sum()",
    "df.query('sys > 1').os.iloc[0]",
    "df.eval('double = sys * 2').double.tolist()",
    "pd.eval('1 + 2')",
    "re.compile('a+').findall('caaat')",
    "sys_time = 3; os_name = 'x'; sys_time",
    "subprocess_count = {'os': 1}; subprocess_count['os']",
    "class Model:\n    def eval(self): return self\n    os = 1\nModel().eval().os",
    "df.to_csv('a.csv', index=False); pd.read_csv('a.csv').os.tolist()",
    "open('notes.txt', 'w').write('x'); eval('1 + 1')",
    "np.savez('a.npz', x=np.arange(3)); np.load('a.npz')['x'].sum()",
    "json.dumps({'import os': True})",
    "print('import os; os.system()')",
    "df.groupby('os').agg(total=('sys', 'sum')).loc['linux', 'total']",
    "df.plot(x='os', y='sys', kind='bar'); plt.savefig('a.png'); plt.close()",
    "Path('a.csv').read_text().splitlines()[0]",
    "np.random.default_rng(0).normal(size=3).shape, np.linalg.norm([3, 4])",
    "pd.to_datetime(['2024-01-01']).strftime('%d').tolist()",
    "with Path('b.txt').open('w') as file: file.write('b')",
    "from IPython.display import HTML, display; display(HTML('<b>x</b>'))",
    "%time sum(range(10))",
    "import sqlite3; sqlite3.connect('a.db').execute('select 1').fetchone()",
    "from concurrent.futures import ThreadPoolExecutor as T; list(T(2).map(abs, [-1, -2]))",
]


@pytest.mark.ways
async def test_the_guarded_profile_refuses_no_ordinary_data_work(servers: Servers) -> None:
    async with servers.agent("--profile", "guarded", "--allow", ANALYSIS) as notebook:
        await notebook.run(
            "import json, re\nfrom pathlib import Path\nimport matplotlib.pyplot as plt\n"
            "import numpy as np\nimport pandas as pd"
        )
        for code in FREE:
            answer = await notebook.run(code)
            assert answer.status == "ok", f"{code}\n{answer.text}"


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_packages_of_data_analysis_are_named_as_they_are_imported(servers: Servers) -> None:
    async with servers.agent("--allow", ",".join(sorted(DATA_MODULES))) as notebook:
        answer = await notebook.run(f"import {', '.join(DATA_MODULES)}", wait=500)
        assert answer.status == "ok", answer.text
        answer = await notebook.run(
            "frame = pandas.DataFrame({'a': [1.0, 2.0]})\nframe.to_excel('a.xlsx')\n"
            "frame.to_parquet('a.parquet')\nfrom sklearn.linear_model import LinearRegression\n"
            "LinearRegression().fit([[1], [2]], [2, 4]).predict([[3]]).round(6)"
        )
        assert "6." in answer.text, answer.text
        answer = await notebook.run(
            "import statsmodels.api as sm\nframe['b'] = [2.0, 3.0]\n"
            "print(frame.to_markdown(), len(frame.style.to_html()) > 99, tqdm.tqdm)\n"
            "print(pandas.read_html('a.html' if frame.to_html('a.html') else 'a.html')[0].shape)\n"
            "sm.OLS(frame.b, frame.a).fit().params.a.round(1)"
        )
        assert "|    |   a |" in answer.text, answer.text
        assert answer.text.endswith("np.float64(1.6)")


async def test_without_a_sandbox_the_default_is_the_guarded_list_and_says_so(
    servers: Servers,
) -> None:
    async with servers.agent("--sandbox", "none", "--allow-install", "*") as notebook:
        assert "Others are refused" in str(notebook.client.instructions)
        policy = (await notebook.call("info")).data["policy"]
        assert policy.startswith("guarded, which --sandbox none makes of default")
        assert "There is no sandbox" in policy
        assert (await notebook.run("import math, json\nmath.floor(2.5)")).text == "2"
        for code, step in {
            "import os": "--allow os (or --allow '*')",
            "!ls": "--allow '*'",
            "import seaborn": 'install(packages=["seaborn"]) adds it to this session',
            "exec('import sklearn')": 'install(packages=["scikit-learn"]) adds it to this session',
        }.items():
            answer = await notebook.run(code)
            assert answer.status == "error", code
            assert step in answer.text, code


WAYS_ROUND = (
    "p = [__import__('pathlib')][0]; p.os.getcwd()",
    "import random; vars(random)['_os'].getcwd()",
    "import operator, random; operator.attrgetter('_os')(random).getcwd()",
    "import timeit; timeit.timeit('import os; print(os.getcwd())', number=1)",
    "import typing\nclass A: x: '__import__(\"os\").getcwd()'\ntyping.get_type_hints(A)",
)
"""Some of those that docs/policy.md owns up to."""


async def test_the_ways_round_that_the_papers_name_are_ways_round_and_end_in_the_sandbox(
    servers: Servers,
) -> None:
    async with servers.agent("--profile", "guarded") as notebook:
        for code in WAYS_ROUND:
            assert "/workspace" in (await notebook.call("execute", code=code)).text, code
