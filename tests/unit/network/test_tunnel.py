"""Connections to checked addresses, and turns among sessions."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kernel_mcp.network.http import ProxyRefusal
from kernel_mcp.network.rules import Address, HostRule
from kernel_mcp.network.tunnel import RESOLVERS_OF_ONE, Dialer, StepQueue

pytestmark = pytest.mark.anyio

ANY = HostRule("*")


class Resolver:
    """Answers with the next of these lists of addresses, and the last for ever."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, *_: Any) -> list[Any]:
        self.asked.append(host)
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]


class Dialled(Dialer):
    """Notes where it would connect to; nothing answers at `dead`."""

    def __init__(self, dead: str = "") -> None:
        super().__init__()
        self.tried: list[str] = []
        self._dead = dead

    async def _connected(self, address: Address, port: int) -> socket.socket:
        self.tried.append(f"{address}:{port}")
        if str(address) == self._dead:
            raise ConnectionRefusedError(111, "Connection refused")
        return socket.socket()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    found = Resolver(["1.1.1.1"])
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(
        "kernel_mcp.network.tunnel.is_own", lambda address: str(address) == "1.0.0.9"
    )
    return found


async def dialled(dialer: Dialer, host: str, entry: HostRule = ANY) -> None:
    (await dialer.connect(entry, host, 443, asyncio.Semaphore(RESOLVERS_OF_ONE))).close()


async def test_the_address_that_was_checked_is_the_one_connected(resolver: Resolver) -> None:
    resolver._answers = [["1.1.1.1", "8.8.8.8"], ["127.0.0.1"]]
    dialer = Dialled("1.1.1.1")
    await dialled(dialer, "a.test")
    assert dialer.tried == ["1.1.1.1:443", "8.8.8.8:443"]
    assert resolver.asked == ["a.test"]
    with pytest.raises(ProxyRefusal, match=r"127\.0\.0\.1"):
        await dialled(dialer, "a.test")
    assert len(dialer.tried) == 2


@pytest.mark.parametrize(
    "found",
    [
        ["127.0.0.1"],
        ["1.1.1.1", "10.0.0.1"],
        ["169.254.169.254", "1.1.1.1"],
        ["2606:4700::1111", "fe80::1%eth0"],
        ["1.1.1.1", "::ffff:1.1.1.1"],
        ["1.0.0.9"],
    ],
)
async def test_one_bad_address_is_enough_to_refuse_a_name(
    resolver: Resolver, found: list[str]
) -> None:
    resolver._answers = [found]
    dialer = Dialled()
    for entry in (ANY, HostRule("a.test"), HostRule("a.test", (443,), exact=True)):
        with pytest.raises(
            ProxyRefusal, match=r"public ones only\. (The operator|Use another host)"
        ):
            await dialled(dialer, "a.test", entry)
    assert dialer.tried == []


async def test_an_address_is_reached_that_the_operator_has_named(resolver: Resolver) -> None:
    dialer = Dialled()
    await dialled(dialer, "10.0.0.1", HostRule("10.0.0.1", (443,), exact=True))
    await dialled(dialer, "8.8.8.8", HostRule("8.8.8.8"))
    with pytest.raises(ProxyRefusal):
        await dialled(dialer, "10.0.0.1", HostRule("10.0.0.1"))
    assert dialer.tried == ["10.0.0.1:443", "8.8.8.8:443"]
    assert resolver.asked == []


async def test_what_cannot_be_resolved_or_reached_says_so(
    monkeypatch: pytest.MonkeyPatch, resolver: Resolver
) -> None:
    with pytest.raises(
        ProxyRefusal, match=r"refused. See that the host serves this port"
    ) as failed:
        await dialled(Dialled("1.1.1.1"), "a.test")
    assert (failed.value.status, failed.value.verdict) == (502, "failed")

    def unknown(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ProxyRefusal, match=r"a.test cannot be resolved .* not known.* spelled"):
        await dialled(Dialled(), "a.test")

    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    dialer, resolving = Dialled(), asyncio.Semaphore(1)
    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", no_thread)
    for _ in range(2):  # it has kept no place for ever
        with pytest.raises(ProxyRefusal, match=r"cannot be resolved now: .* Try again"):
            await dialer.connect(ANY, "a.test", 443, resolving)


async def test_a_session_with_much_to_pass_leaves_turns_to_others() -> None:
    loop = asyncio.get_running_loop()
    busy, quiet = StepQueue(loop), StepQueue(loop)
    done: list[str] = []
    for _ in range(100):
        busy.wait(lambda: done.append("busy"))
    assert not busy.take()
    quiet.wait(lambda: done.append("quiet"))
    while len(done) < 101:
        await asyncio.sleep(0)
    assert done.index("quiet") < 5
    assert done.count("busy") == 100
    await asyncio.sleep(0)
    assert busy.take()
