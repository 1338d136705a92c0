"""One contract for every kind of kernel: this server's own, and those of other languages."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from mcp_types import TextResourceContents

from tests.contracts.interpreter import KINDS, Kind, Opened, opened, words
from tests.integration.agent import PREFIX, notices

pytestmark = pytest.mark.anyio

ALWAYS = ("forked", "stock")
FOREIGN = [kind for kind in KINDS if kind.spec or kind.elsewhere]
CONFINED = [kind for kind in KINDS if not kind.elsewhere]


def over(kinds: list[Kind], always: Sequence[str] = ALWAYS) -> pytest.MarkDecorator:
    """Run a test for those of these kinds of kernels in `always`; with `--full` for all of them."""
    found = [
        pytest.param(kind, id=kind.name, marks=() if kind.name in always else (pytest.mark.ways,))
        for kind in kinds
    ]
    return pytest.mark.parametrize("kind", found, scope="module")


every_kind = over([*KINDS])
confined = over(CONFINED)


@pytest.fixture(scope="module")
async def shared(kind: Kind) -> AsyncIterator[Opened]:
    """A session whose kernel stays."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # short enough for sockets
        async with opened(kind, Path(path)) as session:
            yield session


@pytest.fixture
async def own(kind: Kind) -> AsyncIterator[Opened]:
    """A session of the test's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        async with opened(kind, Path(path)) as session:
            yield session


@every_kind
async def test_variables_stay_and_cells_run_one_after_the_other(shared: Opened) -> None:
    await shared.run(shared.language.keeps)
    await shared.begin(shared.language.waits, shared.path("order"))
    behind = await shared.run(shared.language.adds, wait=0.1)
    assert behind.status == "queued", behind.text
    await shared.make("order")
    assert "42" in words((await shared.run(shared.language.adds)).text)


@every_kind
async def test_output_comes_in_the_order_in_which_it_was_made(shared: Opened) -> None:
    await shared.works()


@every_kind
async def test_output_is_shown_while_the_cell_runs(shared: Opened) -> None:
    await shared.begin(shared.language.waits, shared.path("shown"))
    await shared.make("shown")
    answer = await shared.call("wait")
    assert (answer.status, words(answer.text)) == ("ok", ["done"])


@every_kind
async def test_an_error_is_one_and_keeps_variables(shared: Opened) -> None:
    await shared.run(shared.language.keeps)
    answer = await shared.run(shared.language.fails)
    assert (answer.status == "error") == answer.failed == shared.kind.reports
    assert "wrong" in answer.text
    assert "42" in words((await shared.run(shared.language.adds)).text)


@every_kind
async def test_an_interrupt_ends_the_cell_alone_or_is_refused(shared: Opened) -> None:
    await shared.run(shared.language.keeps)
    before = await shared.begin(shared.language.waits, shared.path("never"))
    assert ("interrupt to stop it" in before.text) == shared.kind.survives
    answer = await shared.call("interrupt")
    if shared.kind.survives:
        assert answer.status == "interrupted"
        assert "42" in words((await shared.run(shared.language.adds)).text)
    else:
        assert "ends its kernel" in answer.text
        assert not (await shared.call("reset")).failed
        assert (await shared.run(shared.language.adds)).failed


@every_kind
async def test_a_cell_beyond_its_time_ends_and_what_became_of_variables_is_told(
    shared: Opened,
) -> None:
    await shared.run(shared.language.keeps)
    answer = await shared.run(shared.language.silent, shared.path("never"), timeout=1)
    assert "it reached its time limit of 1 s" in answer.text
    again = await shared.run(shared.language.adds)
    if shared.kind.survives:
        assert answer.status == "timeout"
        assert "42" in words(again.text)
    else:
        assert answer.status == "killed"
        assert "was killed by SIGINT when it was interrupted" in answer.text
        assert again.failed


@every_kind
async def test_a_cell_without_output_is_not_given_up(shared: Opened) -> None:
    answer = await shared.run(shared.language.silent, shared.path("late"), wait=0.1)
    for _ in range(5):  # the server looks at its kernel 20 times a second
        assert answer.status == "running", answer.text
        answer = await shared.call("wait", wait=0.2)
    await shared.make("late")
    assert (await shared.call("wait")).status == "ok"


@every_kind
async def test_files_are_those_of_the_workspace(shared: Opened) -> None:
    await shared.make("told.txt", "from outside")
    assert await shared.read(shared.path("told.txt")) == ["from", "outside"]
    if not shared.kind.elsewhere:
        await shared.run(shared.language.shell, "echo from inside > made.txt")
        assert "from inside" in (await shared.call("read_file", path="made.txt")).text


@over([*KINDS], ALWAYS[:1])
async def test_a_flood_is_whole_or_said_to_have_gaps(own: Opened) -> None:
    answer = await own.run(own.language.floods)
    text = answer.text
    for link in answer.links:  # where the answer is not the whole
        content = (await own.agent.client.read_resource(link.uri)).contents[0]
        assert isinstance(content, TextResourceContents)
        text = content.text
    lines = [int(line) for line in text.split() if line.isdecimal()]
    assert lines == sorted(set(lines))
    warned = any("output may be missing here" in each for each in notices(answer))
    whole = lines == list(range(1, own.language.lines + 1))
    if not own.kind.late:
        assert whole or (warned and own.kind.drops)
        assert own.kind in FOREIGN or not warned
        assert answer.status == "ok"
        await own.works()


@over([kind for kind in KINDS if kind.language.huge])
async def test_output_that_is_too_large_costs_no_variable(shared: Opened) -> None:
    await shared.run(shared.language.keeps)
    answer = await shared.run(shared.language.huge)
    assert answer.status == "ok", answer.text
    if shared.kind in FOREIGN and not shared.kind.late:
        assert "[left out: an output of 20.0 MB" in answer.text
    assert "42" in words((await shared.run(shared.language.adds)).text)


@every_kind
async def test_output_is_never_a_notice_of_the_server(shared: Opened) -> None:
    answer = await shared.run(shared.language.forges)
    assert answer.status == "ok"
    assert not any("it is not" in each for each in notices(answer))
    assert not any(line.startswith(f"{PREFIX}killed") for line in answer.text.splitlines())


@over(FOREIGN)
async def test_a_tool_that_it_lacks_says_what_to_do_instead(shared: Opened) -> None:
    for tool in ("undo", "branch"):
        text = await shared.agent.refused(tool, session=shared.session)
        assert f"{tool} is not available: this session " in text
    for tool in ("list_variables", "list_packages"):
        answer = await shared.call(tool)
        assert not answer.failed or f"{tool} is not available: " in answer.text


@confined
async def test_processes_are_bounded_and_end_with_the_session(own: Opened) -> None:
    each = f"600.{id(own)}"
    start = f"i=0; while [ $i -lt 300 ]; do sleep {each} >/dev/null 2>&1 & i=$((i+1)); done"
    await own.run(own.language.shell, start)
    assert 20 < len(sleepers(each)) < 100
    assert not (await own.agent.call("close_session", session=own.session)).failed
    assert sleepers(each) == []


def sleepers(argument: str) -> list[str]:
    """The processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if argument in path.read_text() else []
    return found


@over(CONFINED, ALWAYS[1:])
async def test_memory_is_bounded_and_the_session_goes_on(shared: Opened) -> None:
    answer = await shared.run(shared.language.grows)
    told = "Restarting" in answer.text or "out of memory" in answer.text
    assert answer.status in ("error", "killed") or told, answer.text
    assert not (await shared.call("reset")).failed  # what was kept would be in the way of others
    await shared.works()


@confined
async def test_the_workspace_is_bounded_and_the_cell_is_stopped(shared: Opened) -> None:
    fills = "while :; do n=$((n + 1)); head -c 1000000 /dev/zero > big.$n; done"
    answer = await shared.run(shared.language.shell, fills)
    assert answer.status in ("interrupted", "killed", "error")
    assert "remove files" in answer.text or "disk" in answer.text
    assert not (await shared.call("reset", files=True)).failed
    await shared.works()


@confined
async def test_reset_gives_a_fresh_kernel_and_keeps_files(shared: Opened) -> None:
    await shared.run(shared.language.keeps)
    await shared.make("kept.txt", "kept")
    assert not (await shared.call("reset")).failed
    assert "42" not in words((await shared.run(shared.language.adds)).text)
    assert await shared.read("kept.txt") == ["kept"]


@over([*KINDS], ALWAYS[1:])
async def test_the_death_of_the_kernel_is_told_with_its_cause(own: Opened) -> None:
    await own.run(own.language.keeps)
    answer = await own.run(own.language.dies)
    assert answer.status == "killed"
    if own.kind.elsewhere:
        return
    assert "the kernel was killed by SIGKILL" in answer.text
    assert "42" not in words((await own.run(own.language.adds)).text)
