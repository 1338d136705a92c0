"""A kernel that turns on its server: messages are bounded, others go on, the status is honest."""

from __future__ import annotations

import statistics

import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.run import UNSURE
from kernel_mcp.sessions.cell import CellOutcome, Status
from kernel_mcp.sessions.introspection import variables_of
from tests.escape.hostile_host import court, memory_growth, round_trips, text_of
from tests.integration.agent import agent
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

ENDLESS = ("flood_output", "flood_big_output", "flood_displays", "flood_shell", "never")
FINITE = (
    *("flood_welcome", "flood_unsigned", "flood_values", "flood_headers"),
    *("forge_for_others", "wrong_types", "ask_for_input"),
)

BROKEN = {
    "huge_message": "a message of more than 16,842,752 bytes on its iopub channel",
    "many_parts": "a message of more than 64 parts on its iopub channel",
    "close_output": "closed its iopub channel",
    "close_everything": "closed its",
}
RAW = {
    "raw_garbage": "the greeting is not that of ZMTP",
    "raw_silence": "did not answer within",
    "raw_slow": "did not answer within",
    "raw_endless_message": "a message of more than 16,842,752 bytes",
    "raw_endless_parts": "a message of more than 64 parts",
    "raw_endless_commands": "did not answer within",
    "raw_huge_size": "a message of more than",
    "raw_unknown_flags": "unknown flags",
    "raw_long_command": "a command of 1,048,576 bytes",
}
MOST_MIB = 160
"""A message of 16 MiB exists as bytes, as text, as an event and as a file's content."""
USUAL = 100.0
"""Half of another session's round trips, by the time of one that nothing disturbs: some 1 ms."""
MOST = 3000.0
"""Any of them: messages of 16 MiB hold up the server one at a time."""


@pytest.mark.parametrize("mode", sampled(ENDLESS, "flood_output", "never"))
async def test_a_kernel_that_never_ends_its_cell_is_killed_in_time(mode: str) -> None:
    async with court() as bench:
        honest, hostile = await bench.session("honest"), await bench.session(mode)
        with memory_growth() as grown:
            async with round_trips(bench, honest) as taken:
                cell = await bench.run(hostile)
        assert cell.status is Status.KILLED
        assert cell.outcome is not None
        assert cell.outcome.cause == (
            "it reached its time limit of 2 s, and did not stop within 0.2 s of being interrupted"
        )
        assert not cell.outcome.state_kept
        assert grown() < MOST_MIB
        assert len(taken) > 10
        assert statistics.median(taken) < USUAL
        assert max(taken.work) < MOST


@pytest.mark.parametrize(
    "mode", sampled(FINITE, "flood_unsigned", "forge_for_others", "wrong_types", "ask_for_input")
)
async def test_noise_does_not_change_what_a_cell_is_told_to_have_done(mode: str) -> None:
    async with court() as bench:
        honest, hostile = await bench.session("honest"), await bench.session(mode)
        with memory_growth() as grown:
            async with round_trips(bench, honest) as taken:
                cell = await bench.run(hostile, timeout_s=50)
        assert cell.status is Status.OK
        assert text_of(cell).endswith("honest\n")
        assert "forged" not in text_of(cell)
        assert grown() < 2 * MOST_MIB
        assert not taken or statistics.median(taken) < USUAL


@pytest.mark.ways
async def test_output_that_would_hold_up_the_server_is_told_to_be_left_out() -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session("flood_values"), timeout_s=50)
        assert "[left out: an output of 15.7 MB holds more than 200,000 values]" in text_of(cell)


@pytest.mark.ways
async def test_a_hundred_thousand_tiny_messages_are_one_output() -> None:
    async with court() as bench:
        honest, hostile = await bench.session("honest"), await bench.session("flood_tiny")
        async with round_trips(bench, honest) as taken:
            cell = await bench.run(hostile, timeout_s=50)
        assert cell.status is Status.OK
        assert text_of(cell) == "." * 100_000
        assert statistics.median(taken) < USUAL


@pytest.mark.ways
async def test_the_first_reply_stands() -> None:
    async with court() as bench:
        session = await bench.session("flood_replies")
        cell = await bench.run(session, timeout_s=50)
        assert cell.status is Status.OK
        assert (cell.outcome, cell.execution_count) == (CellOutcome(Status.OK, exit_code=0), 1)


async def test_a_forged_idle_ends_nothing_and_loses_nothing() -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session("forge_idle"))
        assert cell.status is Status.OK
        assert text_of(cell) == "after idle\n"


async def test_a_cell_without_an_idle_ends_with_its_reply() -> None:
    async with court() as bench:
        for mode in ("no_idle", "no_idle_but_answers"):
            cell = await bench.run(await bench.session(mode), timeout_s=30)
            assert cell.status is Status.OK
            assert text_of(cell) == "before\n"
            assert cell.notices == [UNSURE]


async def test_a_reply_that_overtakes_its_output_does_not_end_the_cell() -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session("slow_end"), timeout_s=30)
        assert cell.status is Status.OK
        assert text_of(cell) == "slow\n"
        assert cell.notices == []


async def test_output_that_answers_requests_of_others_belongs_to_no_cell() -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session("forge_parents"))
        assert cell.status is Status.OK
        assert text_of(cell) == "of a file descriptor\nhonest\n"


async def test_a_cell_that_the_kernel_drops_is_not_told_to_have_run() -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session("abort"))
        assert cell.status is Status.ERROR
        assert cell.outcome is not None
        assert "without running it" in (cell.outcome.cause or "")


@pytest.mark.ways
async def test_a_flood_of_answers_nobody_asked_for_changes_nothing() -> None:
    async with court() as bench:
        session = await bench.session("flood_control")
        await variables_of(session)
        honest = await bench.session("honest")
        with memory_growth() as grown:
            async with round_trips(bench, honest) as taken:
                cell = await bench.run(session)
        assert cell.status is Status.KILLED
        assert grown() < MOST_MIB
        assert statistics.median(taken) < USUAL


@pytest.mark.parametrize("mode", BROKEN)
async def test_a_kernel_that_cannot_be_talked_to_is_killed_and_the_reason_told(mode: str) -> None:
    async with court() as bench:
        session = await bench.session(mode)
        with memory_growth() as grown:
            cell = await bench.run(session, timeout_s=30)
        assert cell.status is Status.KILLED
        assert cell.outcome is not None
        assert "killed by SIGKILL" in (cell.outcome.cause or "")
        assert BROKEN[mode] in (cell.outcome.cause or "")
        assert grown() < MOST_MIB


@pytest.mark.parametrize("mode", ["die", "close_and_die"])
async def test_a_kernel_that_ends_itself_is_told_to_have_done_so(mode: str) -> None:
    async with court() as bench:
        cell = await bench.run(await bench.session(mode), timeout_s=30)
        assert cell.status is Status.KILLED
        assert cell.outcome is not None
        assert (cell.outcome.cause or "").startswith("the kernel exited with code 3")
        assert text_of(cell) == ("last words\n" if mode == "die" else "")


@pytest.mark.parametrize(
    "mode", sampled(RAW, "raw_garbage", "raw_silence", "raw_endless_message", "raw_huge_size")
)
async def test_bytes_that_are_no_messages_cost_a_kernel_its_start_or_its_life(mode: str) -> None:
    async with court() as bench:
        honest, hostile = await bench.session("honest"), await bench.session(mode)
        with memory_growth() as grown:
            async with round_trips(bench, honest) as taken:
                cell = await bench.run(hostile, timeout_s=10)
        assert isinstance(cell.error, LaunchError)
        assert RAW[mode] in str(cell.error)
        assert grown() < MOST_MIB
        assert statistics.median(taken) < USUAL


async def test_what_a_kernel_says_about_its_variables_is_not_believed() -> None:
    async with court() as bench:
        session = await bench.session("lie_about_variables")
        for _ in range(4):
            found = await variables_of(session)
            assert isinstance(found["omitted"], int)
            assert len(found["variables"]) <= 500
            for item in found["variables"]:
                assert isinstance(item["name"], str)
                assert len(item["name"]) <= 200
                assert item["size"] is None or item["size"] >= 0
        assert (await bench.run(session)).status is Status.OK


OWN_CHANNELS = {
    "closes them": ("p.close()", "closed its"),
    "sends too much": ("p.write(encode([b'x' * (17 << 20)]))", "more than 16,842,752"),
    "writes bytes": ("[write(fd) for fd in range(3, 200)]", "unknown flags in a frame"),
}


@pytest.mark.parametrize("attack", sampled(OWN_CHANNELS, "closes them"))
async def test_a_cell_that_attacks_its_own_channels_loses_its_kernel_and_is_told_why(
    attack: str,
) -> None:
    step, words = OWN_CHANNELS[attack]
    code = (
        "import contextlib, gc, os, time\n"
        "from kernel_specs.restricted.wire.sockets import ZmtpPeer\n"
        "from kernel_specs.restricted.wire.zmtp import encode\n"
        "def write(fd):\n"
        "    with contextlib.suppress(OSError): os.write(fd, b'x' * 100_000)\n"
        "peers = [p for p in gc.get_objects() if isinstance(p, ZmtpPeer)]\n"
        f"for p in peers: {step}\n"
        "time.sleep(20)"
    )
    async with agent("--allow", "*") as notebook:
        answer = await notebook.run(code, timeout=15)
        assert answer.status == "killed"
        assert words in answer.cell["cause"]
        assert (await notebook.run("6 * 7")).text == "42"
