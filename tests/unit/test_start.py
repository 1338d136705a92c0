"""The start of a server: what is imported beside it."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from threading import current_thread, main_thread
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
    begun = start._begin_imports(start.SERVER, start.PROTOCOL)
    assert begun[start.PROTOCOL].result(60) is sysconfig
    assert seen == [main_thread(), start.SERVER, start.PROTOCOL]


def test_a_first_template_waits_for_nothing_of_sessions() -> None:
    code = "import sys, kernel_mcp.start; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "kernel_mcp.launch.template" in found
    late = {"kernel_mcp.sessions.session", "kernel_mcp.sessions.manager", start.SERVER, "mcp"}
    assert found & late == set()
