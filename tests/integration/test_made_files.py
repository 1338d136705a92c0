"""Files that cells make without Python's `open` are no input of a verification."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.servers import Servers
from tests.integration.verified import Case, Write, verified

pytestmark = pytest.mark.anyio

OPEN_SQLITE = "import sqlite3\ncon = sqlite3.connect('db.sqlite')"
CREATE = "con.execute('create table t (n)')\ncon.execute('insert into t values (1)')\ncon.commit()"
RUN = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import os; os.mkdir(\"d\")'])"
REPLACE = "import os\nopen('t', 'w').write('2'); os.replace('t', 'in.csv')"
CASES = [
    Case("sqlite", (OPEN_SQLITE, CREATE, "con.execute('select count(*) from t').fetchall()")),
    Case(
        "shell", ("!echo 5 > n.txt", "int(open('n.txt').read())", "!echo 6 >> n.txt", "!cat n.txt")
    ),
    Case("listing", ("import os\n[n for n in os.listdir() if '.tmp' in n]", "!touch made.tmp")),
    Case("symlink", ("import os\nos.symlink('nowhere', 'link')", "os.path.islink('link')")),
    Case("folder", (f"{RUN}.returncode", "import os\nos.path.isdir('d')")),
    Case("input", (Write("in.csv", "1,2"), "open('in.csv').read()", "!cp in.csv copy.csv")),
    Case(
        "replaced",
        (Write("in.csv", "1"), "int(open('in.csv').read())", REPLACE),
        "file_changed",
        "differs",
    ),
]


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in CASES])
async def test_a_replay_begins_without_what_cells_made(servers: Servers, case: Case) -> None:
    async with servers.agent("--allow", "*", "--max-sessions", "20") as notebook:
        answer = await verified(notebook, case)
    found: dict[str, Any] = (answer.result.meta or {})["kernel-mcp/verification"]
    assert (found["verdict"], found["cause"]) == (case.verdict, case.cause), answer.text
