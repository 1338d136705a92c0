"""An assembler for the classic BPF programs that seccomp runs.

A program is a list of instructions, each `struct sock_filter` of <linux/filter.h>: 16-bit code,
8-bit jump offsets for true and false, 32-bit operand. Jumps only go forward.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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
    """Find the interval the loaded word lies in by bisection and run its program.

    `starts` is sorted: each program serves from its number up to the next one's.
    """
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
