"""The parts of a template that need neither privileges nor a fork of a kernel."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading

import pytest

from kernel_specs.template import preload, sandbox
from kernel_specs.template.init import ChildWatch
from kernel_specs.template.preload import Inherited
from kernel_specs.template.sandbox import KernelSandbox, SandboxMount

REQUEST = {
    "uid": 7,
    "hostname": "sandbox",
    "tmp_bytes": 1024,
    "places": [
        {"target": "/workspace", "source": "", "readonly": False},
        {"target": "/run/kernel", "source": "/sessions/0/x", "readonly": False},
        {"target": "/packages/0", "source": "", "readonly": True},
    ],
}


def test_detached_mounts_go_to_the_places_without_a_source() -> None:
    parsed = KernelSandbox.parse(REQUEST, [40, 41])
    assert parsed.places == (
        SandboxMount("/workspace", tree=40),
        SandboxMount("/run/kernel", source="/sessions/0/x"),
        SandboxMount("/packages/0", tree=41, readonly=True),
    )


@pytest.mark.parametrize("left_out", list(REQUEST))
def test_a_request_without_all_it_needs_is_refused(left_out: str) -> None:
    with pytest.raises(KeyError):
        KernelSandbox.parse(
            {name: value for name, value in REQUEST.items() if name != left_out}, []
        )


def test_memory_file_systems_limit_their_files_too() -> None:
    assert sandbox._tmpfs_options(0) == "mode=1777"
    assert sandbox._tmpfs_options(512 * 2**20) == "mode=1777,size=536870912,nr_inodes=32768"
    assert sandbox._tmpfs_options(4096) == "mode=1777,size=4096,nr_inodes=1024"


def test_a_thread_is_something_that_cannot_be_handed_down() -> None:
    before, stop = Inherited.now(), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert Inherited.now().more_than(before)
    stop.set()
    thread.join()


def test_shared_memory_is_something_that_cannot_be_handed_down() -> None:
    before = Inherited.now()
    with mmap.mmap(-1, 4096):
        assert Inherited.now().more_than(before)
    with mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert not Inherited.now().more_than(before)


def test_a_pipe_is_something_that_cannot_be_handed_down_and_a_file_is_not() -> None:
    before = Inherited.now()
    fds = os.pipe()
    assert Inherited.now().more_than(before)
    for fd in fds:
        os.close(fd)
    with tempfile.TemporaryFile():
        assert not Inherited.now().more_than(before)


def test_files_that_are_read_get_a_position_of_their_own() -> None:
    with tempfile.NamedTemporaryFile() as written:
        written.write(b"0123456789")
        written.flush()
        with open(written.name, "rb", buffering=0) as read:
            read.seek(4)
            other = os.dup(read.fileno())  # as a fork would
            files = preload.plain_files()
            assert read.fileno() in files
            assert written.fileno() not in files
            assert read.fileno() in preload.own_files({read.fileno(): files[read.fileno()]})
            assert read.read(2) == b"45"
            assert os.read(other, 2) == b"45"
            os.close(other)


def test_a_descriptor_that_has_come_to_mean_another_file_is_left_alone() -> None:
    with tempfile.TemporaryFile() as file:
        assert preload.own_files({file.fileno(): (0, 0), 10_000: (0, 0)}) == []


def test_native_pools_are_found_without_harm() -> None:
    found = preload.find_pools()
    preload.set_size([*found.sized, *found.filled])


def test_ended_children_are_noticed_once() -> None:
    watch = ChildWatch()
    try:
        child = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert list(watch.ended()) == [(child, 3 << 8)]
        assert list(watch.ended()) == []
    finally:
        ChildWatch.forget()
        os.close(watch._read)
        os.close(watch._write)
