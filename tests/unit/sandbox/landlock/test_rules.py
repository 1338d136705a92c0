"""The second filter, run by an interpreter: what it takes away, what it leaves alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeAlias

import pytest

from kernel_mcp.linux.syscalls import AARCH64, LAST_KNOWN, X86_64, Architecture
from kernel_mcp.sandbox.landlock import rules
from kernel_mcp.sandbox.seccomp import ALLOW, KILL, fail

ARCHITECTURES = [X86_64, AARCH64]
Answer: TypeAlias = Callable[..., int]
SILENT = fail(0)
EPERM, EACCES = fail(errno.EPERM), fail(errno.EACCES)
UNSUPPORTED = fail(errno.EOPNOTSUPP)

pytestmark = pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)


@pytest.fixture
def answer(verdict: Callable[..., int], arch: Architecture) -> Answer:
    program = rules.compile_landlock_filter(arch, own_user=False)

    def answer(name: str, *args: int) -> int:
        return verdict(program, arch=arch.audit_arch, number=arch.numbers[name], args=args)

    return answer


@pytest.mark.parametrize("call", ["fchmod", "fchmodat", "fchmodat2"])
def test_modes_seem_to_change(answer: Answer, call: str) -> None:
    assert answer(call, 3, 0o777) == SILENT


def test_times_seem_to_change_except_to_now(answer: Answer) -> None:
    path, times = 0x7F00_0000_0000, 0x7F01_0000_0010  # the low word of a pointer may be zero
    assert answer("utimensat", 3, path, times) == SILENT
    assert answer("utimensat", 3, path, path) == SILENT
    assert answer("utimensat", 3, 0, times) == SILENT
    assert answer("utimensat", 3, 0, 0) == SILENT
    assert answer("utimensat", 3, path, 0) == EPERM


def test_the_older_names_of_these_calls_are_covered_on_x86(
    answer: Answer, arch: Architecture
) -> None:
    if arch is X86_64:
        assert answer("chmod", 0x1000, 0o777) == SILENT
        assert answer("futimesat", 3, 0x1000, 0x1000) == SILENT
        for call in ("utime", "utimes"):
            assert answer(call, 0x1000, 0x1000) == SILENT
            assert answer(call, 0x1000, 0) == EPERM
        for call in ("chown", "lchown"):
            assert answer(call) == EPERM


def test_a_user_of_its_own_changes_modes_and_times(
    verdict: Callable[..., int], arch: Architecture
) -> None:
    program = rules.compile_landlock_filter(arch, own_user=True)
    for name in ("fchmod", "fchmodat", "fchmodat2", "utimensat"):
        number = arch.numbers[name]
        assert verdict(program, arch=arch.audit_arch, number=number, args=(1, 4096, 0)) == ALLOW
    assert verdict(program, arch=arch.audit_arch, number=arch.numbers["fchownat"]) == EPERM


@pytest.mark.parametrize(
    "call", ["setxattr", "getxattr", "fsetxattr", "setxattrat", "file_setattr"]
)
def test_extended_attributes_are_not_supported(answer: Answer, call: str) -> None:
    assert answer(call) == UNSUPPORTED


@pytest.mark.parametrize(
    "call", ["setsid", "setpgid", "mq_open", "inotify_add_watch", "inotify_init1"]
)
def test_what_leaves_the_group_or_the_session_is_refused(answer: Answer, call: str) -> None:
    assert answer(call) == EPERM


def test_nothing_connects(answer: Answer) -> None:
    assert answer("connect", 3) == EACCES


@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_only_connected_unix_sockets_are_made(answer: Answer, call: str) -> None:
    cloexec, nonblocking = 0o2000000, 0o4000
    for kind in (1, 5):
        assert answer(call, 1, kind | cloexec | nonblocking) == ALLOW
    for kind in (2, 3, 4, 6, 10):
        assert answer(call, 1, kind | cloexec) == EACCES
    for family in (2, 10):
        for kind in range(16):
            assert answer(call, family, kind) == EACCES
    for family in (0, *range(3, 10), *range(11, 64)):
        assert answer(call, family, 1) == UNSUPPORTED


@pytest.mark.parametrize("call", ["prlimit64", "sched_setaffinity", "sched_setattr"])
def test_a_process_changes_only_itself(answer: Answer, call: str) -> None:
    assert answer(call, 0, 7) == ALLOW
    assert answer(call, 1, 7) == EPERM
    assert answer(call, 0xFFFFFFFF, 7) == EPERM


def test_scheduling_of_others_seems_to_change(answer: Answer) -> None:
    assert answer("sched_setscheduler", 0) == ALLOW
    assert answer("sched_setscheduler", 7) == SILENT


def test_niceness_is_set_for_the_own_process_only(answer: Answer) -> None:
    assert answer("setpriority", 0, 0, 5) == ALLOW
    assert answer("setpriority", 0, 77, 5) == EPERM
    assert answer("setpriority", 1, 0, 5) == EPERM
    assert answer("setpriority", 2, 0, 5) == EPERM


def test_the_death_signal_stays(answer: Answer) -> None:
    assert answer("prctl", 1, 0) == EPERM
    assert answer("prctl", 1 << 32 | 1, 0) == EPERM
    assert answer("prctl", 15) == ALLOW  # PR_SET_NAME


@pytest.mark.parametrize("mode", [0o3, 0o2000003, 0o100003, 1 << 32 | 3])
def test_files_are_opened_for_reading_or_writing(
    answer: Answer, arch: Architecture, mode: int
) -> None:
    denied = fail(errno.EACCES)
    assert answer("openat", 3, 0x1000, mode) == denied
    assert answer("openat", 3, 0x1000, mode & ~1) == ALLOW
    assert answer("openat", 3, 0x1000, mode & ~2) == ALLOW
    if arch is X86_64:
        assert answer("open", 0x1000, mode) == denied
        assert answer("open", 0x1000, mode & ~3, 3) == ALLOW


@pytest.mark.parametrize(
    "request_code",
    [
        *(0x8912, 0x8927, 0x89F0),  # interfaces
        *(0x40086602, 0x401C5820, 0x40087602, 0x40086604),  # flags and versions of files
        *(0x6609, 0x40806685, 0x800C6613, 0xC0406618),  # layout, verity, keys
        *(0x5000940E, 0x50009401, 0x40089419),  # subvolumes of btrfs
        *(0xFF02, 0xFF09, 0xC040FF0B),  # processes by pidfd
    ],
)
def test_interface_and_file_flag_requests_are_refused(answer: Answer, request_code: int) -> None:
    assert answer("ioctl", 3, request_code) == EPERM
    assert answer("ioctl", 3, 1 << 32 | request_code) == EPERM


@pytest.mark.parametrize(
    "request_code",
    [0x541B, 0x5401, 0x5413, 0x5421, 0x8901, 0x80086601, 0xC020660B, 0x40049409],
)
def test_ordinary_requests_pass(answer: Answer, request_code: int) -> None:
    assert answer("ioctl", 3, request_code) == ALLOW


def test_all_other_calls_are_left_to_the_first_filter(
    verdict: Callable[..., int], arch: Architecture
) -> None:
    program = rules.compile_landlock_filter(arch, own_user=False)
    known = {arch.numbers.get(name) for name in rules._call_rules()}
    for number in range(LAST_KNOWN + 1):
        if number not in known:
            assert verdict(program, arch=arch.audit_arch, number=number) == ALLOW, number


def test_a_foreign_architecture_kills(verdict: Callable[..., int], arch: Architecture) -> None:
    program = rules.compile_landlock_filter(arch, own_user=False)
    assert verdict(program, arch=0x40000003, number=1) == KILL


def test_no_number_stands_for_two_calls(arch: Architecture) -> None:
    assert len(set(arch.numbers.values())) == len(arch.numbers)
