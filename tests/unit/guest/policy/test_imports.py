"""Package layers on sys.path, and imports that the host asks for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.confine import SHIMS
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.policy import imports
from kernel_specs.restricted.policy.imports import LiveImports, Report


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty layer that is on sys.path; what is imported is forgotten."""
    folder = tmp_path / "layer"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", ["/stdlib", str(folder), *sys.path])
    for name in ("PATH", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(imports, "_let_look", lambda: None)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]


def generation(layer: Path, number: int, **modules: str) -> None:
    (layer / str(number)).mkdir()
    for name, code in modules.items():
        (layer / str(number) / f"{name}.py").write_text(code)


def test_generations_come_newest_first_and_then_the_layer(layer: Path) -> None:
    for number in (1, 2, 10):
        generation(layer, number)
    (layer / ".next").mkdir()
    (layer / "notes").mkdir()
    assert imports.entries([str(layer)]) == [*(f"{layer}/{n}" for n in (10, 2, 1)), str(layer)]


def test_a_layer_that_is_not_there_holds_nothing() -> None:
    assert imports.entries(["/nowhere"]) == ["/nowhere"]


def test_new_generations_take_the_place_of_their_layer(layer: Path) -> None:
    after = sys.path[2:]
    generation(layer, 1)
    imports.refresh([str(layer)])
    generation(layer, 2)
    imports.refresh([str(layer)])
    assert sys.path == ["/stdlib", f"{layer}/2", f"{layer}/1", str(layer), *after]


def test_a_layer_that_user_code_has_removed_comes_back_before_the_sites(layer: Path) -> None:
    sys.path[:] = ["/lib/python3", "/lib/site-packages"]
    imports.refresh([str(layer)])
    assert sys.path == ["/lib/python3", str(layer), "/lib/site-packages"]


def test_children_find_generations_and_their_programs_first(
    layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    generation(layer, 1)
    (layer / "1/bin").mkdir()
    imports.export([str(layer)])
    generation(layer, 2)
    for _ in range(2):
        imports.export([str(layer)])
        assert os.environ["PYTHONPATH"] == f"{layer}/2:{layer}/1:/mine"
        assert os.environ["PATH"] == f"{layer}/1/bin:/usr/bin:/bin"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_workers_of_an_isolated_interpreter_read_the_environment(layer: Path) -> None:
    generation(layer, 1, fresh="")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from kernel_specs.restricted.policy import imports as layers\n"
        "import subprocess, multiprocessing.util as util\n"
        "layers.export([sys.argv[2]])\n"
        "print(util._args_from_interpreter_flags(), subprocess._args_from_interpreter_flags())"
    )
    root = str(Path(__file__).parents[3])
    command = [sys.executable, "-I", "-B", "-c", code, root, str(layer)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "['-B', '-s', '-P'] ['-B', '-s', '-P']"


def test_an_installed_pip_comes_after_what_stands_in_for_it(
    layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer / "0" / "bin").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", f"{SHIMS}:/else")
    monkeypatch.setenv("PATH", f"{SHIMS}/bin:/bin")
    imports.export([str(layer)])
    assert os.environ["PYTHONPATH"] == f"{SHIMS}:{layer}/0:/else"
    assert os.environ["PATH"] == f"{SHIMS}/bin:{layer}/0/bin:/bin"


def test_children_are_told_nothing_where_there_is_nothing(
    layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    imports.export([str(layer)])
    assert "PYTHONPATH" not in os.environ


async def take(
    layer: Path, modules: list[str], *, workspace: str = "", gate: InterruptGate | None = None
) -> tuple[Report, list[str]]:
    """Return the kernel's answer; this loop is the main one and the service's."""
    allowed: list[str] = []
    live = LiveImports(
        BootConfig(layers=(str(layer),), workspace=workspace),
        allowed.extend,
        gate or InterruptGate(),
        asyncio.get_running_loop().call_soon_threadsafe,
    )
    return await live.take(["thing"], modules), allowed


@pytest.mark.anyio
async def test_a_new_module_is_allowed_and_imported(layer: Path) -> None:
    generation(layer, 1, fresh="x = 1")
    report, allowed = await take(layer, ["fresh"])
    assert report == {"fresh": {"state": "imported"}}
    assert os.environ["PYTHONPATH"].startswith(f"{layer}/1")
    assert allowed == ["thing"]
    assert sys.modules["fresh"].x == 1


@pytest.mark.anyio
async def test_a_failing_import_is_told_with_its_reason(layer: Path) -> None:
    generation(layer, 1, broken="raise RuntimeError('no luck')", leaves="raise SystemExit(3)")
    report, _ = await take(layer, ["broken", "leaves", "missing"])
    assert report["broken"] == {"state": "failed", "detail": "RuntimeError: no luck"}
    assert report["leaves"]["detail"] == "SystemExit: 3"
    assert report["missing"]["detail"].startswith("ModuleNotFoundError")


@pytest.mark.anyio
async def test_a_module_loaded_from_an_older_generation_stays(layer: Path) -> None:
    generation(layer, 1, grows="version = 1")
    await take(layer, ["grows"])
    generation(layer, 2, grows="version = 2")
    report, _ = await take(layer, ["grows"])
    assert report == {"grows": {"state": "earlier"}}
    assert sys.modules["grows"].version == 1


@pytest.mark.anyio
async def test_a_module_that_the_workspace_hides_is_told(layer: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    workspace.mkdir()
    (workspace / "hidden.py").write_text("")
    generation(layer, 1, hidden="")
    sys.path.insert(0, str(workspace))
    report, _ = await take(layer, ["hidden"], workspace=str(workspace))
    assert report == {"hidden": {"state": "shadowed", "detail": "hidden.py"}}


@pytest.mark.anyio
async def test_imports_run_in_the_main_thread_unless_a_cell_does(layer: Path) -> None:
    code = "import threading\nname = threading.current_thread().name"
    generation(layer, 1, idle=code, busy=code)
    await take(layer, ["idle"])
    assert sys.modules["idle"].name == threading.main_thread().name
    gate = InterruptGate()
    gate._handling = True
    await take(layer, ["busy"], gate=gate)
    assert sys.modules["busy"].name == "verify-imports"


@pytest.mark.anyio
async def test_what_packages_print_on_import_is_dropped(
    layer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generation(layer, 1, noisy="print('hello')")
    await take(layer, ["noisy"])
    assert capsys.readouterr().out == ""
