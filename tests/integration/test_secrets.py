"""Secrets that code uses and cannot read, through real servers, kernels and TLS."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import StdioServerParameters
from mcp.client import Client

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.secrets import PREFIX
from tests import tls_hosts
from tests.integration.agent import Agent
from tests.integration.containers import flags
from tests.integration.processes import descendants
from tests.integration.unprivileged import as_ordinary_user
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

NAME, OTHER = "api.example.com", "elsewhere.example.com"
VALUE = "tok-7f3a91c2e5b8/d4+secret=="
PLAIN = VALUE.encode()


@dataclass
class World:
    """A host with a secret, another one, and what the server has to trust to reach them."""

    host: tls_hosts.Host
    other: tls_hosts.Host
    trust: Path

    def command(self, *flags: str, ordinary: bool = False) -> StdioServerParameters:
        """A server with the secret in its environment."""
        ports = {NAME: self.host.port, OTHER: self.other.port}
        words = [sys.executable, "-m", "tests.integration.loopback_hosts", json.dumps(ports)]
        words += ["--secret", f"API_TOKEN@{NAME}", *flags]
        own = {"API_TOKEN": VALUE, "SSL_CERT_FILE": str(self.trust)}
        root = str(Path(__file__).parents[2])
        if ordinary:
            words, own = as_ordinary_user(words, own), {}
        environ = {**os.environ, **own, "PYTHONPATH": root}
        return StdioServerParameters(command=words[0], args=words[1:], env=environ, cwd=root)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    real = Authority([NAME, OTHER])
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="secrets-"))
    folder.chmod(0o755)
    try:
        with tls_hosts.serving(NAME, real) as host, tls_hosts.serving(OTHER, real) as other:
            yield World(host, other, tls_hosts.trusting(real, folder))
    finally:
        shutil.rmtree(folder)


PRELUDE = f"""
import base64, hashlib, http.client, json, os, subprocess, sys, urllib.error, urllib.request
KEY = os.environ["API_TOKEN"]
def ask(path, headers=None, host={NAME!r}, data=None):
    headers = {{"Authorization": "Bearer " + KEY}} if headers is None else headers
    request = urllib.request.Request(f"https://{{host}}{{path}}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return [reply.status, str(reply.headers) + reply.read().decode("latin-1")]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode("latin-1")]
    except (OSError, http.client.HTTPException) as error:
        return [0, repr(error)]
"""


PRELUDE += """
import re
VALUES = re.compile(rb"tok-7f3a91c2[e]")
def content(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # what code cannot open tells it nothing
        return b""
def sought(glob):
    files = [*glob("/proc/[0-9]*/environ"), *glob("/proc/[0-9]*/cmdline"), *glob("/run/kernel/*")]
    assert any(content(each) for each in files)
    found = [each for each in files if VALUES.search(content(each))]
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            try:
                memory.seek(start)
                if VALUES.search(memory.read(end - start)):
                    found.append(line)
            except (OSError, ValueError, OverflowError, MemoryError):
                pass
    return found
"""


async def told(agent: Agent, code: str, session: str = "") -> Any:
    """Return the value that code prints as JSON."""
    answer = await agent.run(f"{PRELUDE}\nprint(json.dumps({code.strip()}))", session=session)
    assert answer.status == "ok", answer.text
    return json.loads(answer.text.splitlines()[0])


def digest_of(header: str) -> str:
    return hashlib.sha256(header.encode()).hexdigest()


@pytest.mark.parametrize(
    "way", sampled(["root", "root cold", "ordinary", "ordinary cold"], "ordinary")
)
async def test_code_uses_a_secret_and_finds_it_nowhere(world: World, way: str) -> None:
    if way.startswith("root") and os.geteuid() != 0:
        pytest.skip("takes root")
    flags = ("--no-template", "--warm", "0") if way.endswith("cold") else ("--warm", "1")
    command = world.command(
        *(*flags, "--allow", "certifi", "--network", f"{OTHER},{NAME}:8443"),
        ordinary=way.startswith("ordinary"),
    )
    async with Client(command) as client:
        agent = Agent(client)
        assert (await told(agent, "[KEY.startswith('kmcp_'), len(KEY)]")) == [True, len(VALUE)]
        found = await told(agent, "ask('/length')")
        assert found[0] == 200, found
        assert digest_of(f"Bearer {VALUE}") in found[1]
        found = await told(agent, f"ask('/length', host='{NAME}:8443')")
        assert digest_of(f"Bearer {VALUE}") in found[1], "on a port that is named with the host"
        assert await told(agent, SOUGHT) == []
        assert await told(agent, TRUSTED) == [True, True]


@pytest.mark.ways
async def test_a_container_uses_a_secret_as_well(world: World) -> None:
    container = flags("podman")
    async with Client(world.command(*container, "--allow", "certifi", "--warm", "0")) as client:
        agent = Agent(client)
        found = await told(agent, "ask('/length')")
        assert digest_of(f"Bearer {VALUE}") in found[1]
        assert (await told(agent, "ask('/echo')"))[0] == 502
        assert await told(agent, TRUSTED) == [True, True]


TRUSTED = """[open(__import__("certifi").where()).read() == open(os.environ[each]).read()
for each in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]"""
SOUGHT = """sought(__import__("glob").glob)"""
"""Where code finds the value, which is not in the code either: in what /proc shows, in memory."""


async def test_replies_redirects_and_other_places_do_not_give_it_away(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log, state = tmp_path / "audit.jsonl", Path(tempfile.mkdtemp(dir="/var/tmp", prefix="st-"))
    flags = ("--network", OTHER, "--audit-log", str(log), "--state-dir", str(state), "--warm", "0")
    try:
        async with Client(world.command(*flags, "--log-level", "debug")) as client:
            agent = Agent(client)
            outputs = await check_replies(world, agent)
            outputs += await check_other_places(world, agent)
            await check_sessions(agent)
            held = [each for each in state.rglob("*") if each.is_file() and not each.is_symlink()]
            assert [each for each in held if PLAIN in each.read_bytes()] == []
            check_processes()
        assert VALUE not in outputs + capfd.readouterr().err
        assert VALUE not in log.read_text()
        events = [json.loads(line) for line in log.read_text().splitlines()]
        assert [each["secrets"] for each in events if each["event"] == "server_start"] == [
            [f"API_TOKEN@{NAME}:Authorization"]
        ]
        assert any("held the value of the secret API_TOKEN" in str(each) for each in events)
    finally:
        shutil.rmtree(state)


async def check_replies(world: World, agent: Agent) -> str:
    """Check that no reply shows the value and other replies pass. Return all that was shown."""
    shown = ""
    for path in ("/echo", "/base64", "/header", "/gzip"):
        status, text = await told(agent, f"ask({path!r})")
        assert (status, "kernel-mcp: " in text) == (502, True), path
        shown += text
    for path in ("/large", "/split", "/trailer"):
        status, text = await told(agent, f"ask({path!r})")
        assert status == 0 or "was cut off" in text, path
        shown += text
    status, text = await told(agent, "ask('/events')")
    assert (status, text.count("data: ")) == (200, 5)
    body = "bytes(range(256)) * 80_000"
    status, text = await told(agent, f"ask('/length', data={body})")
    assert (status, '"length": 20480000' in text) == (200, True)
    status, text = await told(agent, "ask('/nothing?' + KEY, {'X-Key': KEY}, data=KEY.encode())")
    path, headers, sent = world.host.seen[-1]
    assert VALUE not in f"{path}{headers}{sent!r}"
    assert (path.startswith(f"/nothing?{PREFIX}"), headers["x-key"][:5]) == (True, PREFIX)
    return shown + str(text)


async def check_other_places(world: World, agent: Agent) -> str:
    """Other hosts get the placeholder, also by a redirect; programs of the shell do as Python."""
    for place in (f"ask('/length', host={OTHER!r})", f"ask('/redirect?https://{OTHER}/length')"):
        found = await told(agent, place)
        assert found[0] == 200, found
        assert VALUE not in str(world.other.seen[-1])
        assert PREFIX in world.other.seen[-1][1]["Authorization"]
    plain = await told(agent, f"ask('/', host='{NAME}:80')")
    answer = await agent.run(f"""{PRELUDE}
def words(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr
print(words("curl", "-sS", "-u", "me:" + KEY, "https://{NAME}/length"))
print(words("curl", "-sS", "-u", "me:" + KEY, "https://{NAME}/echo"))
print(words("curl", "-sS", "-H", "Authorization: " + KEY, "http://{NAME}/echo"))
print(words("curl", "-sS", "https://{NAME}:8443/"))
print(words("git", "ls-remote", f"https://me:{{KEY}}@{NAME}/length/a.git"))
raise ValueError(os.environ)
""")
    basic = base64.b64encode(f"me:{VALUE}".encode()).decode()
    assert digest_of(f"Basic {basic}") in answer.text
    assert "held the value of the secret API_TOKEN" in answer.text
    assert f"use https://{NAME}" in answer.text
    assert "CONNECT tunnel failed, response 403" in answer.text
    paths = [path for path, headers, _ in world.host.seen if "git" in headers.get("user-agent", "")]
    assert paths
    assert basic not in answer.text
    return answer.text + str(plain)


async def check_sessions(agent: Agent) -> None:
    """Each session has it, or not where it asks for other hosts; models are told."""
    made = (await agent.call("create_session", network=[OTHER])).data["session"]
    found = await told(agent, "ask('/length')", session=made)
    assert found[0] == 0
    assert "Forbidden" in found[1] or "403" in found[1]
    info = (await agent.call("info", session=made)).data["network"]
    assert "API_TOKEN" not in info
    info = (await agent.call("info")).data["network"]
    assert f"put into Authorization of requests to https://{NAME}" in info
    assert VALUE not in json.dumps((await agent.call("info")).data)


def check_processes() -> None:
    """No process that this test has started shows the value, not even to root."""
    for pid in descendants(os.getpid()):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                assert PLAIN not in Path(f"/proc/{pid}/{name}").read_bytes(), pid


@pytest.mark.ways
async def test_a_proxy_that_has_ended_is_replaced_and_trusted_as_before(
    world: World,
) -> None:
    async with Client(world.command("--warm", "0")) as client:
        agent = Agent(client)
        assert (await told(agent, "ask('/length')"))[0] == 200
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in descendants(os.getpid())}
        (proxy,) = [pid for pid, name in names.items() if name == "kernel-network\n"]
        os.kill(proxy, signal.SIGKILL)
        with anyio.fail_after(60):
            while (await told(agent, "ask('/length')"))[0] != 200:
                await anyio.sleep(0.1)
