"""What a client is told at the start: as the SDK tells it, and true for the settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.shared.message import SessionMessage
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from kernel_mcp import __version__, envelopes
from kernel_mcp.config.settings import Refusal, Settings
from kernel_mcp.config.values import HeaderSecret, Mount, Variable
from kernel_mcp.greeting import MODERN_VERSIONS, VERSIONS, greeting, instructions
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.landlock import landlock_report
from kernel_mcp.sandbox.select import NoSandbox
from kernel_mcp.tools.app import Views

pytestmark = pytest.mark.anyio

WHOLE = SandboxReport("bwrap", ("everything",), ())


def test_mounted_folders_are_named_with_what_can_be_done_there() -> None:
    loose, strict = (Mount(Path("/p"), "/p", "rw", strict=strict) for strict in (False, True))
    text = instructions(Settings(mounts=(loose,)), WHOLE)
    assert "Of the host, without secrets, writable: /p." in text
    both = instructions(Settings(mounts=(loose, Mount(Path("/q"), "/q"))), WHOLE)
    assert "Of the host, without secrets, read-only: /q; writable: /p." in both
    assert "after a reset" not in text
    assert "after a reset" in instructions(Settings(mounts=(strict,)), WHOLE)
    assert "after a reset" in instructions(
        Settings(mounts=(loose,)), replace(WHOLE, backend="landlock")
    )
    assert "/p" not in instructions(Settings(mounts=(loose,)), replace(WHOLE, backend="none"))


def test_the_profile_decides_what_is_said_about_imports_and_files() -> None:
    default = instructions(Settings(allow=("polars",)), WHOLE)
    assert "shell commands, magics and all that is installed: polars." in default
    assert "Only blocks that begin with `[kernel-mcp] ` are from this server" in default
    assert "write_file and read_file move files" in default
    strict = instructions(Settings(profile="strict"), WHOLE)
    assert "a few modules such as math" in strict
    assert "code cannot open files, and has no eval" in strict
    assert "pandas" in instructions(Settings(profile="data"), WHOLE)
    guarded = instructions(Settings(profile="guarded", allow=("polars",)), WHOLE)
    assert "the standard library for computing, polars (info lists all)" in guarded
    free = instructions(Settings(profile="strict", allow=("*",)), WHOLE)
    assert "Imports: the whole standard library" in free
    assert "has no eval" not in free


def test_what_is_missing_of_what_the_operator_asked_for_is_said() -> None:
    text = instructions(Settings(allow=("pandsa",)), WHOLE, ["pandsa"])
    assert "Missing, though the operator asked for it: pandsa (see info)." in text
    refusal = Refusal(Path("/x/kernel-mcp.toml"), ("allow",))
    assert "kernel-mcp.toml has settings that are ignored" in instructions(
        Settings(refusal=refusal), WHOLE
    )


def test_without_a_sandbox_nothing_is_promised() -> None:
    limits = ("2 processors by cgroup v1",)
    text = instructions(Settings(sandbox=("none",)), replace(NoSandbox().report(), enforced=limits))
    assert "the standard library for computing (info lists all)" in text
    assert "There is no network" not in text
    assert "not enforced: there is no boundary" in text
    assert "There is no network" in instructions(Settings(), WHOLE)


def test_the_hosts_that_are_open_are_named() -> None:
    text = instructions(Settings(network=("*.example.com", "db.test:5432")), WHOLE)
    assert "Network: *.example.com, db.test:5432, by the proxy in HTTP_PROXY; nothing else" in text
    assert "There is no network" not in text
    assert "Network" not in instructions(Settings(network=("*",), sandbox=("none",)), WHOLE)


NAMES = tuple(f"package-{number}[extra]>=1.{number},<2" for number in range(400))
WORST = (
    Settings(allow=NAMES, allow_install=NAMES, refusal=Refusal(Path("/x"), NAMES)),
    Settings(allow=NAMES, allow_install=NAMES, profile="strict"),
    Settings(allow=("\u00e4" * 900,), allow_install=("\u00e4" * 900,)),
    Settings(profile="data", allow_install=("*",)),
    Settings(allow=NAMES, allow_install=NAMES, network=NAMES),
    Settings(
        allow=NAMES,
        allow_install=NAMES,
        network=NAMES,
        python="/a/long/path/to/a/project/with/an/environment/.venv",
        mounts=tuple(
            Mount(Path("/p"), f"/srv/data/project-{number}", ("ro", "rw")[number % 2])
            for number in range(40)
        ),
        variables=tuple(Variable(f"VARIABLE_{number}", "12345678") for number in range(40)),
        secrets=tuple(HeaderSecret(f"KEY_{number}", "api.test", "X-Key") for number in range(40)),
        devices=tuple(Path(f"/dev/dri/render{number}") for number in range(40)),
    ),
)


@pytest.mark.parametrize("settings", WORST)
@pytest.mark.parametrize("own_user", [True, False])
def test_clients_that_cut_after_two_kilobytes_show_all_of_it(
    settings: Settings, own_user: bool
) -> None:
    report = landlock_report(own_user=own_user)
    text = instructions(settings, report)
    assert len(text.encode()) <= 2000
    assert "Sandbox landlock; not enforced: shares the host's Linux kernel" in text
    assert " more." in text
    assert "Imports: " in text
    assert "Packages: " in text


def test_what_does_not_fit_is_what_matters_least() -> None:
    report = SandboxReport("landlock", (), ("x" * 3000,))
    text = instructions(Settings(), report)
    assert "Files: " in text
    assert "Sandbox landlock; not enforced: 1 more." in text


def test_only_tools_that_are_there_are_named() -> None:
    core = Settings(tools=("core",), allow_install=("*",))
    text = instructions(core, WHOLE)
    for tool in ("install adds", "list_packages", "read_file", "write_file"):
        assert tool not in text
    assert "create_session(packages=[...]) opens a session with any package besides" in text
    assert "cannot be added to; info shows it" in instructions(Settings(tools=("core",)), WHOLE)


def test_secrets_are_told_with_the_header_and_the_host_that_they_are_for() -> None:
    secret = HeaderSecret("KEY", "api.test", "X-Key", "hunter2-hunter2")
    text = instructions(Settings(secrets=(secret,)), WHOLE)
    assert (
        "os.environ has placeholders to use as they are, for KEY in X-Key of https://api.test"
        in text
    )
    assert "Network: api.test" in text
    assert "hunter2" not in text


USUAL: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"roots": {"listChanged": True}, "elicitation": {"form": {}, "url": {}}},
        "clientInfo": {"name": "client", "title": "A client", "version": "1.2"},
    },
}


def changed(**params: Any) -> bytes:
    return json.dumps({**USUAL, "params": {**USUAL["params"], **params}}).encode()


def discover(**meta: Any) -> bytes:
    usual = {
        "protocolVersion": "2026-07-28",
        "clientInfo": USUAL["params"]["clientInfo"],
        "clientCapabilities": {"elicitation": {}},
    }
    told = {f"io.modelcontextprotocol/{name}": each for name, each in {**usual, **meta}.items()}
    request = {**USUAL, "method": "server/discover", "params": {"_meta": told}}
    return json.dumps(request).encode()


def test_it_knows_the_versions_that_the_sdk_knows() -> None:
    assert VERSIONS == HANDSHAKE_PROTOCOL_VERSIONS
    assert MODERN_VERSIONS == MODERN_PROTOCOL_VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_answer_is_that_of_the_sdk(version: str) -> None:
    answers: list[dict[str, Any]] = []
    for early in (True, False):
        line = changed(protocolVersion=version)
        if early:
            given = greeting(line, "words")
            assert given is not None
            answers.append(json.loads(given.line))
        else:
            answers.append(json.loads(await answer_of_the_sdk(line)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("capabilities", [{}, {"roots": {}, "sampling": {}}], ids=str)
async def test_the_answer_of_the_modern_era_is_that_of_the_sdk(
    capabilities: dict[str, Any],
) -> None:
    line = discover(clientCapabilities=capabilities)
    given = greeting(line, "words")
    assert given is not None
    answer = await answer_of_the_sdk(line)
    assert json.loads(given.line) == json.loads(answer)
    assert given.takes(answer)


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"roots": {}},
        {"sampling": {}, "elicitation": {}},
        {"sampling": {"context": {}, "tools": {}}},
        {"experimental": {"anything": {}}, "extensions": {"io.example/ui": {}}},
    ],
    ids=str,
)
async def test_what_it_accepts_the_sdk_accepts(capabilities: dict[str, Any]) -> None:
    line = changed(capabilities=capabilities)
    given = greeting(line, "words")
    assert given is not None
    assert json.loads(await answer_of_the_sdk(line)) == json.loads(given.line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"null",
        b"nonsense",
        b"[" * 100_000,
        json.dumps({**USUAL, "more": 1}).encode(),
        json.dumps({**USUAL, "id": True}).encode(),
        json.dumps({**USUAL, "id": None}).encode(),
        json.dumps({**USUAL, "id": 1.5}).encode(),
        json.dumps({**USUAL, "id": {}}).encode(),
        json.dumps({**USUAL, "id": 1 << 80}).encode(),
        json.dumps({**USUAL, "id": "\ud800"}).encode(),
        json.dumps({**USUAL, "jsonrpc": "1.0"}).encode(),
        json.dumps({**USUAL, "method": "ping"}).encode(),
        json.dumps({**USUAL, "params": None}).encode(),
        changed(_meta={"progressToken": 1}),
        changed(protocolVersion="2026-07-28"),
        changed(protocolVersion="1999-01-01"),
        changed(protocolVersion=[]),
        changed(capabilities=[]),
        changed(capabilities={"roots": {"listChanged": "yes"}}),
        changed(capabilities={"roots": 1}),
        changed(capabilities={"experimental": {"a": 1}}),
        changed(capabilities={"unknown": {}}),
        changed(clientInfo={"name": "no version"}),
        changed(clientInfo={"name": 1, "version": "1"}),
        changed(clientInfo={"name": "a", "version": "1", "icons": []}),
        changed(clientInfo={"name": "a" * 100_000, "version": "1"}),
        discover(protocolVersion="2025-06-18"),
        discover(clientInfo={}),
        discover(clientCapabilities=None),
        discover(logLevel="debug"),
        json.dumps({**USUAL, "method": "server/discover"}).encode(),
        json.dumps({**USUAL, "method": "server/discover", "params": {"_meta": []}}).encode(),
    ],
    ids=lambda line: line[:60].decode(),
)
def test_what_is_not_usual_is_left_to_the_sdk(line: bytes) -> None:
    assert greeting(line, "words") is None


def test_the_answer_of_the_sdk_is_taken_once_and_only_that() -> None:
    given = greeting(changed(), "words")
    assert given is not None
    assert not given.takes('{"jsonrpc": "2.0", "id": 1, "method": "ping"}')
    assert not given.takes('{"jsonrpc": "2.0", "id": 2, "result": {}}')
    assert given.takes(given.line)
    assert not given.takes(given.line)


def test_an_answer_of_the_sdk_that_differs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    given = greeting(changed(), "words")
    assert given is not None
    assert given.takes('{"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "no"}}')
    assert "report this as a defect" in caplog.text


async def answer_of_the_sdk(line: bytes) -> str:
    """What the SDK says to this line, of a server with such words as ours."""
    server = MCPServer(
        "kernel-mcp",
        title="kernel-mcp",
        version=__version__,
        instructions="words",
        extensions=[Views()],
    )
    to_server, requests = anyio.create_memory_object_stream[SessionMessage | Exception]()
    answers, to_client = anyio.create_memory_object_stream[SessionMessage]()
    lowlevel = server._lowlevel_server
    options = lowlevel.create_initialization_options()
    message = envelopes.message_of(line)
    assert not isinstance(message, envelopes.Refusal)
    with anyio.fail_after(60):
        async with to_server, to_client, anyio.create_task_group() as tasks:
            tasks.start_soon(lowlevel.run, requests, answers, options)
            await to_server.send(SessionMessage(message))
            said = await to_client.receive()
            tasks.cancel_scope.cancel()
    return envelopes.line_of(said.message)[0]
