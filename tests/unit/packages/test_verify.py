"""Reports on imports from a throw-away process, and from a kernel that may be silent or die."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from kernel_mcp.environments.layer import Generation
from kernel_mcp.errors import LaunchError
from kernel_mcp.linux.proc import ExitStatus
from kernel_mcp.packages.result import InstallOutcome, Present
from kernel_mcp.packages.verify import _failures, verify_live
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import BOOT_FOLDER
from kernel_mcp.sessions.session import Session
from tests.unit.packages.wheels import requirements

pytestmark = pytest.mark.anyio

GENERATION = Generation(
    requested=requirements("thing-two"),
    packages=("thing-two==2.0", "base==1.0"),
    modules={"thing-two": ["thing_two"], "base": ["base"]},
    permitted=("thing_two",),
)


class FakeKernel:
    """Answers with `reply`, or not at all when it is None."""

    def __init__(self, reply: Any, exit_status: ExitStatus | None = None) -> None:
        self.policy = Policy(frozenset({"math"}))
        self.exit = exit_status
        self.dead = anyio.Event()
        self.asked: list[dict[str, Any]] = []
        self.interrupts = 0
        self._reply = reply
        if exit_status is not None:
            self.dead.set()

    async def ask(self, kind: str, content: dict[str, Any], *, timeout: float) -> Any:
        assert kind == "kernel_mcp_packages_request"
        self.asked.append(content)
        if self._reply is None:
            raise LaunchError("no answer")
        return self._reply

    def interrupt(self) -> None:
        self.interrupts += 1


class FakeSession:
    def __init__(self, kernel: FakeKernel | None, *, busy: bool = False) -> None:
        self._kernel = kernel
        self.queue = SimpleNamespace(current=object() if busy else None)

    async def ensure_kernel(self) -> FakeKernel:
        if self._kernel is None:
            raise LaunchError("no room")
        return self._kernel


async def taken_in(kernel: FakeKernel | None, *, busy: bool = False) -> InstallOutcome:
    return await verify_live(
        cast(Session, FakeSession(kernel, busy=busy)),
        requirements("thing-two", "pywin32"),
        present=Present({"base": "0.9"}, {"base": ("base",)}),
        generation=GENERATION,
        confined=True,
    )


async def test_the_kernel_gets_the_names_and_its_word_is_taken() -> None:
    kernel = FakeKernel(
        {"modules": {"thing_two": {"state": "imported"}, "base": {"state": "earlier"}}}
    )
    outcome = await taken_in(kernel)
    assert kernel.asked == [{"allow": ["thing_two"], "modules": ["thing_two", "base"]}]
    assert kernel.policy.allows("thing_two")
    assert [each.name for each in outcome.packages] == ["thing-two", "base"]
    assert outcome.packages[1].previous == "0.9"
    assert outcome.unfit == ("pywin32",)
    assert outcome.needs_reset
    assert not outcome.failed


@pytest.mark.parametrize("reply", [{}, {"modules": []}, {"modules": {"thing_two": "imported"}}])
async def test_a_word_of_the_wrong_shape_is_no_success(reply: object) -> None:
    outcome = await taken_in(FakeKernel(reply))
    assert outcome.failed
    assert "not known" in outcome.summary()


async def test_long_words_of_the_kernel_are_cut() -> None:
    reply = {"modules": {"thing_two": {"state": "failed", "detail": "x" * 100_000}}}
    assert len((await taken_in(FakeKernel(reply))).summary()) < 2000


async def test_a_kernel_that_dies_over_the_imports_is_told_with_what_is_lost() -> None:
    outcome = await taken_in(FakeKernel(None, ExitStatus(signal=11)))
    assert "killed by SIGSEGV during the imports: all variables are lost" in outcome.summary()
    assert outcome.failed


async def test_imports_that_hang_are_interrupted_unless_a_cell_would_be() -> None:
    for busy in (False, True):
        kernel = FakeKernel(None)
        outcome = await taken_in(kernel, busy=busy)
        assert "did not end" in outcome.trouble
        assert kernel.interrupts == (0 if busy else 1)


async def test_without_a_kernel_the_packages_are_there_and_untried() -> None:
    outcome = await taken_in(None)
    assert outcome.failed
    assert "No kernel could be started: no room" in outcome.summary()


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
