"""Descriptors of a command in the making, and what reports say of what is open."""

from __future__ import annotations

import os

from kernel_mcp.sandbox.base import Grants, Passed


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_what_is_kept_stays_open_and_is_read_from_its_beginning() -> None:
    content = os.urandom(300_000)
    with Passed() as passed:
        name = passed.file(content)
        fds = passed.keep()
    assert fds == [int(name)]
    with os.fdopen(fds[0], "rb") as file:
        assert file.read() == content


def test_the_server_keeps_the_reading_end_of_a_status() -> None:
    with Passed() as passed:
        read, write = passed.status()
        (theirs,) = passed.keep()
    assert theirs == int(write)
    os.write(theirs, b"{}")
    assert os.read(read, 10) == b"{}"
    os.close(theirs)
    os.close(read)


def test_everything_is_closed_when_the_command_is_not_made() -> None:
    with Passed() as passed:
        file, own = int(passed.file(b"x")), passed.add(os.open("/", os.O_PATH))
        read, write = passed.status()
        fds = (file, own, read, int(write))
        assert all(map(is_open, fds))
    assert not any(map(is_open, fds))


def test_reports_say_of_the_network_and_of_files_what_holds_with_these_doors() -> None:
    programs = "the interpreter and its packages"
    network, files = Grants().reach(programs)
    assert network == "a network of its own: the loopback alone"
    assert files == (
        "only the workspace and a private /tmp are writable; hidden: the host's files but "
        "the interpreter and its packages"
    )
    grants = Grants(mounts=True, writable=("/data",), network=True, devices=("/dev/a", "/dev/b"))
    network, files, sockets, devices = grants.reach(programs)
    assert network.startswith("a network of its own: the loopback, and a proxy that connects")
    assert files == (
        "only the workspace, a private /tmp and /data are writable; hidden: the host's files but "
        "the interpreter and its packages, and `mounts` without known secrets"
    )
    assert sockets.startswith("Unix sockets only in pairs")
    assert devices == "of the host's devices only /dev/a and /dev/b"
