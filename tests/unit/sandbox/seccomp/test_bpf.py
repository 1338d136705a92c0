"""The assembler."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernel_mcp.sandbox.seccomp import bpf


def test_bisection_finds_the_interval_of_every_number(verdict: Callable[..., int]) -> None:
    starts = [(start, bpf.give(start + 1)) for start in range(0, 3000, 3)]
    program = bpf.assemble(bpf.load(0) + bpf.search(starts))
    for number in range(0, 3000, 7):
        assert verdict(program, arch=0, number=number) == number - number % 3 + 1


def test_a_branch_over_more_than_255_instructions_jumps_long(verdict: Callable[..., int]) -> None:
    filler = bpf.mask(0xFFFF) * 300 + bpf.give(1)
    body = bpf.branch(bpf.JUMP_EQ, 7, then=bpf.give(2), otherwise=filler)
    program = bpf.assemble(bpf.load(0) + body)
    assert verdict(program, arch=0, number=7) == 2
    assert verdict(program, arch=0, number=8) == 1


def test_a_program_longer_than_the_kernel_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        bpf.assemble(bpf.give(0) * 4097)
