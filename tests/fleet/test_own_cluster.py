"""A cluster of its own: its head is lost and its fronts go on; the keys of its store change."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kernel_mcp.fleet.members import LEASE_S, MARGIN_S
from tests.fleet.machines import PATIENCE_S, Machines, end, running, stopped
from tests.fleet.test_losses import saved
from tests.integration.httpclient import http_agent
from tests.integration.httpserver import http_server
from tests.integration.principals import add

pytestmark = [pytest.mark.anyio]

FIRST, SECOND = 12, 13
WITHIN_S = 10.0
"""Seconds in which a front notices that its head is lost."""


@pytest.fixture
def pair(machines: Machines) -> Iterator[Machines]:
    """A cluster of two machines, with a node on the one that is not the head."""
    root = Path(tempfile.mkdtemp(prefix="fh-", dir="/var/tmp"))
    made = Machines(root, FIRST, 6398, machines.token)
    try:
        for number in (FIRST, SECOND):
            made.start_ray(number)
        yield made
    finally:
        made.end()
        shutil.rmtree(root, ignore_errors=True)


def readiness(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


async def until(url: str, wanted: int) -> str:
    with anyio.fail_after(PATIENCE_S):
        while True:
            status, text = await anyio.to_thread.run_sync(readiness, url)
            if status == wanted:
                return text
            await anyio.sleep(0.1)


async def test_the_first_node_waits_for_a_registry_that_starts_slowly(pair: Machines) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, pair.start_node, SECOND)
        with anyio.fail_after(PATIENCE_S):
            while not (registry := pair.of_ray("ray::Registry")):
                await anyio.sleep(0.01)
        with stopped(registry):
            await anyio.sleep(LEASE_S + MARGIN_S)  # longer than a lease that was asked for before
    node = pair.nodes[f"n{SECOND}"]
    assert running([node.pid]) == [node.pid]
    assert (
        f"n{SECOND}  127.0.0.{SECOND}  ready"
        in pair.run("fleet", "status", "--fleet", pair.address, place=FIRST).stdout
    )


@pytest.mark.parametrize("place", [FIRST, SECOND], ids=["on the head", "elsewhere"])
async def test_a_front_outlives_its_head(place: int, pair: Machines, tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(pair.start_node, SECOND)
    ada = add(tmp_path / "tokens", "ada")
    flags = ["--fleet", pair.address, "--fleet-place", f"127.0.0.{place}"]
    flags += ["--tokens", str(tmp_path / "tokens")]
    with http_server(*flags, token="-", environ=pair.environ) as server:
        url = server.url.removesuffix("/mcp")
        async with http_agent(server, "auto", ada) as agent:
            await agent.run("x = 40")
            handle = str((await agent.call("info")).data["session"])
            await agent.run("x += 1", session=handle)
            await saved(pair, handle, 2)
            async with anyio.create_task_group() as tasks:
                refused: list[str] = []

                async def hang() -> None:
                    code = "open('begun', 'w').close()\nwhile True: pass"
                    refused.append(await agent.refused("execute", code=code, session=handle))

                tasks.start_soon(hang)
                await anyio.sleep(0)
                with anyio.fail_after(PATIENCE_S):
                    while "busy" not in (await agent.call("list_sessions")).text:
                        await anyio.sleep(0.05)
                lost_at = time.monotonic()
                await anyio.to_thread.run_sync(end, pair.rays[FIRST])
                assert "does not answer" in await until(url, 503)
                noticed_s = time.monotonic() - lost_at
                assert noticed_s < WITHIN_S
            answered_s = time.monotonic() - lost_at
            assert "may have been done in part" in refused[0]
            assert "The fleet" in await agent.refused("execute", code="x", session=handle)
            print(f"noticed after {noticed_s:.1f} s, told after {answered_s:.1f} s")
            node = pair.nodes[f"n{SECOND}"]
            await anyio.to_thread.run_sync(node.end)
            assert not running([node.pid])
            await anyio.to_thread.run_sync(end, pair.rays[SECOND])
            for number in (FIRST, SECOND):
                await anyio.to_thread.run_sync(pair.start_ray, number)
            await anyio.to_thread.run_sync(pair.start_node, SECOND)
            assert await until(url, 200) == "ok"
            again = await agent.call("execute", code="x", session=handle)
            assert "41" in again.text.splitlines()[0], again.text
            assert "The node that had this session was lost" in again.text


async def test_the_keys_of_the_store_change_while_a_session_goes_on(
    pair: Machines, tmp_path: Path
) -> None:
    ada = add(tmp_path / "tokens", "ada")
    keys = tmp_path / "keys"
    old, new = ("o" * 40, "n" * 40)

    def restart(number: int, *lines: str) -> None:
        """Start a node with these keys, in place of the one that has given its sessions away."""
        keys.write_text("\n".join(lines))
        keys.chmod(0o600)
        if (node := pair.nodes.get(f"n{number}")) is not None:
            node.command.send_signal(signal.SIGTERM)
            assert node.command.wait() == 0
            node.end()
        pair.start_node(number, "--fleet-key", str(keys))

    for number in (FIRST, SECOND):
        await anyio.to_thread.run_sync(restart, number, old)
    flags = ["--fleet", pair.address, "--fleet-place", f"127.0.0.{FIRST}"]
    flags += ["--tokens", str(tmp_path / "tokens")]
    with http_server(*flags, token="-", environ=pair.environ) as server:
        async with http_agent(server, "auto", ada) as agent:
            await agent.run("count = 0")
            handle = str((await agent.call("info")).data["session"])
            for number, lines in enumerate(((old, new), (new, old), (new,)), 1):
                for each in (FIRST, SECOND):
                    await anyio.to_thread.run_sync(restart, each, *lines)
                    again = await agent.call("execute", code="count += 1", session=handle)
                    assert again.status == "ok", again.text
                    assert "lost" not in again.text
                counted = await agent.run("count", session=handle)
                assert str(2 * number) in counted.text.splitlines()[0]
