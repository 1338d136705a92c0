"""Lines are cut from what arrives; one that is too long is dropped and the next one is read."""

from __future__ import annotations

import json

import pytest

from kernel_mcp.envelopes import Refusal
from kernel_mcp.stdio import Lines

pytestmark = [pytest.mark.anyio]


async def lines_of(*pieces: bytes, most: int = 100_000) -> list[bytes | Refusal]:
    """What `Lines` makes of these pieces."""
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return [line if isinstance(line, Refusal) else bytes(line) async for line in Lines(read, most)]


async def test_lines_are_cut_wherever_the_pieces_are() -> None:
    whole = b"one\ntwo\n\nthree"
    expected = [b"one\n", b"two\n", b"\n", b"three"]
    assert await lines_of(whole) == expected
    for size in (1, 2, 3, 5):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        assert await lines_of(*pieces) == expected


@pytest.mark.parametrize("size", [1000, 7777, 50_000, 1_000_000])
async def test_a_line_that_is_too_long_costs_itself_only(size: int) -> None:
    long = b'{"params":"' + b"x" * 300_000 + b'","id":5,"method":"m"}\n'
    whole = b"before\n" + long + b"after\nlast\n"
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    before, refusal, *after = await lines_of(*pieces)
    assert before == b"before\n"
    assert after == [b"after\n", b"last\n"]
    if size < 1_000_000:
        assert isinstance(refusal, Refusal)
        assert [json.loads(answer)["id"] for answer in refusal.answers] == [5]


async def test_a_line_that_is_too_long_and_never_ends_is_refused_at_the_end() -> None:
    (refusal,) = await lines_of(*[b"x" * 1000] * 300)
    assert isinstance(refusal, Refusal)
