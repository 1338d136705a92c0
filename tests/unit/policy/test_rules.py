from __future__ import annotations

import time

import pytest

from kernel_mcp.policy import Diagnostic, Policy
from kernel_mcp.policy.check import check

POLICY = Policy.for_allow(["numpy", "pandas", "matplotlib", "scipy", "polars", "altair", "torch"])
STRICT = Policy.for_allow(["numpy"], profile="strict")


def refused(code: str, policy: Policy = POLICY) -> list[Diagnostic]:
    """The refusals of code that is free of other errors."""
    report = check(code, policy)
    assert not [item for item in report.diagnostics if item.kind == "syntax"], report.render()
    return list(report.refusals)


@pytest.mark.parametrize(
    ("code", "module", "column"),
    [
        ("import os", "os", 8),
        ("import os.path", "os.path", 8),
        ("import math, sys", "sys", 14),
        ("import os as math", "os", 8),
        ("from os import path", "os", 6),
        ("from   subprocess import run", "subprocess", 8),
        ("from os import *", "os", 6),
        ("import urllib.request", "urllib.request", 8),
        ("from urllib import request", "urllib.request", 20),
        ("from urllib import parse, request as r", "urllib.request", 27),
        ("from urllib import *", "urllib.*", 20),
        ("import IPython.core", "IPython.core", 8),
        ("from IPython import get_ipython", "IPython.get_ipython", 21),
        ("x = 1; import ctypes", "ctypes", 15),
        ("if x:\n    import os", "os", 12),
        ("def f():\n    import os", "os", 12),
        ("class A:\n    import os", "os", 12),
        ("while x:\n    from os import path", "os", 10),
        ("import \N{FULLWIDTH LATIN SMALL LETTER O}s", "os", 8),
    ],
)
def test_a_refused_import_is_an_error_at_the_name(code: str, module: str, column: int) -> None:
    (only,) = refused(code)
    assert only.kind == "import"
    assert f"import of {module!r} is not allowed in this session" in only.message
    assert only.column == column


def test_a_refused_import_says_which_flag_would_allow_it() -> None:
    assert "--allow os (or --allow '*')" in refused("import os.path")[0].message
    assert "--allow urllib.request (or" in refused("import urllib.request")[0].message


@pytest.mark.parametrize(
    "code",
    [
        "import math, json, re",
        "import urllib",
        "import urllib.parse",
        "from urllib import parse",
        "from urllib.parse import quote",
        "import concurrent.futures as cf\ncf.ThreadPoolExecutor",
        "from concurrent import futures",
        "import concurrent.futures\nconcurrent.futures.wait",
        "from IPython.display import display, HTML",
        "import IPython.display\nIPython.display.HTML('')",
        "from __future__ import annotations",
        "import numpy.linalg as la\nfrom pandas.api.types import is_numeric_dtype",
        "import xml.etree.ElementTree as ET",
        "import collections.abc, logging.handlers",
        "__import__('math')",
    ],
)
def test_an_allowed_import_passes(code: str) -> None:
    assert refused(code) == []


def test_every_import_is_listed_with_its_verdict() -> None:
    report = check("import os\nimport numpy as np\nfrom urllib import parse, request", POLICY)
    assert [(use.name, use.allowed, use.line) for use in report.imports] == [
        ("os", False, 1),
        ("numpy", True, 2),
        ("urllib.parse", True, 3),
        ("urllib.request", False, 3),
    ]


def test_imports_are_listed_when_everything_is_allowed() -> None:
    report = check("import os, subprocess", Policy.for_allow(["*"]))
    assert report.valid
    assert [(use.name, use.allowed) for use in report.imports] == [
        ("os", True),
        ("subprocess", True),
    ]


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import cupy\nexcept ImportError:\n    cupy = None",
        "try:\n    import cupy\nexcept (ModuleNotFoundError, ValueError):\n    pass",
        "try:\n    import cupy\nexcept Exception as e:\n    print(e)",
        "try:\n    import cupy\nexcept:\n    pass",
        "try:\n    if x:\n        from os import path\nexcept ImportError:\n    pass",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import cupy",
    ],
)
def test_an_import_whose_failure_is_caught_is_a_warning(code: str) -> None:
    report = check(code, POLICY)
    assert report.valid
    (only,) = report.diagnostics
    assert (only.kind, only.severity) == ("import", "warning")
    assert any(not use.allowed for use in report.imports)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    pass\nexcept ImportError:\n    import os",
        "try:\n    import os\nexcept ValueError:\n    pass",
        "try:\n    import os\nfinally:\n    pass",
        "try:\n    pass\nexcept ImportError:\n    pass\nelse:\n    import os",
        "from contextlib import suppress\nwith suppress(ValueError):\n    import os",
    ],
)
def test_an_import_whose_failure_is_not_caught_is_an_error(code: str) -> None:
    assert [item.kind for item in refused(code)] == ["import"]


def test_an_import_for_type_checkers_never_runs_and_passes() -> None:
    code = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os\nelse:\n    import sys"
    )
    (only,) = refused(code)
    assert only.line == 5
    assert refused("import typing\nif typing.TYPE_CHECKING:\n    import os") == []


def test_a_relative_import_is_a_warning() -> None:
    (only,) = check("from . import x", POLICY).diagnostics
    assert (only.kind, only.severity) == ("import", "warning")


@pytest.mark.parametrize(
    ("code", "line", "column"),
    [
        ("import random\nrandom._os.system('ls')", 2, 8),
        ("import pathlib\npathlib.os.environ", 2, 9),
        ("import pathlib as p\np.os", 2, 3),
        ("import pathlib\np = pathlib\np.os", 3, 3),
        ("import random\nr = random._os", 2, 12),
        ("import random\no = getattr(random, '_os')", 2, 21),
        ("from pathlib import os", 1, 21),
        ("from random import _os as o", 1, 20),
        ("import numpy as np\nnp.lib.npyio.os", 2, 14),
        ("import pandas as pd\npd.io.common.os.system('ls')", 2, 14),
        ("import typing\ntyping.sys.modules", 2, 8),
        ("import inspect\ninspect.builtins", 2, 9),
        ("import inspect\ninspect.importlib", 2, 9),
        ("import tempfile\ntempfile._shutil", 2, 10),
        ("import timeit\ntimeit.gc", 2, 8),
        ("import logging.handlers\nlogging.handlers.socket", 2, 18),
        ("import asyncio\nasyncio.subprocess", 2, 9),
        ("import asyncio.subprocess", 1, 8),
        ("import asyncio\nawait asyncio.create_subprocess_shell('ls')", 2, 15),
        ("import urllib.parse\nurllib.request.urlopen('x')", 2, 8),
        ("from urllib import parse\nparse.sys", 2, 7),
        ("random._os", 1, 8),
        ("print(f'{random._os}')", 1, None),
        ("import random\n(random\n  ._os\n  .system)", 3, 4),
    ],
)
def test_a_module_reached_through_an_allowed_one_is_refused(
    code: str, line: int, column: int | None
) -> None:
    (only,) = refused(code)
    assert only.kind in ("attribute", "import")
    assert only.line == line
    if column is not None:
        assert only.column == column


def test_a_module_reached_through_another_passes_once_it_is_allowed() -> None:
    policy = POLICY.with_modules(["os"])
    assert refused("import random\nrandom._os", policy) == []
    assert refused("import random\nrandom._os", Policy.for_allow(["*"])) == []


@pytest.mark.parametrize(
    "code",
    [
        "().__class__.__base__.__subclasses__()",
        "f.__globals__['os']",
        "f.__code__.co_consts",
        "f.__closure__[0]",
        "__builtins__",
        "__builtins__.open",
        "x = globals()['__builtins__']",
        "__loader__.load_module('os')",
        "import math\nmath.__loader__",
        "import math\nmath.__spec__.loader",
        "__spec__.loader",
        "print.__self__",
        "getattr(f, '__globals__')",
        "(x for x in y).gi_frame.f_back",
        "e.__traceback__.tb_frame.f_globals",
        "f'{f.__globals__}'",
        "lambda: f.__globals__",
    ],
)
def test_reaching_into_the_interpreter_is_refused(code: str) -> None:
    (only,) = refused(code)
    assert only.kind == "attribute"
    assert "--allow '*'" in only.message


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os')",
        "__import__('o' + 's')",
        "f = __import__",
        "__import__(name)",
        "__import__()",
    ],
)
def test_importing_past_the_statement_is_refused(code: str) -> None:
    assert [item.kind for item in refused(code)] == ["builtin"]


@pytest.mark.parametrize(
    "code", ["get_ipython().system('ls')", "ip = get_ipython()", "if get_ipython: pass"]
)
def test_the_shell_behind_the_session_is_refused(code: str) -> None:
    (only,) = refused(code)
    assert (only.kind, only.severity) == ("magic", "error")


@pytest.mark.parametrize(
    "name", ["open", "eval", "exec", "compile", "input", "globals", "vars", "breakpoint"]
)
def test_the_strict_profile_refuses_files_and_code_made_from_text(name: str) -> None:
    (only,) = refused(f"x = {name}('a')", STRICT)
    assert (only.kind, only.column) == ("builtin", 5)
    assert "--profile default" in only.message
    assert refused(f"x = {name}('a')") == []


@pytest.mark.parametrize(
    "code",
    [
        "import re\nre.compile('a')",
        "df.eval('a + b')",
        "vars = ['a', 'b']\nprint(vars)",
        "def f(input):\n    return input",
        "from numpy import open\nopen",
        "self.open()",
        "x = {'open': 1, 'close': 2}",
        "df.open.mean()",
        "f(compile=True)",
    ],
)
def test_the_strict_profile_minds_builtins_only_and_no_other_use_of_their_names(
    code: str,
) -> None:
    assert refused(code, STRICT) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pandas as pd\ndf = pd.DataFrame({'os': [1]})\ndf.os\ndf.os.str.lower()\ndf['sys']",
        "import pandas as pd\npd.DataFrame({'os': [1]}).os.value_counts()",
        "df.query('os == 1').eval('sys + 1')",
        "df.groupby('os').subprocess.mean()",
        "sys_time = 3\nos_name = 'x'\nprint(sys_time)",
        "os = 3\nos + 1",
        "os = df['os']\nos.path.mean()",
        "class A:\n    sys = 1\n    os = 2\nA.sys\nA().os",
        "self.os = os_name\nself.os.system('x')",
        "def f():\n    '''Calls os.system('ls') and !ls and %run.'''",
        "x = 'import os; os.system(\"ls\")'",
        "print(f'{os_name} os.system')",
        "# import os",
        "def f(os, sys=None):\n    return os.path, sys.argv",
        "for os in ['linux', 'mac']:\n    print(os.upper())",
        "import polars as pl\ndf.filter(pl.col.os == 'linux').select(pl.col.sys)",
        "from polars import col\ncol.os.str.to_lowercase()",
        "import altair as alt\nalt.datum.os == 'linux'",
        "import scipy\nscipy.signal.butter(2, 1)",
        "from scipy import signal\nsignal.butter(2, 1)",
        "import torch.multiprocessing as mp\nmp.spawn",
        "import numpy as np\nnp.arange(3).ctypes.data",
        "import numpy as np\nnp.random.default_rng().random()",
        "array = np.zeros(3)\narray.ctypes.data",
        "array.ctypes.data",
        "email = df.iloc[0]\nemail.os",
        "for calendar in frames:\n    calendar.sys",
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.code = 1\nplt.show()",
        "import inspect\ninspect.trace()\ninspect.signature(f)",
        "import datetime as dt\ndt.datetime.now().time()",
        "from datetime import datetime, time\ndatetime.time(datetime.now())",
        "import io\nio.StringIO().readline()",
        "import weakref\nweakref.finalize(a, b).atexit",
        "A.__mro__, A.__dict__, a.__class__.__name__, A.__doc__, A.__bases__",
        "m.__self__\n__name__",
        "getattr(row, 'os')\ngetattr(row, name)\ngetattr(row, 'x', None)",
        "x['os'], x['__name__']",
        "globals()['df'] = 1\nlocals()",
        "compile('1', 'a', 'eval')\neval('1')\nexec('x = 1')",
        "open('a.csv').read()",
        "import re\nre.compile('a')",
        "import pandas as pd\npd.eval('a')\npd.io.sql\npd.core.frame.DataFrame",
        "import pandas\npandas.__version__\nimport urllib\nurllib.__name__",
    ],
)
def test_ordinary_analysis_code_is_never_refused(code: str) -> None:
    assert [item.message for item in refused(code)] == []


def test_nothing_is_refused_when_everything_is_allowed() -> None:
    code = (
        "import os, sys\n__import__('os')\nget_ipython()\nf.__globals__\nrandom._os\n__builtins__"
    )
    assert check(code, Policy.for_allow(["*"])).diagnostics == ()


@pytest.mark.parametrize("head", ["if True:", "try:", "with x:"])
def test_long_blocks_take_no_longer_than_their_lines(head: str) -> None:
    def seconds(code: str) -> float:
        began = time.process_time()
        assert refused(code) == []
        return time.process_time() - began

    body = " x\n" * 20_000
    end = "except ImportError: pass\n" if head == "try:" else ""
    flat = max(seconds(body.replace(" ", "")), 0.01)
    assert seconds(f"{head}\n{body}{end}") < 10 * flat
