"""Files without a name are found however processes hold them, in bounded time."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernel_mcp.limits import quota
from kernel_mcp.limits.quota import opened, unlinked
from kernel_mcp.linux.proc import threads
from kernel_mcp.linux.walk import BLOCK
from kernel_mcp.units import MIB

BEGIN = """
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def file():
    fd = os.open("gone", os.O_RDWR | os.O_CREAT)
    os.unlink("gone")
    os.write(fd, b"x" * (1 << 20))
    return fd
def wait():
    print(flush=True)
    os.read(0, 1)
    os._exit(0)
"""
FIRST_THREAD_ENDS = "fd = file(); threading.Thread(target=wait).start(); libc.syscall(60, 0)"
MAPPED_IN_PART = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
fd = file()
libc.mmap(None, 4096, 1, 1, fd, 0)
os.close(fd)
threading.Thread(target=wait).start()
"""
FIRST_THREAD_ENDS_MAPPED = MAPPED_IN_PART + "libc.syscall(60, 0)"


@contextmanager
def holder(code: str, folder: Path) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", BEGIN + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # that of pytest is a file without a name
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def on(folder: Path, found: quota.DeletedFiles) -> list[int]:
    device = folder.stat().st_dev
    return [size for (place, _), size in found.files.items() if place == device]


def test_a_deleted_file_counts_while_it_is_open_or_mapped(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    fd = os.open(tmp_path / "gone", os.O_RDWR | os.O_CREAT)
    (tmp_path / "gone").unlink()
    os.write(fd, b"x" * MIB)
    inode = os.fstat(fd).st_ino
    assert opened([os.getpid()]).files[device, inode] == MIB
    with mmap.mmap(fd, MIB):
        os.close(fd)
        assert unlinked([os.getpid()]).files[device, inode] >= MIB
    assert (device, inode) not in unlinked([os.getpid()]).files


AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may look at files that are mapped and not open"
)


@pytest.mark.parametrize(
    "code",
    [
        FIRST_THREAD_ENDS,
        pytest.param(MAPPED_IN_PART, marks=AS_ROOT),
        pytest.param(FIRST_THREAD_ENDS_MAPPED, marks=AS_ROOT),
    ],
)
def test_no_thread_hides_a_file(code: str, tmp_path: Path) -> None:
    with holder(code, tmp_path) as pid:
        assert on(tmp_path, unlinked([pid])) == [MIB]


def test_a_program_that_runs_counts_when_it_has_been_deleted(tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    program.write_bytes(Path("/bin/sleep").read_bytes() + bytes(MIB))
    program.chmod(0o700)
    with subprocess.Popen([program, "60"]) as process:
        size = program.stat().st_blocks * BLOCK
        program.unlink()
        look = quota._Look({})
        look._running(process.pid)
        assert on(tmp_path, look.found) == [size]
        process.kill()


@AS_ROOT
def test_a_file_that_may_not_be_looked_at_keeps_the_size_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(MAPPED_IN_PART, tmp_path) as pid:
        (known,) = [
            {file: size}
            for file, size in unlinked([pid]).files.items()
            if file[0] == tmp_path.stat().st_dev
        ]
        assert list(known.values()) == [MIB]
        monkeypatch.setattr(quota._Look, "_look_at", lambda _self, _path: False)
        assert on(tmp_path, unlinked([pid])) == [mmap.PAGESIZE]
        assert on(tmp_path, unlinked([pid], known)) == [MIB]


def test_threads_are_looked_at_only_until_one_shows_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = threading.Event()
    others = [threading.Thread(target=done.wait) for _ in range(64)]
    for thread in others:
        thread.start()
    # the last of a list is looked up again, and must not be what the list was read by
    last = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 500)
    try:
        assert len(threads(os.getpid())) >= 65
        own = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # what other tests left open, too
        monkeypatch.setattr(quota, "MOST_FILES", own + 32)
        assert opened([os.getpid()]).complete
    finally:
        os.close(last)
        done.set()
        for thread in others:
            thread.join()


def test_too_many_descriptors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened([os.getpid()]).complete
    monkeypatch.setattr(quota, "MOST_FILES", 2)
    assert not opened([os.getpid()]).complete


def test_too_many_mappings_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unlinked([os.getpid()]).complete
    monkeypatch.setattr(quota, "MOST_MAPPINGS", 1000)
    assert not unlinked([os.getpid()]).complete


def test_processes_that_are_gone_hold_nothing() -> None:
    assert threads(2**22 + 1) == []
    assert unlinked([2**22 + 1]) == quota.DeletedFiles()
