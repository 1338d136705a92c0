"""Work of a template before its first fork, so that kernels find it done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_specs

ROOT = Path(kernel_specs.__file__).parents[1]
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from kernel_specs.restricted import host
from kernel_specs.template import preload

preload.LIBRARY_CELLS |= {
    "odd": "import asyncio, sys; sys.odd = asyncio.run(asyncio.sleep(0, [1]))",
    "broken": "sys.odd.nothing",
}
kernel = host.KernelHost()
held = preload.Inherited.now()
found = {"missing": preload.begin(kernel).missing}
found |= {name: preload.use(kernel, name) for name in ("odd", "broken")}
found["ran"] = sys.odd
found["more"] = preload.Inherited.now().more_than(held)
found["names"] = [name for name in kernel._app.shell.user_ns if name in ("f", "math", "asyncio")]
sys.__stdout__.write(json.dumps(found))
"""


def rehearsed(folder: Path) -> dict[str, Any]:
    """Return the report of a separate process, with an application and environment of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_cells_are_run_to_their_end_and_leave_nothing(tmp_path: Path) -> None:
    found = rehearsed(tmp_path)
    assert found["missing"] == {}
    assert found["ran"] == [1]
    assert found["odd"] == ""
    assert found["names"] == []
    assert not found["more"]


def test_a_cell_that_fails_is_told(tmp_path: Path) -> None:
    assert "its first use failed: NameError" in rehearsed(tmp_path)["broken"]
