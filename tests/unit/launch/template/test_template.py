"""Templates are started, replaced and stopped at the right times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.template import outer as template_supervisor
from kernel_mcp.launch.template.outer import MOST_FAILURES, TemplateSettings, TemplateSupervisor
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.select import NoSandbox

pytestmark = pytest.mark.anyio

ENVIRONMENT = KernelEnvironment(python=Path("/usr/bin/python3"), readonly=())


class Process:
    """A template that does what the test says."""

    def __init__(
        self,
        _command: object,
        start: Mapping[str, Any],
        on_change: Callable[[Process], None],
    ) -> None:
        if Process.refusal:
            raise LaunchError(Process.refusal)
        self.start = start
        self.on_change = on_change
        self.usable = self.stopped_forking = False
        self.alive = True
        self.reason = "it was killed by SIGKILL"
        self.output = "last words"
        self.missing = {"polars": "ModuleNotFoundError"}
        self.gone = anyio.Event()
        Process.made.append(self)
        Process.another.set()

    made: list[Process]
    another: anyio.Event
    refusal: str

    async def ready(self) -> bool:
        return self.usable

    @property
    def whole(self) -> bool:
        return self.usable

    def become_ready(self) -> None:
        self.usable = True
        self.on_change(self)

    def end(self) -> None:
        self.usable = self.alive = False
        self.gone.set()
        self.on_change(self)

    def stop_forking(self) -> None:
        self.usable = False
        self.stopped_forking = True

    async def aclose(self) -> None:
        self.end()


class Ids(NoSandbox):
    """Hands out ids and notes which are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[Identity] = []

    def identity(self, workspace: Path | None = None) -> Identity | None:
        self.used.append(Identity(2000 + len(self.used), 2000))
        return self.used[-1]

    def release(self, identity: Identity | None) -> None:
        if identity is not None:
            self.used.remove(identity)


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Ids:
    monkeypatch.setattr(template_supervisor, "TemplateProcess", Process)
    monkeypatch.setattr(
        template_supervisor, "start_message", lambda _env, names, _shared: {"names": names}
    )
    monkeypatch.setattr(template_supervisor, "FIRST_PAUSE_S", 0.001)
    Process.made, Process.another, Process.refusal = [], anyio.Event(), ""
    return Ids()


def supervise(
    sandbox: Ids, *preload: str, remark: Callable[[str], None] = lambda _text: None
) -> TemplateSupervisor:
    return TemplateSupervisor(sandbox, TemplateSettings(()), ENVIRONMENT, preload, remark)


async def next_process() -> Process:
    with anyio.fail_after(60):
        await Process.another.wait()
    Process.another = anyio.Event()
    return Process.made[-1]


async def test_a_template_is_started_at_once_and_offered_when_ready(sandbox: Ids) -> None:
    supervisor = supervise(sandbox, "numpy")
    process = await next_process()
    assert process.start == {"names": ("numpy",)}
    assert supervisor.template is None
    process.become_ready()
    assert supervisor.template is not None
    assert await supervisor.ready()
    await supervisor.aclose()
    assert sandbox.used == []


async def test_modules_that_are_missing_are_logged(
    sandbox: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    supervisor = supervise(sandbox)
    (await next_process()).become_ready()
    assert "not preloaded: polars" in caplog.text
    await supervisor.aclose()


async def test_a_template_that_ends_is_replaced_with_a_word_in_the_log(
    sandbox: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = supervise(sandbox)
    process = await next_process()
    process.become_ready()
    process.end()
    assert supervisor.template is None
    assert "it was killed by SIGKILL. It wrote:\nlast words" in caplog.text
    other = await next_process()
    assert other is not process
    assert len(sandbox.used) == 1
    await supervisor.aclose()


async def test_the_pause_before_the_next_try_grows_and_one_in_a_row_is_told(
    sandbox: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    supervisor = supervise(sandbox, remark=told.append)
    for _ in range(3):
        (await next_process()).end()
    (said,) = told
    assert "is replaced (it was killed by SIGKILL)" in said
    pauses = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses == [0.001, 0.002, 0.004]
    supervisor.forked()
    (await next_process()).end()
    assert isinstance(caplog.records[-1].args, tuple)
    assert caplog.records[-1].args[1] == 0.001
    assert len(told) == 2
    supervisor.stop_forking()


async def test_a_template_that_cannot_be_started_is_tried_again(
    sandbox: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    Process.refusal = "bwrap is gone"
    supervisor = supervise(sandbox)
    assert "bwrap is gone" in caplog.text
    assert not await supervisor.ready()
    assert sandbox.used == []
    Process.refusal = ""
    await next_process()
    await supervisor.aclose()


async def test_forks_that_fail_in_a_row_replace_the_template(sandbox: Ids) -> None:
    supervisor = supervise(sandbox)
    process = await next_process()
    process.become_ready()
    for _ in range(MOST_FAILURES - 1):
        supervisor.failed()
    supervisor.forked()
    for _ in range(MOST_FAILURES - 1):
        supervisor.failed()
    assert supervisor.template is not None
    supervisor.failed()
    assert supervisor.template is None
    assert process.stopped_forking
    await next_process()
    await supervisor.aclose()


async def test_a_retired_one_is_not_replaced(sandbox: Ids) -> None:
    supervisor = supervise(sandbox)
    process = await next_process()
    process.become_ready()
    supervisor.stop_forking()
    assert process.stopped_forking
    assert supervisor.template is None
    assert supervisor.busy
    process.end()
    assert not supervisor.busy
    assert not Process.another.is_set()
    assert sandbox.used == []
