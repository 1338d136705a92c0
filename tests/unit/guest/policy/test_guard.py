"""The import guard, judged by the file a caller was compiled from."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from kernel_specs.restricted.config import BootConfig, ImportPolicy
from kernel_specs.restricted.console.tracebacks import IMPORT_GUARD
from kernel_specs.restricted.policy.guard import ImportGuard, ModuleNotAllowedError

CELL = "<ipython-input-1-abc>"
MODULES = ("math", "urllib.parse", "numpy", "xml.etree.ElementTree")


@pytest.fixture
def guard(tmp_path: Path) -> ImportGuard:
    (tmp_path / "w").mkdir()
    return ImportGuard(
        BootConfig(
            policy=ImportPolicy(allow_all=False, modules=MODULES),
            runtime=("/runtime",),
            layers=("/packages/a",),
            workspace=str(tmp_path / "w"),
        )
    )


def test_modules_of_both_own_folders_are_its_own_but_not_environments_in_them(
    tmp_path: Path,
) -> None:
    project, venv = tmp_path / "project", tmp_path / "project" / ".venv"
    venv.mkdir(parents=True)
    guard = ImportGuard(
        BootConfig(runtime=(str(venv),), workspace=str(tmp_path / "w"), start=str(project))
    )
    places = (tmp_path / "w" / "a.py", project / "b.py", venv / "lib" / "c.py", tmp_path / "d.py")
    assert [guard.owns(str(place)) for place in places] == [True, True, False, False]


def frame_of(*files: str) -> FrameType:
    """A frame of code compiled from the last file, called from the ones before it."""
    found: list[FrameType] = []
    run: Callable[[], Any] = lambda: found.append(sys._getframe(1))  # noqa: E731
    for name in reversed(files):
        namespace: dict[str, Any] = {"run": run}
        exec(compile("def call(): run()", name, "exec"), namespace)
        run = namespace["call"]
    run()
    return found[0]


@pytest.mark.parametrize(
    ("name", "fromlist"),
    [
        ("math", ()),
        ("numpy", ()),
        ("numpy.linalg", ("norm",)),
        ("urllib", ()),
        ("urllib", ("parse",)),
        ("urllib", ("__doc__",)),
        ("urllib.parse", ("quote",)),
        ("xml.etree", ("ElementTree",)),
        ("_strptime", ()),
    ],
)
def test_user_code_may_import_what_is_named(
    guard: ImportGuard, name: str, fromlist: tuple[str, ...]
) -> None:
    guard.check(frame_of(CELL), name, {}, fromlist, 0)


@pytest.mark.parametrize(
    ("name", "fromlist", "refused"),
    [
        ("os", (), "os"),
        ("os.path", (), "os.path"),
        ("mathematics", (), "mathematics"),
        ("urllib.request", (), "urllib.request"),
        ("urllib", ("request",), "urllib.request"),
        ("urllib", ("parse", "request"), "urllib.request"),
        ("xml", ("sax",), "xml.sax"),
        ("sys", (), "sys"),
    ],
)
def test_user_code_is_refused_the_rest_and_told_what_would_permit_it(
    guard: ImportGuard, name: str, fromlist: tuple[str, ...], refused: str
) -> None:
    with pytest.raises(ModuleNotAllowedError) as caught:
        guard.check(frame_of(CELL), name, {}, fromlist, 0)
    text = str(caught.value)
    assert text.startswith(f"import of {refused!r} is not allowed in this session. Allowed: math,")
    assert f"--allow {refused.partition('.')[0]} " in text
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    "files",
    [
        (CELL, "/runtime/lib/pandas/__init__.py"),
        (CELL, "/packages/a/seaborn/__init__.py"),
        (CELL, "/runtime/lib/x.py", "<string>"),
        (CELL, "<frozen os>"),
        (CELL, str(Path(warnings.__file__))),
    ],
)
def test_libraries_may_import_anything(guard: ImportGuard, files: tuple[str, ...]) -> None:
    guard.check(frame_of(*files), "os", {}, (), 0)


@pytest.mark.parametrize(
    "files",
    [
        (CELL,),
        (CELL, "<string>"),
        (CELL, "<string>", "<lambda>"),
        ("/runtime/lib/threading.py", CELL),
        ("/runtime/lib/threading.py", "/workspace/mine.py"),
        ("/runtime-of-mine/x.py",),
        ("<string>",),
    ],
)
def test_generated_code_counts_as_its_caller(guard: ImportGuard, files: tuple[str, ...]) -> None:
    with pytest.raises(ModuleNotAllowedError):
        guard.check(frame_of(*files), "os", {}, (), 0)


def test_extension_modules_may_import_in_the_name_of_their_caller(
    guard: ImportGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = ModuleType("extension")
    extension.__file__ = "/runtime/lib/extension.so"
    monkeypatch.setitem(sys.modules, "extension", extension)
    guard.check(frame_of(CELL), "os", vars(extension), (), 0)
    with pytest.raises(ModuleNotAllowedError):
        guard.check(frame_of(CELL), "os", dict(vars(extension)), (), 0)


def test_c_code_may_import_in_the_name_of_its_caller(guard: ImportGuard) -> None:
    names = {"__name__": "__main__"}
    guard.check(frame_of(CELL), "os", names, [], 0, names)
    guard.check(frame_of(CELL, "<string>"), "os", names, [], 0, names)
    others: tuple[Any, ...] = (
        (names, None, 0, names),  # import os
        (names, ("path",), 0, names),  # from os import path
        (names, (), 0, None),  # __import__("os", globals())
        (None, [], 0, None),  # __import__("os", None, None, [])
        (names, [], 1, names),
    )
    for arguments in others:
        with pytest.raises((ModuleNotAllowedError, ImportError)):
            guard.check(frame_of(CELL), "os", *arguments)


def test_files_of_the_workspace_may_be_imported_by_their_name(
    guard: ImportGuard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = tmp_path / "w"
    monkeypatch.syspath_prepend(str(workspace))
    (workspace / "mine_own.py").write_text("")
    (workspace / "package_own").mkdir()
    (workspace / "package_own" / "__init__.py").write_text("")
    (workspace / "os.py").write_text("")
    guard.check(frame_of(CELL), "mine_own", {}, (), 0)
    guard.check(frame_of(CELL), "package_own.part", {}, (), 0)
    inside = frame_of(str(workspace / "package_own" / "__init__.py"))
    guard.check(inside, "part", {"__package__": "package_own"}, (), 1)
    for name in ("os", "posix", "sqlite3", "does_not_exist"):
        with pytest.raises(ModuleNotAllowedError):
            guard.check(frame_of(CELL), name, {}, (), 0)


def test_modules_can_be_added_later(guard: ImportGuard) -> None:
    with pytest.raises(ModuleNotAllowedError):
        guard.check(frame_of(CELL), "seaborn.axisgrid", {}, (), 0)
    guard.allow(["seaborn"])
    guard.check(frame_of(CELL), "seaborn.axisgrid", {}, (), 0)


def test_long_lists_are_cut() -> None:
    error = ModuleNotAllowedError("os", [f"module{i}" for i in range(300)])
    assert "and 220 more" in str(error)


BY_NAME = (
    "exec('import os')",
    "eval('__import__(\"os\")')",
    "__import__('os', globals())",
    "__import__('os', globals(), globals(), [], 0)",
    "importlib.__import__('os', globals(), globals(), [], 0)",
    "list(map(__import__, ['os'], [globals()], [globals()], [[]]))",
)
UNPICKLED = r"assert loads(b'cplatform\nnode\n.').__name__ == 'node'"
"""The C code of pickle imports a module that the cell may not."""


def test_installed_guard_is_cheap_invisible_and_complete(tmp_path: Path) -> None:
    code = f"""
import builtins, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from kernel_specs.restricted.config import BootConfig, ImportPolicy
from kernel_specs.restricted.policy.guard import ImportGuard
import importlib, math, os
policy = ImportPolicy(False, ("math", "importlib"))
ImportGuard(BootConfig(policy=policy, runtime=({str(tmp_path)!r},))).install()
def called():
    names = []
    def record(frame, event, called):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(called.__name__)
    sys.setprofile(record)
    import math
    sys.setprofile(None)
    return names
# What a loop that imports pays for each turn: one more function, one look into a dictionary.
assert called() == ["guarded_import", "get", "__import__", "setprofile"], called()
def attempt(source):
    try:
        exec(compile(source, {CELL!r}, "exec"), {{"importlib": importlib}})
    except ImportError as error:
        return type(error).__name__
    return "imported"
refused = "ModuleNotAllowedError"
assert attempt("import math") == "imported"
assert attempt("import os") == refused
assert attempt("importlib.import_module('os')") == refused
assert attempt("importlib.__import__('os')") == refused
assert attempt("from . import x") == "ImportError"
for source in {BY_NAME!r}:
    assert attempt(source) == refused, source
import pickle
exec(compile({UNPICKLED!r}, {CELL!r}, "exec"), {{"loads": pickle.loads}})
assert importlib.import_module("json").__name__ == "json"
assert importlib.import_module(".decoder", "json").__name__ == "json.decoder"
assert __import__.__code__.co_filename == {IMPORT_GUARD!r}
print("done")
"""
    script = tmp_path / "try.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_names_can_be_allowed_later(guard: ImportGuard) -> None:
    frame = frame_of(CELL)
    for name in ("polars", "google.cloud.storage"):
        with pytest.raises(ModuleNotAllowedError):
            guard.check(frame, name, None, (), 0)
    guard.allow(["polars", "google.cloud"])
    for name in ("polars", "google.cloud.storage", "google.cloud"):
        guard.check(frame, name, None, (), 0)
    with pytest.raises(ModuleNotAllowedError):
        guard.check(frame, "google.auth", None, (), 0)
