"""Sessions with one planted fault each, and clean ones made to be nasty: what `verify` must say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

from mcp_types import TextContent

from tests.integration.agent import Agent, Answer

BOOK = "a.ipynb"


@dataclass(frozen=True)
class Edit:
    """Replace the code of a cell in the file, as an editor does that keeps the outputs."""

    place: int
    source: str


@dataclass(frozen=True)
class Delete:
    """Delete a cell of the file."""

    place: int


@dataclass(frozen=True)
class Move:
    """Move a cell of the file to another place."""

    place: int
    to: int


@dataclass(frozen=True)
class Rerun:
    """Edit a cell, and run it again alone."""

    place: int
    source: str = ""


@dataclass(frozen=True)
class Write:
    """Write a file of the workspace."""

    path: str
    content: str


@dataclass(frozen=True)
class Remove:
    """Remove a file of the workspace by a cell outside of the notebook."""

    path: str


@dataclass(frozen=True)
class Reset:
    """Give the session a fresh kernel."""


@dataclass(frozen=True)
class Run:
    """Run code that stays in no notebook."""

    code: str


Step: TypeAlias = "str | Edit | Delete | Move | Rerun | Write | Remove | Reset | Run"


@dataclass(frozen=True)
class Case:
    """Steps in their order; a text is a cell that is run and appended to the notebook.

    verdict, cause, cell  as the answer has them; `cell` is empty for any
    """

    name: str
    steps: tuple[Step, ...]
    cause: str = ""
    verdict: str = "reproduced"
    cell: str = ""


async def verified(notebook: Agent, case: Case) -> Answer:
    """Run a case in a session of its own, and return what `verify` answers."""
    opened = await notebook.call("create_session")
    session = str(opened.data["session"])
    try:
        await notebook.call("open_notebook", path=BOOK, session=session)
        for step in case.steps:
            await _done(notebook, session, step)
        return await notebook.call("verify", path=BOOK, session=session, wait=300)
    finally:
        await notebook.call("close_session", session=session)


async def _done(notebook: Agent, session: str, step: Step) -> None:
    if isinstance(step, str):
        await notebook.call("execute", code=step, session=session)
    elif isinstance(step, Write):
        await notebook.call("write_file", path=step.path, content=step.content, session=session)
    elif isinstance(step, Reset):
        await notebook.call("reset", session=session)
    elif isinstance(step, (Run, Remove)):
        code = step.code if isinstance(step, Run) else f"import os; os.remove({step.path!r})"
        await notebook.call("open_notebook", path="", session=session)
        await notebook.call("execute", code=code, session=session)
        await notebook.call("open_notebook", path=BOOK, session=session)
    else:
        book = await _read(notebook, session)
        cells = book["cells"]
        if isinstance(step, Delete):
            del cells[step.place]
        elif isinstance(step, Move):
            cells.insert(step.to, cells.pop(step.place))
        else:
            cells[step.place]["source"] = step.source or cells[step.place]["source"]
        content = json.dumps(book)
        await notebook.call("write_file", path=BOOK, content=content, session=session)
        if isinstance(step, Rerun):
            name = cells[step.place]["id"]
            await notebook.call("run_cells", path=BOOK, cells=[name], session=session)


async def _read(notebook: Agent, session: str) -> dict[str, Any]:
    answer = await notebook.call("read_file", path=BOOK, session=session, limit=100_000)
    first = answer.result.content[0]
    assert isinstance(first, TextContent)
    found: dict[str, Any] = json.loads(first.text)
    return found


SET = "{'alpha', 'beta', 'gamma', 'delta', 'epsilon', 'zeta', 'eta', 'theta'}"
FILES = """import os
os.makedirs("d", exist_ok=True)
for n in "hgfedcba":
    open(f"d/{n}", "w").close()"""

THREADS = """import threading, hashlib
out = []
def work(n):
    hashlib.sha256(bytes(2_000_000)).digest()
    out.append(n)
all_of_them = [threading.Thread(target=work, args=(n,)) for n in range(40)]
for each in all_of_them:
    each.start()
for each in all_of_them:
    each.join()
out"""

FAULTS = (
    Case(
        "edited-threshold",
        ("thr = 500", "thr + 1", Edit(0, "thr = 600")),
        "edited",
        "differs",
        "cell 2",
    ),
    Case("edited-cell-itself", ("x = 2\nx", Edit(0, "x = 3\nx")), "edited", "differs", "cell 1"),
    Case(
        "edited-function",
        ("def f(a):\n    return a", "f(2)", Edit(0, "def f(a):\n    return -a")),
        "edited",
        "differs",
        "cell 2",
    ),
    Case(
        "edited-two-apart",
        ("a = 1", "b = a + 1", "b", Edit(0, "a = 5")),
        "edited",
        "differs",
        "cell 3",
    ),
    Case(
        "edited-and-run-again", ("a = 1", "a + 1", Rerun(0, "a = 7")), "edited", "differs", "cell 2"
    ),
    Case(
        "edited-import",
        ("from math import floor as f", "f(1.5)", Edit(0, "from math import ceil as f")),
        "edited",
        "differs",
        "cell 2",
    ),
    Case("edited-name-away", ("x = 1", "x", Edit(0, "y = 1")), "edited", "failed", "cell 2"),
    Case("deleted-value", ("a = 1", "a = 2", "a", Delete(1)), "deleted", "differs", "cell 2"),
    Case(
        "deleted-definition",
        ("stop = 5", "list(range(stop))", Delete(0)),
        "deleted",
        "failed",
        "cell 1",
    ),
    Case("deleted-import", ("import math", "math.pi", Delete(0)), "deleted", "failed", "cell 1"),
    Case(
        "deleted-mutation",
        ("a = []", "a.append(1)", "a", Delete(1)),
        "deleted",
        "differs",
        "cell 2",
    ),
    Case("deleted-in-the-shell", ("a = 1", Run("a = 10"), "a"), "deleted", "differs", "cell 2"),
    Case(
        "deleted-shadowing", ("a = [5]", "sum = len", "sum(a)", Delete(1)), "deleted", "", "cell 2"
    ),
    Case(
        "deleted-setting",
        ("import json", "class A:\n    n = 1", "A.n = 5", "A.n", Delete(2)),
        "deleted",
        "differs",
        "cell 3",
    ),
    Case("order-moved-up", ("a = 1", "a = a + 1", "a", Move(2, 1)), "order", "differs", ""),
    Case("order-defined-below", ("a = 1", "a + 1", Move(0, 1)), "order", "failed", "cell 1"),
    Case(
        "order-swapped",
        ("a = 1", "a = a * 2", "a = a + 3", "a", Move(2, 1)),
        "order",
        "differs",
        "cell 4",
    ),
    Case("repeated-counter", ("n = 0", "n += 1", Rerun(1), "n"), "repeated", "differs", ""),
    Case(
        "repeated-append",
        ("a = []", "a.append(len(a))", Rerun(1), "a"),
        "repeated",
        "differs",
        "cell 3",
    ),
    Case(
        "earlier-kernel-name",
        (Run("w = 3"), "w + 1", Reset(), "v = 2"),
        "earlier_kernel",
        "failed",
        "cell 1",
    ),
    Case(
        "file-changed",
        (
            Write("in.csv", "1,2,3"),
            "sum(map(int, open('in.csv').read().split(',')))",
            Write("in.csv", "1,2,4"),
        ),
        "file_changed",
        "differs",
        "cell 1",
    ),
    Case(
        "file-changed-in-between",
        (Write("in.csv", "1"), "a = open('in.csv').read()", "a * 3", Write("in.csv", "2")),
        "file_changed",
        "differs",
        "cell 2",
    ),
    Case(
        "file-gone",
        (Write("in.csv", "1"), "open('in.csv').read()", Remove("in.csv")),
        "file_missing",
        "failed",
        "cell 1",
    ),
    Case("random-unseeded", ("import random", "random.random()"), "generator", "differs", "cell 2"),
    Case(
        "random-far-away",
        ("import random\nr = random.randint(0, 10**9)", "s = r % 10**8", "s"),
        "generator",
        "differs",
        "cell 3",
    ),
    Case(
        "random-shuffle",
        ("import random\na = list(range(50))\nrandom.shuffle(a)\na",),
        "generator",
        "differs",
        "cell 1",
    ),
    Case(
        "random-own",
        ("import random\nrng = random.Random()", "rng.random()"),
        "generator",
        "differs",
        "cell 2",
    ),
    Case(
        "entropy-uuid",
        ("import uuid", "int(uuid.uuid4()) % 10**12"),
        "entropy",
        "differs",
        "cell 2",
    ),
    Case(
        "entropy-secrets",
        ("import secrets\nsecrets.randbelow(10**15)",),
        "entropy",
        "differs",
        "cell 1",
    ),
    Case(
        "clock-seconds",
        ("import time", "int(time.time_ns()) % 100_000_007"),
        "clock",
        "differs",
        "cell 2",
    ),
    Case(
        "clock-in-a-name",
        ("import time\nt = time.perf_counter_ns() % 1_000_003", "[t, 'x']"),
        "clock",
        "differs",
        "cell 2",
    ),
    Case("threads-order", (THREADS,), "threads", "differs", "cell 1"),
    Case("hash-set", (f"s = {SET}", "list(s)"), "hash_seed", "fragile", "cell 2"),
    Case("hash-first", (f"next(iter({SET}))\n','.join({SET})",), "hash_seed", "fragile", "cell 1"),
    Case("hash-itself", ("hash('a text') % 1000",), "hash_seed", "fragile", "cell 1"),
    Case("folder-listing", (FILES, "os.listdir('d')"), "folder_order", "fragile", "cell 2"),
    Case(
        "folder-glob", (FILES, "import glob\nglob.glob('d/*')"), "folder_order", "fragile", "cell 2"
    ),
    Case(
        "folder-first",
        (FILES, "from pathlib import Path\n[p.name for p in Path('d').iterdir()]"),
        "folder_order",
        "fragile",
        "cell 2",
    ),
    Case(
        "edited-to-nothing", ("x = 1", Edit(0, "x = undefined_name"), "x"), "edited", "failed", ""
    ),
    Case(
        "edited-module-away",
        ("x = 1\nx", Edit(0, "import no_such_module_here\nx = 1\nx")),
        "edited",
        "failed",
        "cell 1",
    ),
)
"""Sessions whose notebooks do not give what was recorded."""

_CLEAN: tuple[tuple[Any, ...], ...] = (
    ("arithmetic", "x = 2", "x ** 10"),
    ("addresses", "class A: pass", "a = A()\na", "print(a, object())", "lambda: 0"),
    ("bound-method", "class A:\n    def f(self): pass", "A().f"),
    ("generator", "(x for x in 'ab')", "iter([1])", "map(str, [1])"),
    ("time-magic", "%time sum(range(1000))", "%timeit -n 2 -r 2 sum(range(10))"),
    ("time-cell-magic", "%%time\nx = 1\nprint(x)"),
    ("elapsed", "import time\nt = time.time()\nprint(f'took {time.time() - t:.3f} s')"),
    ("now", "import datetime\nprint(datetime.datetime.now())"),
    ("today", "import datetime\ndatetime.date.today()"),
    ("temp-folder", "import tempfile\nd = tempfile.mkdtemp()\nprint(d)\nd"),
    ("temp-file", "import tempfile\nf = tempfile.NamedTemporaryFile()\nprint(f.name)"),
    ("pid", "import os\nprint('pid', os.getpid())"),
    ("threads", "import threading\nprint(threading.current_thread())"),
    (
        "thread-sum",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p:\n    r = list(p.map(lambda n: n * n, range(20)))\nr",  # noqa: E501
    ),
    ("bash", "%%bash\necho one\necho two"),
    ("shell-line", "!echo hello", "out = !echo a b\nout"),
    ("set-repr", "{3, 1, 2}", "{'b', 'a', 'c', 'd', 'e', 'f'}"),
    ("frozenset", "frozenset(['x', 'y', 'z', 'w'])"),
    ("sorted-set", f"sorted({SET})"),
    ("dict-order", "{'b': 1, 'a': 2}", "dict(zip('abc', range(3)))"),
    ("seeded", "import random\nrandom.seed(3)", "[random.random() for _ in range(3)]"),
    ("seeded-own", "import random\nrng = random.Random(5)\nrng.random()"),
    ("error", "1 / 0", "x = 5\nx"),
    ("error-in-function", "def f(a):\n    return a['k']", "f({})", "f([1])"),
    ("writes-and-reads", "open('o.txt', 'w').write('abc')", "open('o.txt').read()"),
    ("appends", "open('log.txt', 'a').write('1\\n')", "open('log.txt').read()"),
    (
        "writes-once",
        "import os\nnew = not os.path.exists('o')\nif new:\n    open('o', 'x').write('1')\nnew",
    ),
    ("makes-folder", "import os\nos.mkdir('made')", "os.path.isdir('made')"),
    (
        "reads-input",
        Write("in.json", '{"k": [1, 2]}'),
        "import json\njson.load(open('in.json'))['k']",
    ),
    (
        "progress",
        "import sys, time\nfor n in range(5):\n    print(f'\\r{n}/5', end='')\nprint()",
    ),
    ("stderr", "import sys\nprint('a', file=sys.stderr)\nprint('b')"),
    ("warning", "import warnings\nwarnings.warn('careful')\n1"),
    (
        "html",
        "from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))\nHTML('<i>y</i>')",
    ),
    (
        "svg",
        "from IPython.display import SVG\nSVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>')",
    ),
    ("class-redefined", "class A:\n    n = 1", "class A:\n    n = 2", "A.n"),
    ("late-binding", "def f():\n    return g()", "def g():\n    return 4", "f()"),
    ("await", "import asyncio\nawait asyncio.sleep(0)\n'done'"),
    (
        "async-tasks",
        "import asyncio\nasync def f(n):\n    await asyncio.sleep(0)\n    return n\nawait asyncio.gather(*map(f, range(5)))",  # noqa: E501
    ),
    (
        "subprocess",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True).stdout",  # noqa: E501
    ),
    ("environment", "import os\nos.environ['X'] = '1'", "os.environ['X']"),
    ("unicode", "'ä' * 3", "print('→', '\\u200b', '🙂')"),
    ("long-output", "print('\\n'.join(map(str, range(3000))))"),
    ("nothing", "x = None", "x", "pass"),
    ("out-history", "41 + 1", "_ + 1", "Out[1]"),
    ("weakref", "import weakref\nclass A: pass\na = A()\nweakref.ref(a)"),
    ("decimals", "0.1 + 0.2", "[x / 7 for x in range(5)]"),
    (
        "traceback",
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    print(traceback.format_exc())",  # noqa: E501
    ),
    (
        "logging",
        "import logging\nlogging.basicConfig(format='%(asctime)s %(message)s')\nlogging.warning('x')",  # noqa: E501
    ),
)
CLEAN = tuple(Case(str(name), cells) for name, *rest in _CLEAN for cells in [tuple(rest)])
"""Sessions that give the same again, although their output never is quite the same."""

LATER = (
    Case(
        "edited-method",
        (
            "class M:\n    def run(self, x):\n        return x * 2",
            "m = M()",
            "m.run(4)",
            Edit(0, "class M:\n    def run(self, x):\n        return x * 3"),
        ),
        "edited",
        "differs",
        "cell 3",
    ),
    Case(
        "edited-middle-of-chain",
        (
            "a = [1, 2, 3]",
            "b = [x * 2 for x in a]",
            "c = sum(b)",
            "print('total', c)",
            Edit(1, "b = [x * 3 for x in a]"),
        ),
        "edited",
        "differs",
        "cell 4",
    ),
    Case(
        "deleted-two",
        ("a = 1", "a += 1", "a += 1", "a", Delete(1), Delete(1)),
        "deleted",
        "differs",
        "cell 2",
    ),
    Case(
        "deleted-del",
        ("a = [3, 1, 2]", "a.sort()", "a[0]", Delete(1)),
        "deleted",
        "differs",
        "cell 2",
    ),
    Case(
        "deleted-env",
        ("import os", "os.environ['MODE'] = 'x'", "os.environ.get('MODE')", Delete(1)),
        "deleted",
        "differs",
        "cell 2",
    ),
    Case(
        "chdir-deleted",
        (
            "import os\nos.makedirs('sub', exist_ok=True)",
            "os.chdir('sub')",
            "os.path.basename(os.getcwd())",
            Delete(1),
        ),
        "deleted",
        "differs",
        "cell 2",
    ),
    Case(
        "order-with-file",
        ("open('f','w').write('1')", "open('f','w').write('2')", "open('f').read()", Move(2, 1)),
        "order",
        "differs",
        "cell 2",
    ),
    Case("order-print", ("x = 1", "x = 2", "print(x)", Move(1, 2)), "order", "differs", "cell 2"),
    Case(
        "repeated-list",
        ("xs = [1]", "xs = xs + xs", Rerun(1), Rerun(1), "len(xs)"),
        "repeated",
        "differs",
        "",
    ),
    Case(
        "file-json",
        (
            Write("c.json", '{"k": 1}'),
            "import json\nc = json.load(open('c.json'))",
            "c['k'] + 1",
            Write("c.json", '{"k": 2}'),
        ),
        "file_changed",
        "differs",
        "cell 2",
    ),
    Case(
        "file-module",
        (Write("helper.py", "V = 1"), "import helper", "helper.V", Write("helper.py", "V = 222")),
        "file_changed",
        "differs",
        "cell 2",
    ),
    Case(
        "file-gone-later",
        (
            Write("d.txt", "abc"),
            "from pathlib import Path\np = Path('d.txt')",
            "p.read_text()",
            Remove("d.txt"),
        ),
        "file_missing",
        "failed",
        "cell 2",
    ),
    Case(
        "random-choice",
        ("from random import choice, sample", "choice(range(10**6))"),
        "generator",
        "differs",
        "cell 2",
    ),
    Case(
        "random-in-func",
        ("import random\ndef draw():\n    return random.gauss(0, 1)", "draw()"),
        "generator",
        "differs",
        "cell 2",
    ),
    Case(
        "clock-now",
        ("from datetime import datetime\nstart = datetime.now()", "start.microsecond"),
        "clock",
        "differs",
        "cell 2",
    ),
    Case(
        "clock-ns",
        ("import time\ndef t():\n    return time.time_ns() % 997", "[t() for _ in range(5)]"),
        "clock",
        "differs",
        "cell 2",
    ),
    Case(
        "hash-dictset",
        (
            "words = 'a quick brown fox jumps over the lazy dog again'.split()",
            "d = {w: i for i, w in enumerate(set(words))}",
            "d",
        ),
        "hash_seed",
        "fragile",
        "cell 3",
    ),
    Case(
        "hash-group",
        ("from collections import Counter\nc = Counter(set('abcdefghijk'))", "c.most_common(3)"),
        "hash_seed",
        "fragile",
        "cell 2",
    ),
    Case(
        "walk",
        (
            "import os\nfor n in 'zyxwvu':\n    os.makedirs(f't/{n}', exist_ok=True)",
            "[d for d, _, _ in os.walk('t')]",
        ),
        "folder_order",
        "fragile",
        "cell 2",
    ),
    Case(
        "pid-data",
        ("import os", "os.getpid() * 7 + id(os) % 1000003"),
        "unknown",
        "differs",
        "cell 2",
    ),
    Case(
        "uuid-str",
        ("from uuid import uuid4\nn = uuid4().int % 10**9", "n + 1"),
        "entropy",
        "differs",
        "cell 2",
    ),
    Case(
        "two-causes",
        ("import random, time", "random.random() + time.time() % 1"),
        "unknown",
        "differs",
        "cell 2",
    ),
    Case(
        "undefined-below",
        ("def f():\n    return helper_value", "helper_value = 2", "f()", Move(2, 1)),
        "order",
        "failed",
        "cell 2",
    ),
    Case("error-fixed-up", ("d = {}", "d['k']", "d['k'] = 1", Move(2, 1)), "order", "differs", ""),
)
"""Faults that were written after the judge."""
