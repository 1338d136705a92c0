"""A seccomp filter interpreter: what the kernel would answer for one system call."""

from __future__ import annotations

import struct
from typing import Protocol

import pytest

from kernel_mcp.sandbox import seccomp


class RunFilter(Protocol):
    """The function that the fixture `verdict` returns."""

    def __call__(
        self, program: bytes, *, arch: int, number: int, args: tuple[int, ...] = ()
    ) -> int:
        """Run an assembled filter on one call."""


@pytest.fixture(scope="session")
def verdict() -> RunFilter:
    """The interpreter."""
    return _verdict


def _verdict(program: bytes, *, arch: int, number: int, args: tuple[int, ...] = ()) -> int:
    padded = (*args, *([0] * (6 - len(args))))
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, counter = 0, 0
    while True:
        operation, if_true, if_false, operand = code[counter]
        counter += 1
        if operation == seccomp.LOAD_WORD:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == seccomp.AND:
            accumulator &= operand
        elif operation == seccomp.RETURN:
            return int(operand)
        elif operation == seccomp.JUMP:
            counter += operand
        else:
            taken = {
                seccomp.JUMP_EQ: accumulator == operand,
                seccomp.JUMP_GE: accumulator >= operand,
                seccomp.JUMP_SET: bool(accumulator & operand),
            }[operation]
            counter += if_true if taken else if_false
