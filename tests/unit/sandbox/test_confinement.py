"""Reading the confinement of a kernel's process, and finding violations of the expected one."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox import confinement
from kernel_mcp.sandbox.confinement import (
    NAMESPACES,
    ExpectedConfinement,
    ObservedConfinement,
    gainable,
    observe,
    violations,
    visible_mounts,
)

MOUNTS = """\
20 1 0:41 /newroot / ro,nosuid - tmpfs tmpfs rw
21 20 254:0 /usr /usr ro,nosuid,relatime shared:1 - ext4 /dev/vda rw
22 20 0:42 / /tmp rw,nosuid - tmpfs tmpfs rw
23 20 0:43 / /proc rw,nosuid - proc proc rw
24 23 0:6 /null /proc/keys ro,nosuid - devtmpfs devtmpfs rw
25 20 0:6 /null /dev/null rw,nosuid - devtmpfs devtmpfs rw
30 22 0:52 / /tmp rw,nosuid - tmpfs tmpfs rw
31 23 0:53 / /proc ro,nosuid - proc proc rw
32 31 0:6 /null /proc/kcore rw,nosuid - devtmpfs devtmpfs rw
"""
SERVER = ObservedConfinement({}, {name: f"{name}:[1]" for name in NAMESPACES})
SOUND = ObservedConfinement(
    {
        "Uid": "7\t7\t7\t7",
        "Gid": "7\t7\t7\t7",
        "Groups": "",
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "Seccomp_filters": "1",
        **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0000000000000000"),
    },
    {name: f"{name}:[2]" for name in NAMESPACES},
)
PROMISE = ExpectedConfinement(Identity(7, 7), filters=1, namespaces=NAMESPACES)


def found(**status: str) -> ObservedConfinement:
    return replace(SOUND, status={**SOUND.status, **status})


def test_a_sound_kernel_breaks_nothing() -> None:
    assert violations(PROMISE, SOUND, SERVER) == ()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (found(Uid="0\t7\t7\t7"), "runs as host user 0 7"),
        (found(Gid="7\t7\t0\t7"), "instead of 7"),
        (found(Groups="27"), "in the groups 27"),
        (found(CapEff="0000000000000400"), "0x400"),
        (found(CapAmb="0000000000000001"), "0x1"),
        (found(NoNewPrivs="0"), "may gain privileges"),
        (found(Seccomp="0", Seccomp_filters="0"), "0 system call filters instead of 1"),
        (replace(SOUND, namespaces={**SOUND.namespaces, "net": "net:[1]"}), "others: net"),
        (replace(SOUND, namespaces={**SOUND.namespaces, "ipc": "ipc:[9]"}), "others: ipc"),
    ],
)
def test_each_thing_that_does_not_hold_is_told(facts: ObservedConfinement, words: str) -> None:
    (told,) = violations(PROMISE, facts, SERVER, {"ipc:[9]"})
    assert words in told


def test_mounts_that_others_cover_do_not_count() -> None:
    mounts = visible_mounts(MOUNTS)
    assert set(mounts) == {"/", "/usr", "/tmp", "/proc", "/proc/kcore", "/dev/null"}
    assert mounts["/tmp"].name == "tmpfs:[0:52]"
    assert not mounts["/proc"].writable


def test_files_and_limits_are_part_of_what_has_to_hold() -> None:
    place = replace(SOUND, mounts=visible_mounts(MOUNTS), limits={"Max processes": 9})
    expected = replace(
        PROMISE, writable=frozenset({"/tmp"}), scratch=("/tmp",), covered=("/proc/kcore",)
    )
    assert violations(expected, place, SERVER, (), {"Max processes": 9}) == ()
    assert violations(expected, place, SERVER, {"tmpfs:[0:52]"}) == (
        "it shares namespaces with others: /tmp",
    )
    closed = replace(expected, writable=frozenset(), scratch=("/usr",), covered=("/proc/keys",))
    assert violations(closed, place, SERVER, (), {"Max processes": 8, "Max open files": 7}) == (
        "it may write to /tmp",
        "it has no /usr of its own",
        "nothing covers /proc/keys",
        "its limit “Max processes” is 9 instead of at most 8",
        "its limit “Max open files” is lacking instead of at most 7",
    )


FOLDERS = """\
20 1 0:41 /newroot / ro,nosuid - tmpfs tmpfs rw
21 20 254:0 /home/me/project /data rw,nosuid - ext4 /dev/vda rw
22 21 254:0 /home/me/project/room /data/room rw,nosuid - ext4 /dev/vda rw
23 22 254:0 /home/me/project/room/.git /data/room/.git rw,nosuid - ext4 /dev/vda rw
24 21 254:0 /home/me/project/other /data/out rw,nosuid - ext4 /dev/vda rw
25 21 254:1 /home/me/project/disk /data/disk rw,nosuid - ext4 /dev/vdb rw
26 20 254:0 /home/me/project/room /database/room rw,nosuid - ext4 /dev/vda rw
27 20 254:0 / /srv rw,nosuid - ext4 /dev/vda rw
28 27 254:0 /etc /srv/etc rw,nosuid - ext4 /dev/vda rw
"""


def test_parts_of_a_folder_may_have_mounts_but_not_where_it_is_fixed() -> None:
    """Folders that hold something fixed have some, and the host moves them while kernels run."""
    place = replace(SOUND, mounts=visible_mounts(FOLDERS))
    folders = frozenset({"/data", "/srv"})
    open_ones = replace(PROMISE, writable=folders, parts_of=folders)
    told = "it may write to /data/disk, /data/out, /database/room"
    assert violations(open_ones, place, SERVER) == (told,)
    fixed = replace(open_ones, fixed=frozenset({"/data/room/.git"}))
    (told,) = violations(fixed, place, SERVER)
    assert "/data/room/.git" in told
    (told,) = violations(replace(open_ones, parts_of=frozenset()), place, SERVER)
    assert "/data/room," in told


def test_filters_that_the_server_has_itself_do_not_count() -> None:
    server = replace(SERVER, status={"Seccomp": "2", "Seccomp_filters": "1"})
    assert "1 system call filters instead of 2" in violations(PROMISE, SOUND, server)[0]
    assert violations(PROMISE, found(Seccomp_filters="2"), server) == ()
    assert violations(replace(PROMISE, inherits=False), SOUND, server) == ()


def test_the_full_bounding_set_of_ordinary_users_gives_nothing_without_new_privileges() -> None:
    full = {**SOUND.status, "CapBnd": "000001ffffffffff"}
    assert gainable(full) == 0
    assert gainable({**full, "NoNewPrivs": "0"}) == 0x1FFFFFFFFFF
    assert gainable({**full, "CapInh": "0000000000000004"}) == 4


def test_facts_are_those_of_the_process_and_of_no_later_one() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            facts = observe(process.pid, pidfd)
            assert facts.parent == os.getpid()
            assert facts.namespaces == observe(os.getpid()).namespaces
            process.kill()
            process.wait()
            with pytest.raises(ProcessLookupError):
                observe(process.pid, pidfd)
            # the number means somebody else now, as far as anybody can tell
            with pytest.raises(ProcessLookupError):
                observe(os.getpid(), pidfd)
        finally:
            os.close(pidfd)


def test_a_process_may_end_while_its_facts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(confinement, "_namespaces", lambda _: {})  # were read before its end
        with pytest.raises(ProcessLookupError, match="has ended"):
            observe(process.pid)
