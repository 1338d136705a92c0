"""Calls that Python does not wrap: what they return, and that an error has its number."""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path

import pytest

from kernel_specs import linux

NO_FD = -1


@pytest.mark.parametrize(
    "call",
    [
        lambda: linux.setns(NO_FD, linux.CLONE_NEWNS),
        lambda: linux.openat2(NO_FD, b"name", os.O_RDONLY, 0),
        lambda: linux.birth_time(NO_FD),
        lambda: linux.inotify_add_watch(NO_FD, b"/", 1),
        lambda: linux.inotify_rm_watch(NO_FD, 1),
        lambda: linux.timerfd_settime(NO_FD, linux.timerfd_spec(1.0)),
        lambda: linux.syscall(3, NO_FD) if os.uname().machine == "x86_64" else os.close(NO_FD),
    ],
)
def test_an_error_has_its_number(call: object) -> None:
    assert callable(call)
    with pytest.raises(OSError, match="Bad file descriptor") as failure:
        call()
    assert failure.value.errno == errno.EBADF
    assert failure.value.strerror


def test_a_function_that_the_c_library_lacks_is_an_error() -> None:
    with pytest.raises(OSError, match="no_such_call") as failure:
        linux._function("no_such_call")
    assert failure.value.errno == errno.ENOSYS


def test_paths_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    linux.exchange(os.fsencode(tmp_path / "one"), os.fsencode(tmp_path / "other"))
    assert (tmp_path / "one").read_text() == "other"


def test_a_file_was_born_before_it_was_changed(tmp_path: Path) -> None:
    begun = time.time_ns()
    file = tmp_path / "file"
    file.touch()
    os.utime(file, (0, 0))
    with file.open() as opened:
        born = linux.birth_time(opened.fileno())
    assert born == 0 or abs(born - begun) < 60 * 10**9


def test_a_timer_ticks_until_it_is_stopped() -> None:
    fd = linux.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        linux.timerfd_settime(fd, linux.timerfd_spec(0.001, 0.001))
        for _ in range(2):
            assert select.select([fd], [], [], 60.0)[0]
            os.read(fd, 8)
        linux.timerfd_settime(fd, linux.timerfd_spec(0.0))
        assert not select.select([fd], [], [], 0.01)[0]
    finally:
        os.close(fd)


def test_seconds_of_a_timer_are_split() -> None:
    spec = memoryview(linux.timerfd_spec(1.5, 2.25)).cast("l")
    assert list(spec) == [2, 250_000_000, 1, 500_000_000]
