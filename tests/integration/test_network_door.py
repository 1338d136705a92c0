"""Code of sessions connects where the operator permits it, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client

from kernel_mcp.launch.network import PORT
from kernel_mcp.sandbox.landlock import landlock_available
from tests.escape.test_mounted_folders import EACH, WAYS, opened
from tests.integration.agent import Agent, Answer, agent, command
from tests.integration.containers import flags
from tests.integration.processes import descendants
from tests.sampled import sampled

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0


class Pages(BaseHTTPRequestHandler):
    """Answers with the name that it was asked by."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = f"page of {self.headers['Host']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as its base has it
        """Say nothing."""


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two servers of the host."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Pages) for _ in range(2)]
    for each in servers:
        threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield servers[0].server_address[1], servers[1].server_address[1]
    finally:
        for each in servers:
            each.shutdown()
            each.server_close()


PRELUDE = """
import json, os, socket, subprocess, urllib.error, urllib.request
def page(url):
    try:
        return urllib.request.urlopen(url, timeout=30).read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
    except OSError as error:
        return type(error).__name__ + ": " + str(error)
def taken(address):
    with socket.socket() as sock:
        for name in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            sock.setsockopt(socket.SOL_SOCKET, name, 1)
        try:
            sock.bind(address)
            sock.listen()
        except OSError as error:
            return error.errno
def listeners():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    if sock.family == socket.AF_INET:
                        found.append(name)
        except OSError:
            pass
    return found
"""


def printed(answer: Answer) -> Any:
    """The first line, which is JSON; words about the network may follow."""
    assert answer.status == "ok", answer.text
    return json.loads(answer.text.splitlines()[0])


@pytest.mark.parametrize("way", sampled(WAYS, *EACH))
async def test_code_reaches_what_is_open_and_nothing_else(way: str, ports: tuple[int, int]) -> None:
    if way.startswith("root") and os.geteuid() != 0:
        pytest.skip("takes root")
    open_port, closed_port = ports
    rules = f"127.0.0.1:{open_port},db.invalid:5432,db.invalid:443,10.9.8.7:6543"
    async with opened(way, "--network", rules) as notebook:
        answer = await notebook.agent.run(
            f"{PRELUDE}\nprint(json.dumps(dict("
            f"open=page('http://127.0.0.1:{open_port}/'),"
            f"closed=page('http://127.0.0.1:{closed_port}/'),"
            "named=page('http://other.invalid/'), tunnel=page('https://other.invalid/'),"
            "db=socket.create_connection(('db.invalid', 5432), 30).getpeername(),"
            "far=socket.create_connection(('10.9.8.7', 6543), 30).getpeername(),"
            "beside=page('http://10.9.8.8:6543/'),"
            "low=socket.create_connection(('db.invalid', 443), 30).getpeername(),"
            f"taken=[taken(('127.0.0.1', {PORT})), taken(('127.0.0.2', 5432))],"
            "descriptors=listeners(),"
            "proxy=os.environ['https_proxy'])))",
            session=notebook.session,
        )
        found = printed(answer)
        assert found["open"] == f"page of 127.0.0.1:{open_port}"
        assert "Connection refused" in found["closed"]
        words = "the operator's --network does not permit other.invalid"
        assert found["named"].startswith(f"403 {words}:80 here")
        assert f"{words}:443 here" in found["tunnel"]
        assert (found["db"], found["low"]) == (["127.0.0.2", 5432], ["127.0.0.2", 443])
        assert found["far"] == ["10.9.8.7", 6543]
        assert "--network does not permit 10.9.8.8:6543" in found["beside"]
        assert found["taken"] == [98, 98]
        assert found["descriptors"] == []
        assert found["proxy"] == f"http://127.0.0.1:{PORT}"

        other = await notebook.agent.run(
            "import urllib.request\nurllib.request.urlopen('https://other.invalid/')",
            session=notebook.session,
        )
        assert "info shows the hosts that are open" in other.text
        info = (await notebook.agent.call("info", session=notebook.session)).data
        assert info["network"].startswith(f"127.0.0.1:{open_port}, db.invalid:5432")
        assert "db.invalid is 127.0.0.2" in info["network"]


async def fetched(client: Agent, session: str, *ports: int) -> list[bool]:
    """Return for each of these ports whether code of a session reaches it."""
    pages = ", ".join(f"page('http://127.0.0.1:{port}/').startswith('page of')" for port in ports)
    answer = await client.run(f"{PRELUDE}\nprint(json.dumps([{pages}]))", session=session)
    found: list[bool] = printed(answer)
    return found


@pytest.mark.ways
async def test_a_session_asks_for_less_and_keeps_it_through_every_new_kernel(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    """Narrowed before, in reserve and after, forgotten by neither reset nor hibernation."""
    log = tmp_path / "audit.jsonl"
    one, two = ports
    rules = f"127.0.0.1:{one},127.0.0.1:{two}"
    flags = ("--network", rules, "--audit-log", str(log), "--max-sessions", "2", "--warm", "1")
    async with Client(command(*flags)) as client:
        notebook = Agent(client)
        with anyio.fail_after(PATIENCE_S):
            made = await notebook.call("create_session", name="less", network=[f"127.0.0.1:{one}"])
            assert f"Network: 127.0.0.1:{one}." in made.data["note"]
            assert await fetched(notebook, "less", one, two) == [True, False]
            await notebook.call("create_session", name="none", network=[])
            assert await fetched(notebook, "none", one, two) == [False, False]
            for _ in range(3):  # some of them in reserve
                await notebook.call("create_session", name="all")
                assert await fetched(notebook, "all", one, two) == [True, True]
                await notebook.call("close_session", session="all")
            states = (await notebook.call("list_sessions")).data["sessions"]
            assert "hibernated" in [each["state"] for each in states]
            assert await fetched(notebook, "less", one, two) == [True, False]
            assert (await notebook.call("reset", session="less")).failed is False
            assert await fetched(notebook, "less", one, two) == [True, False]
            info = (await notebook.call("info", session="less")).data
            assert info["network"].startswith(f"127.0.0.1:{one} (")
            refused = await notebook.refused("create_session", network=["evil.test"])
            assert f"ask for hosts of 127.0.0.1:{one}, 127.0.0.1:{two}" in refused
        await replaced_proxy(notebook, one, signal.SIGKILL)
        await replaced_proxy(notebook, one, signal.SIGSTOP)
        records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(each["event"] == "network" for each in records), "the end of the proxy is told"
    told = [each for each in records if each["event"] == "connection"]
    assert {(each["host"], each["port"]) for each in told} >= {
        ("127.0.0.1", one),
        ("127.0.0.1", two),
    }
    assert all(each["session"].startswith("s-") and each["who"] == "local" for each in told)
    assert any(each["verdict"] == "ok" and each["down"] > 0 for each in told)


async def replaced_proxy(notebook: Agent, port: int, number: signal.Signals) -> None:
    """Connections of a session wait while its proxy is replaced."""
    named = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in descendants(os.getpid())}
    (proxy,) = [pid for pid, name in named.items() if name == "kernel-network"]
    status = Path(f"/proc/{proxy}/status").read_text()
    assert "CapEff:\t0000000000000000\n" in status
    if os.geteuid() == 0:
        (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
        assert "0" not in uids
    os.kill(proxy, number)
    with anyio.fail_after(PATIENCE_S):
        while Path(f"/proc/{proxy}").exists() or await fetched(notebook, "less", port) != [True]:
            await anyio.sleep(0.05)  # the first may be cut with it


async def test_a_closed_door_is_told_with_the_one_who_opens_it() -> None:
    async with agent() as notebook:
        found = await notebook.run(
            "import os, urllib.request\n"
            "print([name for name in os.environ if 'proxy' in name.lower()])\n"
            "urllib.request.urlopen('http://example.com/')"
        )
        assert found.text.startswith("[]")
        assert "--network HOST" in found.text
        assert (await notebook.call("info")).data["network"] == "none"
        refused = await notebook.refused("create_session", network=["example.com"])
        assert "the operator has opened no network" in refused
        assert (await notebook.call("create_session", network=[])).failed is False


@pytest.mark.ways
async def test_a_container_has_the_same_way_out(ports: tuple[int, int]) -> None:
    rules = f"127.0.0.1:{ports[0]},db.invalid:443"
    async with agent(*flags("podman"), "--network", rules) as notebook:
        assert await fetched(notebook, "", *ports) == [True, False]
        low = await notebook.run(
            f"{PRELUDE}\nprint(json.dumps([listeners(), "
            "socket.create_connection(('db.invalid', 443), 30).getpeername()]))"
        )
        assert printed(low) == [[], ["127.0.0.2", 443]]


async def test_landlock_has_no_network_to_open_and_without_a_sandbox_nothing_limits_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with agent("--sandbox", "none", "--network", "example.com") as notebook:
        assert "no sandbox limits it" in (await notebook.call("info")).data["network"]
        refused = await notebook.refused("create_session", network=["example.com"])
        assert "no sandbox here" in refused
    assert "--network has no effect with --sandbox none" in capfd.readouterr().err
    if landlock_available():
        wanted = command("--sandbox", "landlock", "--network", "example.com")
        argv = [wanted.command, *wanted.args]
        ended = await anyio.run_process(argv, check=False, env=wanted.env, cwd=wanted.cwd)
        assert ended.returncode == 1
        assert "the landlock sandbox has no network of its own" in ended.stderr.decode()
