"""The assembly of a server: what is imported beside it."""

from __future__ import annotations

import sysconfig
from threading import current_thread, main_thread
from types import ModuleType
from typing import Any

import pytest

from kernel_mcp import server


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
    monkeypatch.setattr(server, "import_module", imported)
    assert server._begin_import().result(60) is sysconfig
    assert seen == [main_thread(), server.PROTOCOL]
