"""The filter, run by an interpreter: every number, every argument that is looked at."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeAlias

import pytest

from kernel_mcp.linux.syscalls import (
    AARCH64,
    LAST_KNOWN,
    REFUSED,
    X86_64,
    Architecture,
    architecture,
)
from kernel_mcp.sandbox import seccomp
from kernel_mcp.sandbox.seccomp import ALLOW, KILL, X32_BIT, fail
from kernel_specs.linux import PR_SET_DUMPABLE
from kernel_specs.restricted.checkpoints.suspended import AS_A_COPY


def test_bisection_finds_the_interval_of_every_number(verdict: Callable[..., int]) -> None:
    starts = [(start, seccomp.give(start + 1)) for start in range(0, 3000, 3)]
    program = seccomp.assemble(seccomp.load(0) + seccomp.search(starts))
    for number in range(0, 3000, 7):
        assert verdict(program, arch=0, number=number) == number - number % 3 + 1


def test_a_branch_over_more_than_255_instructions_jumps_long(verdict: Callable[..., int]) -> None:
    filler = seccomp.mask(0xFFFF) * 300 + seccomp.give(1)
    body = seccomp.branch(seccomp.JUMP_EQ, 7, then=seccomp.give(2), otherwise=filler)
    program = seccomp.assemble(seccomp.load(0) + body)
    assert verdict(program, arch=0, number=7) == 2
    assert verdict(program, arch=0, number=8) == 1


def test_a_program_longer_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        seccomp.assemble(seccomp.give(0) * 4097)


ARCHITECTURES = [X86_64, AARCH64]
Verdict: TypeAlias = Callable[..., int]
Answer: TypeAlias = Callable[..., int]
EPERM = fail(errno.EPERM)


@pytest.fixture
def answer(verdict: Verdict) -> Callable[..., int]:
    def answer(arch: Architecture, name: str, *args: int) -> int:
        program = seccomp.compile_filter(arch)
        return verdict(program, arch=arch.audit_arch, number=arch.numbers[name], args=args)

    return answer


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_every_refused_call_answers_eperm(answer: Answer, arch: Architecture) -> None:
    for name in REFUSED:
        if name in arch.numbers:
            assert answer(arch, name) == EPERM, name


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_calls_without_a_rule_pass_and_unknown_ones_do_not_exist(
    verdict: Verdict, arch: Architecture
) -> None:
    program = seccomp.compile_filter(arch)
    special = {arch.numbers.get(name) for name in seccomp._rules()}
    for number in range(LAST_KNOWN + 1):
        if number not in special:
            assert verdict(program, arch=arch.audit_arch, number=number) == ALLOW, number
    for number in (LAST_KNOWN + 1, 600, X32_BIT - 1):
        assert verdict(program, arch=arch.audit_arch, number=number) == fail(errno.ENOSYS)


@pytest.mark.parametrize("number", [0, 1, 59, 101, 519])
def test_x32_calls_kill(verdict: Verdict, number: int) -> None:
    program = seccomp.compile_filter(X86_64)
    called = X32_BIT | number
    assert verdict(program, arch=X86_64.audit_arch, number=called) == KILL


@pytest.mark.parametrize("foreign", [0x40000003, 0xC00000B7, 0, 0xC00000F3])
def test_calls_of_another_architecture_kill(verdict: Verdict, foreign: int) -> None:
    assert verdict(seccomp.compile_filter(X86_64), arch=foreign, number=1) == KILL


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
@pytest.mark.parametrize(
    "flag", [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]
)
def test_clone_is_refused_with_any_namespace_flag(
    answer: Answer, arch: Architecture, flag: int
) -> None:
    assert answer(arch, "clone", flag | 17) == EPERM
    assert answer(arch, "clone", 0x003D0F00) == ALLOW  # what pthread_create passes
    assert answer(arch, "clone", 0x4111) == ALLOW  # vfork


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_threads_share_one_table_of_open_files(answer: Answer, arch: Architecture) -> None:
    thread, files, memory = 0x10000, 0x400, 0x900  # CLONE_VM, CLONE_SIGHAND
    assert answer(arch, "clone", thread | memory) == EPERM
    assert answer(arch, "clone", 1 << 32 | thread | memory) == EPERM
    assert answer(arch, "clone", thread | memory | files) == ALLOW
    assert answer(arch, "clone", memory) == ALLOW
    assert answer(arch, "unshare", files) == EPERM
    for flags in (0, 4):  # CLOSE_RANGE_CLOEXEC
        assert answer(arch, "close_range", 3, 0xFFFFFFFF, flags) == ALLOW
        own = answer(arch, "close_range", 3, 0xFFFFFFFF, flags | 2)
        assert own == fail(errno.EINVAL)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_clone3_does_not_exist_because_its_flags_cannot_be_read(
    answer: Answer, arch: Architecture
) -> None:
    assert answer(arch, "clone3", 0) == fail(errno.ENOSYS)


@pytest.mark.parametrize("call", ["socket", "socketpair"])
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_only_unix_and_ip_sockets_are_made(answer: Answer, arch: Architecture, call: str) -> None:
    allowed = {1, 2, 10}
    for family in range(64):
        expected = ALLOW if family in allowed else fail(errno.EOPNOTSUPP)
        assert answer(arch, call, family, 1) == expected, family


def test_the_high_word_of_an_int_argument_hides_nothing(answer: Answer) -> None:
    assert answer(X86_64, "socket", (1 << 32) | 16) == fail(errno.EOPNOTSUPP)
    assert answer(X86_64, "ioctl", 0, (1 << 32) | 0x5412) == EPERM


@pytest.mark.parametrize("request_code", [0x5412, 0x541C, 0x5423])
def test_terminal_injection_is_refused(answer: Answer, request_code: int) -> None:
    assert answer(X86_64, "ioctl", 0, request_code) == EPERM
    assert answer(X86_64, "ioctl", 0, 0x5413) == ALLOW  # TIOCGWINSZ


def test_personality_stays_the_default_one(answer: Answer) -> None:
    assert answer(X86_64, "personality", 0) == ALLOW
    assert answer(X86_64, "personality", 0x0040000) == EPERM  # ADDR_NO_RANDOMIZE


def test_device_nodes_are_refused_and_fifos_are_made(answer: Answer) -> None:
    for kind in (0x2000, 0x6000):
        assert answer(X86_64, "mknod", 0, kind | 0o666, 0x103) == EPERM
        assert answer(X86_64, "mknodat", 0, 0, kind | 0o666, 0x103) == EPERM
    assert answer(X86_64, "mknod", 0, 0x1000 | 0o600) == ALLOW
    assert answer(X86_64, "mknodat", 0, 0, 0x8000 | 0o600) == ALLOW


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_nothing_gets_the_rights_of_its_owner(answer: Answer, arch: Architecture) -> None:
    create, unnamed = 0o100, 0o20200000
    for name, *before in (
        ("chmod", 0x1000),
        ("fchmod", 3),
        ("fchmodat", 3, 0x1000),
        ("fchmodat2", 3, 0x1000),
        ("mknod", 0x1000),
        ("mknodat", 3, 0x1000),
        ("creat", 0x1000),
        ("open", 0x1000, create | 0o2),
        ("openat", 3, 0x1000, create | 0o2),
        ("openat", 3, 0x1000, unnamed | 0o2),
    ):
        if name not in arch.numbers:
            continue
        for mode in (0o4755, 0o2755, 0o6000, 0o107777):
            assert answer(arch, name, *before, mode) == EPERM, (name, mode)
            assert answer(arch, name, *before, 1 << 32 | mode) == EPERM, (name, mode)
        for mode in (0, 0o600, 0o1777, 0o100644):
            assert answer(arch, name, *before, mode) == ALLOW, (name, mode)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_an_open_that_makes_nothing_has_no_mode(answer: Answer, arch: Architecture) -> None:
    """The value that is left in the register means nothing."""
    assert answer(arch, "openat", 3, 0x1000, 0o2000000, 0o6755) == ALLOW
    assert answer(arch, "openat2", 3, 0x1000, 0x1000, 24) == fail(errno.ENOSYS)


@pytest.mark.parametrize("command", [1024, 1026, 1040])
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_nobody_is_made_to_wait_for_a_lease(
    answer: Answer, arch: Architecture, command: int
) -> None:
    assert answer(arch, "fcntl", 3, command, 1) == EPERM
    assert answer(arch, "fcntl", 3, 1 << 32 | command, 1) == EPERM
    for other in (1, 2, 4, 6, 37, 1025, 1030, 1031, 1033):
        assert answer(arch, "fcntl", 3, other) == ALLOW


def test_other_machines_have_no_table() -> None:
    assert architecture("riscv64") is None


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_disk_space_cannot_be_taken_faster_than_it_is_written(
    answer: Answer, arch: Architecture
) -> None:
    assert answer(arch, "fallocate") == fail(errno.EOPNOTSUPP)
    for request_code in seccomp.PREALLOCATIONS:
        assert answer(arch, "ioctl", 3, request_code) == EPERM


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_sockets_are_of_few_families_and_protocols(
    answer: Answer, arch: Architecture, call: str
) -> None:
    stream = 1 | 0o2000000  # SOCK_STREAM | SOCK_CLOEXEC
    for family in (2, 10):
        for protocol in (0, 6, 17):
            assert answer(arch, call, family, stream, protocol) == ALLOW
        for protocol in (1, 33, 58, 132, 136, 255, 262):
            refused = fail(errno.EPROTONOSUPPORT)
            assert answer(arch, call, family, stream, protocol) == refused
    assert answer(arch, call, 1, stream, 0) == ALLOW
    assert answer(arch, call, 1, stream, 6) == fail(errno.EPROTONOSUPPORT)
    for family in (0, 16, 17, 38, 40):
        assert answer(arch, call, family, stream, 0) == fail(errno.EOPNOTSUPP)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
@pytest.mark.parametrize(
    ("call", "before"),
    [
        *(("sendto", 3), ("recvfrom", 3), ("sendmmsg", 3), ("recvmmsg", 3)),
        *(("sendmsg", 2), ("recvmsg", 2)),
    ],
)
def test_urgent_data_is_refused_and_every_other_flag_passes(
    answer: Answer, arch: Architecture, call: str, before: int
) -> None:
    arguments = [7] * before
    assert answer(arch, call, *arguments, 1) == fail(errno.EOPNOTSUPP)
    assert answer(arch, call, *arguments, 1 | 0x4000) == fail(errno.EOPNOTSUPP)
    for flags in (0, 2, 0x40, 0x4000, 0x40000000, 0x7FFFFFFE):
        assert answer(arch, call, *arguments, flags) == ALLOW


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sealed_filter_leaves_only_connected_pairs_of_unix_sockets(
    verdict: Verdict, arch: Architecture
) -> None:
    program = seccomp.compile_filter(arch, sealed=True)

    def answer(name: str, *args: int) -> int:
        return verdict(program, arch=arch.audit_arch, number=arch.numbers[name], args=args)

    cloexec = 0o2000000
    for kind in (1, 2, 3, 5):
        assert answer("socket", 1, kind | cloexec, 0) == fail(errno.EACCES)
        pair = answer("socketpair", 1, kind | cloexec, 0)
        assert pair == (ALLOW if kind in (1, 5) else fail(errno.EACCES))
    assert answer("socket", 2, 1 | cloexec, 6) == ALLOW
    assert answer("socket", 16, 3, 0) == fail(errno.EOPNOTSUPP)


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.machine)
def test_no_process_hides_but_the_copies_of_a_kernel(verdict: Verdict, arch: Architecture) -> None:
    for copies, outcome in ((False, EPERM), (True, ALLOW)):
        program = seccomp.compile_filter(arch, copies=copies)

        def prctl(*args: int, program: bytes = program) -> int:
            called = arch.numbers["prctl"]
            return verdict(program, arch=arch.audit_arch, number=called, args=args)

        hide = PR_SET_DUMPABLE
        assert prctl(hide, 0, 0, 0, AS_A_COPY) == outcome
        for args in ((hide, 0), (hide, 0, AS_A_COPY), (hide, 0, 0, AS_A_COPY)):
            assert prctl(*args) == EPERM
        assert prctl(15, 0, 0, 0, 0) == ALLOW  # PR_SET_NAME
