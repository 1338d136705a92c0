"""A barrier keeps failures in, says whose they were, and puts them into words."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading

import anyio
import pytest

from kernel_mcp.barriers import Barrier, explained, in_full, refusal_of, run_in_thread
from kernel_mcp.errors import LaunchError, ServerFailure
from kernel_mcp.linux.proc import pid_of

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

pytestmark = [pytest.mark.anyio]

FAILURES = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/secret/place"),
    RuntimeError("can't start new thread"),
    MemoryError(),
    ExceptionGroup("several", [ExceptionGroup("inner", [OSError(errno.EMFILE, "x")])]),
]


@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_no_failure_gets_out_and_the_log_names_the_session(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with Barrier("doing its work", "s-1") as barrier:
        raise failure
    assert barrier.failure is failure
    assert "failed while doing its work (session s-1)" in caplog.text
    assert "(at an unknown place)" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_log_names_the_place_of_a_refusal_and_shows_the_trace_of_anything_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Barrier("reading", "s-1"):
        pid_of(999_999)
    with Barrier("reading", "s-1"):
        raise ValueError("no refusal")
    assert caplog.text.count("Traceback") == 1
    assert re.search(r"removed \(at linux/proc\.py:\d+\)", caplog.text)


@pytest.mark.parametrize(
    ("failure", "said"),
    list(
        zip(
            FAILURES,
            (
                "no file descriptors left (ulimit -n",
                "no space left",
                "I/O error",
                "has been removed",
                "no further thread",
                "no memory left",
                "no file descriptors left",
            ),
            strict=True,
        )
    ),
    ids=repr,
)
def test_what_the_system_refused_is_said_with_what_to_do_and_without_paths(
    failure: Exception, said: str
) -> None:
    error = explained(failure, "running this cell", kept="Variables are kept.")
    assert isinstance(error, ServerFailure)
    text = str(error)
    assert text.startswith("The server failed while running this cell: ")
    assert said in text
    assert "Variables are kept." in text
    assert "again" in text
    assert "/secret/place" not in text


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.EMFILE, "Too many"), "no file descriptors left (ulimit -n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/a"),
            "No space left on device: /tmp/a.",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No file", "/proc/self/uid_map"),
            "/proc/self/uid_map. Put",
        ),
        (ExceptionGroup("one", [RuntimeError("odd")]), "report what it says"),
        (LaunchError("words of its own"), "words of its own"),
    ],
)
def test_who_runs_a_command_that_ends_is_told_the_place_and_nothing_about_sessions(
    failure: Exception, said: str
) -> None:
    text = in_full(failure)
    assert said in text
    assert "close_session" not in text
    assert "reset" not in text


def test_an_error_with_words_of_its_own_keeps_them() -> None:
    error = LaunchError("the kernel did not start")
    assert explained(error, "running this cell") is error
    assert explained(ExceptionGroup("one", [error]), "running this cell") is error


async def test_a_cancelled_block_is_left() -> None:
    reached = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        with Barrier("waiting"):
            await anyio.sleep_forever()
        reached.append("the line after")
    assert scope.cancelled_caught
    assert reached == []


async def test_what_has_to_be_done_is_done_without_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        await run_in_thread(done.append, "here")
    assert done == ["here"]


async def test_what_failed_is_not_done_twice() -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("once")
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError):
        await run_in_thread(fail)
    assert done == ["once"]


def test_errors_for_people_are_found_in_groups_and_defects_are_not() -> None:
    refusal = LaunchError("no")
    one = ExceptionGroup("one", [ExceptionGroup("inner", [refusal])])
    assert refusal_of(refusal) is refusal_of(one) is refusal
    assert refusal_of(ExceptionGroup("both", [refusal, ServerFailure("later")])) is refusal
    assert refusal_of(ExceptionGroup("both", [refusal, ValueError("a defect")])) is None
    assert refusal_of(ValueError("a defect")) is None
