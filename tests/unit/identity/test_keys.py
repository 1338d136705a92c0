"""The keys of an issuer: which are used, and how often it is asked for them."""

from __future__ import annotations

import functools
import logging
from typing import Any

import anyio
import pytest

from kernel_mcp.identity import VerifierUnavailable
from kernel_mcp.identity.discovery import Unreachable
from kernel_mcp.identity.keys import (
    FRESH_S,
    RETRY_S,
    STALE_S,
    UNKNOWN_S,
    SigningKeys,
    usable_keys,
)
from tests.unit.identity.signing import ISSUER, Clock, FakeIssuer, private_key, public_jwk

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> FakeIssuer:
    made = FakeIssuer()
    made.make()
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(server: FakeIssuer, clock: Clock) -> SigningKeys:
    return SigningKeys(ISSUER, clock=clock, fetch=server.fetch)


usual_key = functools.cache(private_key)
"""One of each kind: all workers make the table below, and a key of RSA takes 0.1 s."""


def jwk(algorithm: str, **more: Any) -> dict[str, Any]:
    return public_jwk(algorithm, usual_key(algorithm), "k", **more)


def test_keys_sign_as_their_kind_does() -> None:
    found = usable_keys(
        {
            "keys": [
                jwk("RS256"),
                jwk("RS256", alg="PS256"),
                jwk("ES256", kid="e"),
                jwk("EdDSA", key_ops=["verify"]),
            ]
        }
    )
    assert [key.algorithms for key in found] == [
        ("RS256", "PS256"),
        ("PS256",),
        ("ES256",),
        ("EdDSA",),
    ]
    assert found[2].id == "e"


@pytest.mark.parametrize(
    "unfit",
    [
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "k"},
        jwk("RS256", alg="HS256"),
        jwk("RS256", alg="none"),
        jwk("RS256", alg=["RS256"]),
        jwk("RS256", use="enc"),
        jwk("RS256", use=None),
        jwk("RS256", key_ops=["sign"]),
        jwk("RS256", key_ops="verify"),
        jwk("RS256", kid=5),
        jwk("RS256", n="AQ"),
        jwk("RS256", n=7),
        jwk("RS256", e="AAAA"),
        public_jwk("RS256", private_key("RS256", 1024), "k"),
        jwk("ES384"),
        jwk("ES256", x="AA"),
        jwk("ES256", crv=["P-256"]),
        jwk("EdDSA", crv="X25519"),
        {"kty": ["RSA"]},
        {},
        7,
    ],
    ids=range(20),
)
def test_other_keys_are_left_out(unfit: Any) -> None:
    assert len(usable_keys({"keys": [unfit, jwk("ES256")]})) == 1


def test_a_private_key_that_was_published_is_used_as_a_public_one() -> None:
    (found,) = usable_keys({"keys": [jwk("RS256", d="AQAB", p="Aw", q="Aw")]})
    assert not hasattr(found.public, "sign")


@pytest.mark.parametrize("document", [{}, {"keys": {}}, {"keys": None}])
def test_what_is_no_set_is_none(document: dict[str, Any]) -> None:
    with pytest.raises(Unreachable):
        usable_keys(document)


async def test_keys_are_had_once(server: FakeIssuer, keys: SigningKeys) -> None:
    for _ in range(3):
        assert await keys.key("k", "ES256")
    assert await keys.key("", "ES256")  # the only one
    assert len(server.asked) == 2


async def test_without_a_name_it_has_to_be_the_only_one(
    server: FakeIssuer, keys: SigningKeys
) -> None:
    server.make(name="other")
    assert await keys.key("", "ES256") is None


async def test_a_key_signs_as_its_kind_alone(keys: SigningKeys) -> None:
    assert await keys.key("k", "RS256") is None


async def test_a_new_key_is_found_and_unknown_ones_ask_twice_a_minute(
    server: FakeIssuer, keys: SigningKeys, clock: Clock
) -> None:
    assert await keys.key("k", "ES256")
    server.make(name="new")
    for number in range(50):
        assert await keys.key(f"{number}", "ES256") is None
    assert len(server.asked) == 2
    clock.now += UNKNOWN_S
    assert await keys.key("new", "ES256")
    for number in range(50):
        assert await keys.key(f"{number}", "ES256") is None
    assert len(server.asked) == 4


async def test_a_key_that_was_withdrawn_is_good_for_minutes(
    server: FakeIssuer, keys: SigningKeys, clock: Clock
) -> None:
    assert await keys.key("k", "ES256")
    server.make(name="new")
    del server.keys["k"]
    clock.now += FRESH_S + 1
    assert await keys.key("k", "ES256") is None


async def test_without_the_issuer_keys_are_good_for_an_hour(
    server: FakeIssuer, keys: SigningKeys, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert await keys.key("k", "ES256")
    server.down = "the cable is cut"
    began = clock.now
    clock.now += UNKNOWN_S
    while clock.now - began < STALE_S:
        assert await keys.key("k", "ES256")
        with pytest.raises(VerifierUnavailable):
            await keys.key("new", "ES256")  # may be one that nobody can tell us of now
        clock.now += FRESH_S / 4
    clock.now = began + STALE_S + 1
    with pytest.raises(VerifierUnavailable):
        await keys.key("k", "ES256")
    assert len(server.asked) < STALE_S / UNKNOWN_S
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "https://as.example cannot be asked: the cable is cut" in errors[0]
    server.down = ""
    clock.now += RETRY_S
    assert await keys.key("k", "ES256")
    assert "can be asked again" in caplog.text


async def test_an_issuer_that_was_never_there_is_asked_every_few_seconds(
    server: FakeIssuer, keys: SigningKeys, clock: Clock
) -> None:
    server.down = "the cable is cut"
    for _ in range(50):
        with pytest.raises(VerifierUnavailable):
            await keys.key("k", "ES256")
    assert len(server.asked) == 1
    clock.now += RETRY_S
    server.down = ""
    assert await keys.key("k", "ES256")


async def test_preparing_says_what_is_wrong(
    server: FakeIssuer, keys: SigningKeys, caplog: pytest.LogCaptureFixture
) -> None:
    server.keys = {"k": ("ES384", private_key("ES384"))}
    await keys.prepare()
    assert "none of its keys is for RS256, PS256, ES256, EdDSA" in caplog.text


async def test_many_at_once_ask_once(server: FakeIssuer, clock: Clock) -> None:
    go = anyio.Event()

    async def fetch(url: str) -> dict[str, Any]:
        await go.wait()
        return await server.fetch(url)

    keys = SigningKeys(ISSUER, clock=clock, fetch=fetch)
    found: list[object] = []

    async def one() -> None:
        found.append(await keys.key("k", "ES256"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keys.prepare)
        for _ in range(20):
            tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
        go.set()
    assert len(server.asked) == 2
    assert None not in found
    go = anyio.Event()
    clock.now += FRESH_S + 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keys.prepare)
        await anyio.wait_all_tasks_blocked()
        assert await keys.key("k", "ES256")  # nobody waits for those that are only to be renewed
        go.set()
