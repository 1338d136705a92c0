"""The start of a server: what is imported beside it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path
from threading import Event, current_thread, main_thread
from types import ModuleType
from typing import Any

import pytest

from kernel_mcp import start


def test_no_two_threads_are_the_first_to_ask_for_pythons_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    ask = sysconfig.get_config_vars

    def asked(*names: str) -> Any:
        seen.append(current_thread())
        return ask(*names)

    def imported(name: str) -> ModuleType:
        seen.append(name)
        return sysconfig

    monkeypatch.setattr(sysconfig, "get_config_vars", asked)
    monkeypatch.setattr(start, "import_module", imported)
    with start._imports(start.SERVER, start.PROTOCOL) as begun:
        assert begun[start.PROTOCOL].result(60) is sysconfig
    assert seen == [main_thread(), start.SERVER, start.PROTOCOL]


def test_what_has_not_begun_at_the_end_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, over, seen = Event(), Event(), []

    def imported(name: str) -> ModuleType:
        seen.append(name)
        begun.set()
        assert over.wait(60)
        return sysconfig

    monkeypatch.setattr(start, "import_module", imported)
    with start._imports("first", "second") as rest:
        assert begun.wait(60)
    over.set()
    assert rest["first"].result(60) is sysconfig
    assert rest["second"].cancelled()
    assert seen == ["first"]


def test_a_first_template_waits_for_nothing_of_sessions() -> None:
    code = "import sys, kernel_mcp.start; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "kernel_mcp.launch.template" in found
    late = {"kernel_mcp.sessions.session", "kernel_mcp.sessions.manager", start.SERVER, "mcp"}
    assert found & late == set()


def test_models_of_the_sdk_are_built_when_they_are_used() -> None:
    code = (
        "from kernel_mcp import start\n"
        "with start._imports(start.DEFERRED, start.PROTOCOL) as rest:\n"
        "    rest[start.PROTOCOL].result()\n"
        "import mcp_types\n"
        "from mcp_types import _v2025_11_25 as wire\n"
        "models = [each for each in vars(wire).values() if isinstance(each, type)]\n"
        "built = sum(getattr(each, '__pydantic_complete__', False) for each in models)\n"
        "used = mcp_types.methods.parse_client_request('tools/list', '2025-11-25', None)\n"
        "print(len(models), built, type(used).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, built, used = done.stdout.split()
    assert int(built) < int(count) / 4
    assert used == "ListToolsRequest"


HALF = """
from kernel_mcp.start import planted
begun, over = planted
begun.set()
assert over.wait(60)
try:
    import never_imported
except Exception:
    pass
"""


def test_what_is_being_imported_at_the_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C would wait for all that it needs, for seconds on a busy machine, without a word."""
    begun, over = Event(), Event()
    monkeypatch.setattr(start, "planted", (begun, over), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "half_imported.py").write_text(HALF)
    (tmp_path / "never_imported.py").write_text("")
    before = list(sys.meta_path)
    with start._imports("half_imported") as rest:
        assert begun.wait(60)
    over.set()
    assert isinstance(rest["half_imported"].exception(60), SystemExit)
    assert not {"half_imported", "never_imported"} & {*sys.modules}
    assert sys.meta_path == before
    assert import_module("never_imported")  # others import what they need
