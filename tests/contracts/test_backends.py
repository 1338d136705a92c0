"""Sessions whose code runs elsewhere: a back-end of another distribution, a Jupyter server."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from mcp.client import Client

from tests.contracts.sandbox_service import SandboxService, sandbox_service
from tests.integration.agent import Agent, command
from tests.integration.jupyter_kernels import JupyterServer, jupyter_server
from tests.sampled import sampled

pytestmark = [pytest.mark.anyio]

ROOT = Path(__file__).parents[2]
OFFERED = """\
[kernel_mcp.interpreters]
sandboxes = tests.contracts.code_sandboxes:ServiceBackend
broken = tests.contracts.no_such_module:Backend
faulty = tests.contracts.faulty_backend:FaultyBackend
exits = sys:exit
"""


@dataclass(frozen=True)
class Elsewhere:
    """A client whose session `far` runs elsewhere, and what shows that it does."""

    notebook: Agent
    place: str
    service: SandboxService | JupyterServer

    async def kernels(self) -> int:
        """How many kernels run there."""
        if isinstance(self.service, SandboxService):
            return len(self.service.sandboxes)
        return len(await self.service.ask("GET", "api/kernels"))


@pytest.fixture
def beside(tmp_path: Path) -> dict[str, str]:
    return installed(tmp_path)


def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a server beside which that distribution is installed."""
    info = tmp_path / "site" / "far_away-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-away\nVersion: 1\n")
    (info / "entry_points.txt").write_text(OFFERED)
    return {"PYTHONPATH": os.pathsep.join([str(info.parent), str(ROOT)])}


@pytest.fixture(params=sampled(["backend", "jupyter"], "backend"))
async def far(request: pytest.FixtureRequest, beside: dict[str, str]) -> AsyncIterator[Elsewhere]:
    async with AsyncExitStack() as stack:
        service: SandboxService | JupyterServer
        if request.param == "backend":
            place, service = stack.enter_context(sandbox_service())
            flag = f"far=sandboxes:{place}"
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
            service = await stack.enter_async_context(jupyter_server(folder))
            place = service.base
            token = folder / "token"
            token.write_text(f"{service.token}\n")
            flag = f"far={place}?token-file={token}"
        started = command("--warm", "0", "--no-template", "--kernel", flag, env=beside)
        client = await stack.enter_async_context(Client(started))
        yield Elsewhere(Agent(client), place, service)


async def test_cells_run_there_and_every_answer_says_so(far: Elsewhere) -> None:
    opened = await far.notebook.call("create_session", name="far", language="far")
    assert not opened.failed, opened.text
    assert await far.kernels() == 1
    first = await far.notebook.run("x = 41\nprint('hello')", session="far")
    assert first.text.startswith("hello\n")
    assert "outside the sandbox, in a " in first.text
    assert f" kernel: {far.place}" in first.text
    assert (await far.notebook.run("x + 1", session="far")).text.startswith("42\n")
    failed = await far.notebook.run("1/0", session="far")
    assert (failed.status, "ZeroDivisionError" in failed.text) == ("error", True)
    timed = await far.notebook.run("while True: pass", session="far", timeout=1)
    assert timed.status == "timeout"
    assert (await far.notebook.run("x", session="far")).text.startswith("41\n")
    for tool in ("undo", "list_packages", "list_files"):
        assert f"{tool} is not available" in await far.notebook.refused(tool, session="far")
    about = (await far.notebook.call("info", session="far")).data
    assert about["sandbox"] == "none"
    await far.notebook.call("close_session", session="far")
    assert await far.kernels() == 0


async def test_the_end_of_such_a_kernel_is_reported_and_reset_gives_another(
    far: Elsewhere,
) -> None:
    await far.notebook.call("create_session", name="far", language="far")
    await far.notebook.run("x = 1", session="far")
    died = await far.notebook.run("import os; os.kill(os.getpid(), 9)", session="far")
    assert died.status == "killed"
    assert "NameError" in (await far.notebook.run("x", session="far")).text
    await far.notebook.run("y = 2", session="far")
    assert not (await far.notebook.call("reset", session="far")).failed
    assert "NameError" in (await far.notebook.run("y", session="far")).text
    assert await far.kernels() == 1


@pytest.mark.ways
@pytest.mark.parametrize("far", ["jupyter"], indirect=True)
async def test_a_kernel_that_others_restart_or_end_is_reported(far: Elsewhere) -> None:
    assert isinstance(far.service, JupyterServer)
    for method, path in (("POST", "/restart"), ("DELETE", "")):
        await far.notebook.call("create_session", name="far", language="far")
        await far.notebook.run("x = 1", session="far")
        (there,) = await far.service.ask("GET", "api/kernels")
        body: dict[str, str] | None = {} if method == "POST" else None
        await far.service.ask(method, f"api/kernels/{there['id']}{path}", body)
        answer = await far.notebook.run("x", session="far", timeout=60)
        if answer.status != "killed":  # the end was noticed before the cell
            assert "NameError" in answer.text
        assert "lost" in answer.text
        assert "NameError" in (await far.notebook.run("x", session="far")).text
        await far.notebook.call("close_session", session="far")


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("far=nothing:x", "no installed distribution offers 'nothing'"),
        ("far=broken:x", "'broken' of far-away cannot be loaded"),
        ("far=exits:3", "'exits' of far-away fails: SystemExit"),
        ("far=nope", "there is no kernel spec 'nope'"),
        ("far=http://127.0.0.1:1?token-env=NO_SUCH", "the variable NO_SUCH"),
        ("far=http://127.0.0.1:1?token-file=/none", "token-file /none"),
    ],
)
def test_one_that_cannot_be_used_ends_the_start_with_a_sentence(
    beside: dict[str, str], kernel: str, why: str
) -> None:
    started = command("--warm", "0", "--no-template", "--kernel", kernel, env=beside)
    with subprocess.Popen(
        [started.command, *started.args],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=started.cwd,
        env={**os.environ, **(started.env or {})},
    ) as process:  # whose input stays open
        assert process.wait() != 0
        assert process.stderr is not None
        told = process.stderr.read()
    assert why in told
    assert "Traceback" not in told


async def test_a_service_that_is_down_is_a_sentence(beside: dict[str, str]) -> None:
    flags = ("--kernel", "far=sandboxes:http://127.0.0.1:1", "--kernel", "lab=http://127.0.0.1:1")
    async with Client(command("--warm", "0", "--no-template", *flags, env=beside)) as client:
        for language in ("far", "lab"):
            text = await Agent(client).refused("create_session", language=language)
            assert "127.0.0.1:1" in text
            assert "Traceback" not in text
