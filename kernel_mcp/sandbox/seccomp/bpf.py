"""Builds the classic BPF programs that seccomp runs.

Instructions are `struct sock_filter` of <linux/filter.h>: 16-bit code, 8-bit jump offsets for true
and false, 32-bit operand. Jumps only go forward.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kernel_mcp.linux.syscalls import LAST_KNOWN, Architecture

ALLOW = 0x7FFF0000  # SECCOMP_RET_ALLOW
KILL = 0x80000000  # SECCOMP_RET_KILL_PROCESS
_ERRNO = 0x00050000  # SECCOMP_RET_ERRNO

OFFSET_NR, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16
"""Offsets into `struct seccomp_data`, little-endian; an argument has eight bytes."""
X32_BIT = 0x40000000

LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_SET = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

MAX_SHORT_JUMP = 255
"""Conditional jumps hold their offset in one byte."""
MAX_INSTRUCTIONS = 4096
"""BPF_MAXINSNS of <linux/bpf_common.h>."""

_FILTER = struct.Struct("=HBBI")


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    if_true: int
    if_false: int
    operand: int


Program: TypeAlias = list[Instruction]


def load(offset: int) -> Program:
    """Load the 32-bit word at `offset` of the seccomp data."""
    return [Instruction(LOAD_WORD, 0, 0, offset)]


def mask(bits: int) -> Program:
    """Keep only `bits` of the loaded word."""
    return [Instruction(AND, 0, 0, bits)]


def give(verdict: int) -> Program:
    """End the program with a verdict."""
    return [Instruction(RETURN, 0, 0, verdict)]


def fail(error: int) -> int:
    """The verdict that makes a call return `error`."""
    return _ERRNO | error


def argument(index: int, bits: int = 0xFFFFFFFF) -> Program:
    """Load the low word of a system call's argument, which is all that the kernel reads."""
    loaded = load(OFFSET_ARGUMENTS + 8 * index)
    return loaded if bits == 0xFFFFFFFF else loaded + mask(bits)


def one_of(values: Sequence[int], then: Program, otherwise: Program) -> Program:
    """Run `then` when the loaded word is one of `values`, else `otherwise`."""
    program = otherwise
    for value in values:
        program = branch(JUMP_EQ, value, then=then, otherwise=program)
    return program


def branch(jump: int, operand: int, *, then: Program, otherwise: Program) -> Program:
    """Run `then` when the comparison holds, else `otherwise`; both have to end in a verdict."""
    if len(otherwise) <= MAX_SHORT_JUMP:
        return [Instruction(jump, len(otherwise), 0, operand), *otherwise, *then]
    return [
        Instruction(jump, 0, 1, operand),
        Instruction(JUMP, 0, 0, len(otherwise)),
        *otherwise,
        *then,
    ]


def search(starts: Sequence[tuple[int, Program]]) -> Program:
    """Bisect to the loaded word's interval and run its program; `starts` is sorted by number."""
    if len(starts) == 1:
        return starts[0][1]
    middle = len(starts) // 2
    return branch(
        JUMP_GE,
        starts[middle][0],
        then=search(starts[middle:]),
        otherwise=search(starts[:middle]),
    )


def assemble(program: Program) -> bytes:
    """The bytes of a `struct sock_filter` array. Raises ValueError when it is too long."""
    if len(program) > MAX_INSTRUCTIONS:
        raise ValueError(f"a BPF program has at most {MAX_INSTRUCTIONS} instructions")
    return b"".join(_FILTER.pack(*instruction) for instruction in program)


def compile_rules(arch: Architecture, rules: Mapping[str, Program]) -> bytes:
    """A filter that runs the rule of each call by its name and allows those without one.

    Unknown calls fail with ENOSYS, another architecture is killed, equal neighbours are joined.
    """
    allow = give(ALLOW)
    known = {arch.numbers[name]: rule for name, rule in rules.items() if name in arch.numbers}
    starts: list[tuple[int, Program]] = []
    for number in range(LAST_KNOWN + 1):
        rule = known.get(number, allow)
        if not starts or starts[-1][1] != rule:
            starts.append((number, rule))
    by_number = search([*starts, (LAST_KNOWN + 1, give(fail(errno.ENOSYS)))])
    if arch.x32:
        by_number = branch(JUMP_GE, X32_BIT, then=give(KILL), otherwise=by_number)
    native = load(OFFSET_NR) + by_number
    return assemble(
        load(OFFSET_ARCH) + branch(JUMP_EQ, arch.audit_arch, then=native, otherwise=give(KILL))
    )
