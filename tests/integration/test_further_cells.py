"""Further faults and nasty clean sessions, written after `verify` and against it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.servers import Servers
from tests.integration.verified import (
    Case,
    Delete,
    Edit,
    Move,
    Remove,
    Rerun,
    Reset,
    Write,
    verified,
)

pytestmark = [pytest.mark.anyio, pytest.mark.ways]

FAULTS = [
    Case(
        "default-arg",
        (
            "def f(x, acc=[]):\n    acc.append(x)\n    return list(acc)",
            "f(1)",
            Rerun(place=1, source=""),
        ),
        "repeated",
        "differs",
    ),
    Case(
        "monkeypatch-deleted",
        ("import math", "math.tau = 3", "math.tau * 2", Delete(place=1)),
        "deleted",
        "differs",
    ),
    Case(
        "environ-deleted",
        ("import os", "os.environ['N_ROWS'] = '5'", "int(os.environ['N_ROWS'])", Delete(place=1)),
        "deleted",
        "failed",
    ),
    Case(
        "method-override-edited",
        (
            "class A:\n    def rate(self):\n        return 3",
            "class B(A):\n    def cost(self, n):\n        return n * self.rate()",
            "b = B()",
            "b.cost(7)",
            Edit(place=0, source="class A:\n    def rate(self):\n        return 4"),
        ),
        "edited",
        "differs",
    ),
    Case(
        "microsecond",
        ("import datetime as dt", "stamp = dt.datetime.now().microsecond", "stamp % 997"),
        "clock",
        "differs",
    ),
    Case(
        "removes-its-input",
        (
            Write(path="in.txt", content="7"),
            "int(open('in.txt').read())",
            "import os; os.remove('in.txt')",
        ),
        "file_missing",
        "failed",
    ),
    Case(
        "urandom", ("import os", "key = os.urandom(6).hex()", "key.upper()"), "entropy", "differs"
    ),
    Case(
        "small-float",
        ("rate = 0.1", "rate * 3", Edit(place=0, source="rate = 0.10000001")),
        "edited",
        "differs",
    ),
    Case(
        "yesterday",
        (
            "import datetime as dt\nback = 1",
            "str(dt.date.today() - dt.timedelta(days=back))",
            Edit(place=0, source="import datetime as dt\nback = 0"),
        ),
        "edited",
        "differs",
    ),
    Case(
        "module-changed",
        (
            Write(path="helper_mod.py", content="K = 2"),
            "import helper_mod",
            "helper_mod.K * 10",
            Write(path="helper_mod.py", content="K = 3"),
        ),
        "file_changed",
        "differs",
    ),
    Case(
        "hex-number",
        ("n = 0x401000", "print('entry at', hex(n))", Edit(place=0, source="n = 0x402000")),
        "edited",
        "differs",
    ),
    Case(
        "uuid-as-data",
        (
            "who = '6f1c2d3e-0000-4000-8000-000000000001'",
            "from IPython.display import HTML\nHTML('<td>' + who + '</td>')",
            Edit(place=0, source="who = '6f1c2d3e-0000-4000-8000-000000000002'"),
        ),
        "edited",
        "differs",
    ),
    Case(
        "lru-cache-rerun",
        (
            "import functools\n@functools.lru_cache\ndef sq(n):\n    return n * n",
            "sq(4)",
            Rerun(place=1, source=""),
            "sq.cache_info()",
        ),
        "repeated",
        "differs",
    ),
    Case(
        "generator-consumed",
        ("g = iter(range(5))", "next(g)", Rerun(place=1, source=""), "next(g)"),
        "repeated",
        "differs",
    ),
    Case(
        "global-in-func",
        ("k = 2\ndef f():\n    return k", "f()", "k = 9", "f()", Delete(place=2)),
        "deleted",
        "differs",
    ),
    Case(
        "nested-list-alias",
        ("rows = [[0] * 2] * 2", "rows[0][0] = 7", "rows", Delete(place=1)),
        "deleted",
        "differs",
    ),
    Case(
        "class-attr",
        ("class C:\n    items = []", "C().items.append(1)", "C.items", Delete(place=1)),
        "deleted",
        "differs",
    ),
    Case(
        "edited-only-comment-and-value",
        ("# rate\nr = 0.05", "100 * r", Edit(place=0, source="# rate\nr = 0.06")),
        "edited",
        "differs",
    ),
    Case(
        "json-input-gone",
        (
            Write(path="cfg.json", content='{"n": 3}'),
            "import json\ncfg = json.load(open('cfg.json'))",
            "cfg['n'] + 1",
            Remove(path="cfg.json"),
        ),
        "file_missing",
        "failed",
    ),
    Case(
        "env-time-tz",
        (
            "import os, time",
            "os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
            "time.localtime(0).tm_hour",
            Delete(place=1),
        ),
        "deleted",
        "differs",
    ),
    Case(
        "decimal-context",
        (
            "import decimal",
            "decimal.getcontext().prec = 5",
            "decimal.Decimal(1) / 3",
            Delete(place=1),
        ),
        "deleted",
        "differs",
    ),
    Case(
        "locale-sep-str",
        ("sep = ';'", "'a;b'.split(sep)", Edit(place=0, source="sep = ','")),
        "edited",
        "differs",
    ),
    Case(
        "recursion-limit",
        ("import sys", "sys.setrecursionlimit(3333)", "sys.getrecursionlimit()", Delete(place=1)),
        "deleted",
        "differs",
    ),
    Case(
        "partial-order",
        ("xs = [3]", "xs.append(1)", "xs.sort()", "xs.append(0)", "xs", Move(place=2, to=3)),
        "order",
        "differs",
    ),
    Case(
        "ns-timestamp-edit",
        (
            "import datetime as dt\nd = dt.datetime(2025, 3, 1, 12, 0)",
            "d.isoformat()",
            Edit(place=0, source="import datetime as dt\nd = dt.datetime(2025, 3, 1, 12, 5)"),
        ),
        "edited",
        "differs",
    ),
    Case(
        "print-order",
        ("names = ['b', 'a']", "names.sort()", "print(*names)", Delete(place=1)),
        "deleted",
        "differs",
    ),
    Case(
        "set-pop",
        ("s = {'red', 'green', 'blue', 'cyan', 'pink', 'gold'}", "s.pop()"),
        "hash_seed",
        "fragile",
    ),
]
CLEAN = [
    Case(
        "rename",
        (
            "open('a1.txt', 'w').write('a')",
            "import os\nos.rename('a1.txt', 'b1.txt')",
            "os.path.exists('a1.txt'), os.path.exists('b1.txt')",
        ),
    ),
    Case("mkdir", ("import os\nos.mkdir('only_once')", "os.listdir('only_once')")),
    Case("cwd", ("import os\nos.getcwd()", "from pathlib import Path\nPath('x').resolve()")),
    Case("argv", ("import sys\nsys.argv[0], len(sys.argv)", "__name__")),
    Case("date-shell", ("!date", "!date +%F")),
    Case("ls", ("open('data.txt', 'w').write('abc')", "!ls -l data.txt")),
    Case("reset-and-again", ("x = 5", "x + 1", Reset(), "x = 5\ny = x", "y + 1")),
    Case(
        "rerun-idempotent",
        (
            "x = 5",
            "y = x * 2",
            Rerun(place=0, source=""),
            Rerun(place=1, source=""),
            "y",
            Rerun(place=2, source=""),
        ),
    ),
    Case(
        "strftime",
        (
            "import time",
            "print(time.strftime('%H:%M'), time.strftime('%Y%m%d_%H%M%S'))",
            "print(f\"run_{time.strftime('%Y%m%d_%H%M%S')}.csv\")",
            "time.ctime()",
        ),
    ),
    Case(
        "display-update",
        (
            "from IPython.display import display\nh = display('one', display_id=True)",
            "h.update('two')",
            "3",
        ),
    ),
    Case(
        "exception-address",
        ("raise ValueError(object())", "class E(Exception): pass\nraise E([lambda: 1])"),
    ),
    Case(
        "inspect",
        (
            "def g(a, b=2):\n    '''Doc.'''\n    return a",
            "import inspect\nprint(inspect.getsource(g))",
            "inspect.signature(g)",
            "help(g)",
        ),
    ),
    Case(
        "pickle-shelve",
        (
            "import shelve\nwith shelve.open('s') as s:\n    s['k'] = [1]",
            "with shelve.open('s') as s:\n    r = dict(s)\nr",
        ),
    ),
    Case(
        "gc",
        (
            "import gc\n_ = gc.collect()\n'collected'",
            "class N: pass\na = N(); a.me = a\ndel a\ngc.collect() > 0",
        ),
    ),
    Case(
        "pool",
        (
            "import multiprocessing as mp",
            "with mp.get_context('fork').Pool(2) as p:\n    r = p.map(abs, range(-3, 3))\nr",
        ),
    ),
    Case("id-and-is", ("a = object()\nid(a)", "id(a) == id(a)")),
    Case(
        "warn-in-loop",
        (
            "import warnings\nfor n in range(3):\n    warnings.warn(f'w{n}')",
            "def w():\n    warnings.warn('deep')\nw()",
        ),
    ),
    Case(
        "replace-file",
        (
            "import os\nopen('t.new', 'w').write('1')\nos.replace('t.new', 't.txt')",
            "open('t.txt').read()",
            "open('t.new', 'w').write('2')\nos.replace('t.new', 't.txt')",
            "open('t.txt').read()",
        ),
    ),
    Case(
        "touch-exclusive",
        ("from pathlib import Path\nPath('flag').touch(exist_ok=False)", "Path('flag').exists()"),
    ),
    Case("whos", ("q1 = 1\nq2 = 'b'", "%who", "sorted(n for n in dir() if n.startswith('q'))")),
    Case("chained", ("a = [1]", "b = a", "b.append(2); a")),
    Case("timeit-obj", ("import timeit\nr = timeit.timeit('1', number=10) >= 0\nr",)),
    Case("closure-repr", ("def mk():\n    def inner(): pass\n    return inner\n[mk(), mk()]",)),
    Case("module-repr", ("import json, os\njson", "os.path")),
    Case(
        "np-free-random",
        ("import random\nrng = random.Random('seed')\n[rng.randrange(100) for _ in range(3)]",),
    ),
    Case("dict-of-objects", ("class P: pass\nd = {'a': P(), 'b': [P()]}\nd",)),
    Case("err-then-fix", ("int('x')", "v = int('7')\nv")),
    Case("hash-int", ("hash(5), hash(2.5), hash((1, 2))",)),
    Case("sorted-by-len", ("sorted({'aaa', 'b', 'cc'}, key=len)",)),
    Case("uuid5", ("import uuid\nuuid.uuid5(uuid.NAMESPACE_DNS, 'a')",)),
    Case("version", ("import sys\nsys.version", "sys.version_info[:2]")),
    Case(
        "stat-mtime",
        (
            "open('m.txt', 'w').write('x')",
            "import os, datetime\ndatetime.datetime.fromtimestamp(os.path.getmtime('m.txt'))",
        ),
    ),
    Case(
        "glob-sorted",
        (
            "for n in 'cab':\n    open(f'{n}.dat', 'w').close()",
            "from pathlib import Path\nsorted(p.name for p in Path('.').glob('*.dat'))",
        ),
    ),
    Case("counter", ("from collections import Counter\nCounter('mississippi').most_common()",)),
]


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in [*FAULTS, *CLEAN]])
async def test_a_fault_is_named_and_a_clean_session_reproduced(
    servers: Servers, case: Case
) -> None:
    async with servers.agent("--allow", "*", "--max-sessions", "20") as notebook:
        answer = await verified(notebook, case)
    found: dict[str, Any] = (answer.result.meta or {})["kernel-mcp/verification"]
    assert (found["verdict"], found["cause"]) == (case.verdict, case.cause), answer.text
