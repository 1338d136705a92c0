"""What a throw-away process says about imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kernel_mcp.packages.verify import _failures
from kernel_mcp.sandbox.base import BOOT_FOLDER


def test_the_last_line_tells_what_failed() -> None:
    output = 'noise\n{"a": null, "b": "ImportError: no"}\n'
    assert _failures(output, ["a", "b"], "exited with code 0") == {"b": "ImportError: no"}


def test_a_process_that_died_fails_all_that_it_was_to_import() -> None:
    found = _failures("Fatal Python error: x", ["a", "b"], "killed by SIGSEGV")
    assert set(found) == {"a", "b"}
    assert "killed by SIGSEGV" in found["a"]
    assert "Fatal Python error" in found["a"]


def test_an_answer_of_another_shape_counts_as_none() -> None:
    for output in ("[]", '{"a": null}', "{", ""):
        assert set(_failures(output, ["a", "b"], "exited with code 0")) == {"a", "b"}


def test_the_process_imports_from_the_given_paths_and_ignores_what_packages_print(
    tmp_path: Path,
) -> None:
    (tmp_path / "noisy.py").write_text("print('{}')\nx = 1\n")
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    request = {
        "paths": [str(tmp_path)],
        "modules": ["noisy", "broken"],
        "limits": {},
        "tmp": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-I", "-B", BOOT_FOLDER / "restricted/try_import.py", json.dumps(request)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = _failures(done.stdout, ["noisy", "broken"], "")
    assert found == {"broken": "ModuleNotFoundError: No module named 'nowhere_to_be_found'"}


def test_what_a_package_says_is_cleaned() -> None:
    said = json.dumps({"a": "ImportError: \x1b[31mred\x1b[0m \u202eback"})
    assert _failures(said, ["a"], "") == {"a": "ImportError: red \\u202eback"}
