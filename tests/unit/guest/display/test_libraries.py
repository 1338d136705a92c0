"""Actions that follow an import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kernel_specs.restricted.display.libraries import AfterImport


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "followed_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "followed_module"
    sys.meta_path[:] = before
    sys.modules.pop("followed_module", None)


def test_an_action_follows_the_import_and_each_reload_of_its_module(module: str) -> None:
    seen: list[ModuleType] = []
    AfterImport({module: seen.append}).install()
    imported = importlib.import_module(module)
    assert seen == [imported]
    assert imported.value == 1
    assert imported.__spec__ is not None
    assert imported.__spec__.origin == imported.__file__
    importlib.reload(imported)
    assert seen == [imported, imported]


def test_an_action_that_fails_does_not_fail_the_import(module: str) -> None:
    def fail(_: ModuleType) -> None:
        raise RuntimeError

    AfterImport({module: fail}).install()
    assert importlib.import_module(module).value == 1


def test_other_modules_and_missing_ones_are_left_to_others() -> None:
    finder = AfterImport({"no_such_module_at_all": print})
    assert finder.find_spec("json", None) is None
    assert finder.find_spec("no_such_module_at_all", None) is None
