"""Access tokens of an issuer: which prove something, and what."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import (
    INSTALL,
    INVALID,
    PRINCIPAL,
    RUN,
    Unauthenticated,
    VerifierUnavailable,
    issuer,
)
from kernel_mcp.identity.issuer import (
    MOST_TOKEN,
    Issuer,
    metadata,
    metadata_url,
    principal_name,
    scopes_of,
)
from kernel_mcp.identity.token_rows import ISSUED
from kernel_mcp.identity.tokens import TokenFile
from tests.unit.identity.signing import (
    AUDIENCE,
    ISSUER,
    Clock,
    FakeIssuer,
    encoded,
    forged,
    private_key,
)
from tests.unit.identity.test_tokens import write

pytestmark = pytest.mark.anyio
MARK = hashlib.sha256(ISSUER.encode()).hexdigest()[:8]


@pytest.fixture
def server() -> FakeIssuer:
    made = FakeIssuer()
    made.make()
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verifier(server: FakeIssuer, clock: Clock) -> Issuer:
    return Issuer(ISSUER, AUDIENCE, clock=clock, fetch=server.fetch)


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
async def test_a_token_names_its_subject_and_scopes(
    server: FakeIssuer, verifier: Issuer, algorithm: str
) -> None:
    server.make(algorithm)
    found = await verifier.verify(server.token())
    assert found.name == f"alice@{MARK}"
    assert found.scopes == {RUN, INSTALL}
    assert found.grants == ()
    assert found.quotas == Quotas()


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": AUDIENCE + "/"},
        {"aud": ["https://other.example", AUDIENCE]},
        {"exp": -5},
        {"scope": None},
        {"scope": None, "scp": ["kernel:run"]},
        {"iat": None},
    ],
    ids=range(6),
)
async def test_what_else_is_good(
    server: FakeIssuer, verifier: Issuer, claims: dict[str, Any]
) -> None:
    claims = {**claims, **({"exp": int(time.time()) + claims["exp"]} if "exp" in claims else {})}
    assert (await verifier.verify(server.token(**claims))).name == f"alice@{MARK}"


@pytest.mark.parametrize("kind", ["at+jwt", "AT+JWT", "application/at+jwt", "JWT", "", None])
async def test_types_of_access_tokens(
    server: FakeIssuer, verifier: Issuer, kind: str | None
) -> None:
    token = server.token(header={"typ": kind})
    assert (await verifier.verify(token)).name == f"alice@{MARK}"


def by_public_key(server: FakeIssuer) -> str:
    """A token whose secret is the public key, as all know it."""
    public = server.keys["k"][1].public_key()
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return forged(server.token(), {"alg": "HS256"}, secret)


WRONG: dict[str, Callable[[FakeIssuer], str]] = {
    "another audience": lambda s: s.token(aud="https://other.example/mcp"),
    "the host alone": lambda s: s.token(aud="https://kernels.example"),
    "longer audience": lambda s: s.token(aud=AUDIENCE + "/more"),
    "odd audience": lambda s: s.token(aud=[1, None]),
    "no audience": lambda s: s.token(aud=None),
    "expired": lambda s: s.token(exp=int(time.time()) - 60),
    "no end": lambda s: s.token(exp=None),
    "odd end": lambda s: s.token(exp=[1]),
    "infinite end": lambda s: s.token(exp=float("inf")),
    "not yet": lambda s: s.token(nbf=int(time.time()) + 600),
    "made tomorrow": lambda s: s.token(iat=int(time.time()) + 86400),
    "another issuer": lambda s: s.token(iss="https://evil.example"),
    "issuer with a slash": lambda s: s.token(iss=ISSUER + "/"),
    "no issuer": lambda s: s.token(iss=None),
    "no subject": lambda s: s.token(sub=None),
    "empty subject": lambda s: s.token(sub=""),
    "odd subject": lambda s: s.token(sub=["alice"]),
    "bound": lambda s: s.token(cnf={"jkt": "x"}),
    "ID token": lambda s: s.token(header={"typ": "JWT"}, nonce="n"),
    "ID token without scope": lambda s: s.token(header={"typ": "JWT"}, scope=None),
    "logout token": lambda s: s.token(header={"typ": "logout+jwt"}),
    "odd type": lambda s: s.token(header={"typ": 7}),
    "critical": lambda s: s.token(header={"crit": ["b64"], "x": 1}),
    "another key": lambda s: s.token(key=private_key("ES256")),
    "unknown key": lambda s: s.token(kid="other", key=private_key("ES256")),
    "none": lambda s: forged(s.token(), {"alg": "none"}),
    "NONE": lambda s: forged(s.token(), {"alg": "NONE"}),
    "no algorithm": lambda s: forged(s.token(), {"alg": None}),
    "odd algorithm": lambda s: forged(s.token(), {"alg": ["ES256"]}),
    "no signature": lambda s: s.token().rpartition(".")[0] + ".",
    "HS256 with the public key": by_public_key,
    "another algorithm of the kind": lambda s: s.token(key=private_key("ES384"), algorithm="ES384"),
    "another kind": lambda s: s.token(key=private_key("RS256"), algorithm="RS256"),
    "odd key name": lambda s: forged(s.token(), {"kid": 7}),
    "truncated": lambda s: s.token()[:-10],
    "longer": lambda s: s.token() + "AA",
    "changed": lambda s: s.token().replace(".", ".e", 1),
    "two parts": lambda s: s.token().rpartition(".")[0],
    "five parts": lambda s: f"{encoded({'alg': 'RSA-OAEP', 'enc': 'A256GCM'})}.a.b.c.d",
    "nested": lambda s: f"{encoded(b'[' * 5000)}.e30.AA",
    "a list": lambda s: f"{encoded([])}.e30.AA",
    "no token": lambda s: "hello",
    "nothing": lambda s: "",
    "not ASCII": lambda s: "ü.ü.ü",
    "long": lambda s: "a" * (MOST_TOKEN + 1),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_tokens_are_refused_alike(
    server: FakeIssuer, verifier: Issuer, kind: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        token = WRONG[kind](server)
    with pytest.raises(Unauthenticated) as caught:
        await verifier.verify(token)
    assert str(caught.value) == INVALID
    assert caught.value.__cause__ is None


async def test_a_name_is_that_of_one_subject_of_one_issuer() -> None:
    subjects = ["alice", "Alice", "auth0|5", "p-x", "..", "ü", "a" * 55, "a" * 56, "a b", "\ud800"]
    names = [principal_name(ISSUER, each) for each in subjects]
    names += [principal_name("https://other.example", each) for each in subjects]
    hashed = principal_name(ISSUER, "auth0|5").partition("@")[0]
    names.append(principal_name(ISSUER, hashed))
    assert len(set(names)) == len(names)
    for name in names:
        assert PRINCIPAL.fullmatch(name)
        assert ISSUED.fullmatch(name)


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": "kernel:run openid"}, {RUN}),
        ({"scp": "kernel:run kernel:install"}, {RUN, INSTALL}),
        ({"scp": ["kernel:run", 7]}, {RUN}),
        ({"scope": ["kernel:run"]}, {RUN}),
        ({"scope": "kernel:running"}, set()),
        ({"scope": 7, "scp": None}, set()),
        ({}, set()),
    ],
)
def test_scopes_are_those_that_we_know(claims: dict[str, Any], scopes: set[str]) -> None:
    assert scopes_of(claims) == scopes


async def test_rows_bound_what_holders_of_a_claim_may(
    server: FakeIssuer, clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    write(
        path,
        '{"claim": "groups=analysts", "scopes": ["kernel:run"], "quotas": {"cells": 2},'
        ' "doors": ["network"]}\n',
        '{"claim": "sub=carol", "principal": "carol"}\n',
    )
    verifier = Issuer(ISSUER, AUDIENCE, tokens=TokenFile(path), clock=clock, fetch=server.fetch)
    token = server.token(groups=["staff", "analysts"])
    found = await verifier.verify(token)
    assert found.name == f"alice@{MARK}"
    assert found.scopes == {RUN}
    assert found.quotas == Quotas(cells=2)
    assert found.grants == ("network",)
    assert (await verifier.verify(server.token(sub="carol"))).name == "carol"
    assert (await verifier.verify(server.token(sub="bob"))).grants == ()
    write(path)  # in force at once, though the token is still known
    assert (await verifier.verify(token)).grants == ()


async def test_a_token_is_checked_once_a_minute_and_not_beyond_its_end(
    server: FakeIssuer, verifier: Issuer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    real = jwt.decode

    def decode(token: str, *words: Any, **more: Any) -> Any:
        checked.append(token)
        return real(token, *words, **more)

    monkeypatch.setattr(jwt, "decode", decode)
    long, short = server.token(), server.token(exp=int(time.time()) + 20)
    for _ in range(3):
        await verifier.verify(long)
        await verifier.verify(short)
    assert len(checked) == 2
    clock.now += 25
    await verifier.verify(long)
    await verifier.verify(short)
    assert checked[2:] == [short]
    clock.now += 40
    await verifier.verify(long)
    assert checked[-1] == long


async def test_no_more_tokens_are_known_than_there_is_room_for(
    server: FakeIssuer, verifier: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuer, "MOST_KNOWN", 3)
    for number in range(5):
        await verifier.verify(server.token(sub=f"u{number}"))
    assert len(verifier._known) == 3


async def test_wrong_tokens_are_not_remembered(server: FakeIssuer, verifier: Issuer) -> None:
    for number in range(5):
        with pytest.raises(Unauthenticated):
            await verifier.verify(server.token(sub=f"u{number}", aud="x"))
    assert len(verifier._known) == 0


async def test_an_issuer_that_cannot_be_asked_is_no_wrong_token(
    server: FakeIssuer, verifier: Issuer, clock: Clock
) -> None:
    server.down = "the cable is cut"
    with pytest.raises(VerifierUnavailable, match=r"https://as\.example cannot be asked now"):
        await verifier.verify(server.token())
    with pytest.raises(Unauthenticated):  # for which nobody has to be asked
        await verifier.verify(by_public_key(server))
    server.down = ""
    clock.now += 5
    await verifier.verify(server.token())


@pytest.mark.parametrize(
    "bad",
    [
        "http://as.example",
        "https://u:p@as.example",
        "https://as.example?x",
        "file:///x",
        "https://[",
    ],
)
def test_an_issuer_is_https(bad: str) -> None:
    with pytest.raises(ConfigError, match="--issuer"):
        Issuer(bad, AUDIENCE)
    Issuer("http://127.0.0.1:9", AUDIENCE)


def test_the_document_of_the_resource_names_it_as_tokens_do() -> None:
    assert metadata("https://x.example/", ISSUER) == {
        "resource": "https://x.example/mcp",
        "resource_name": "kernel-mcp",
        "authorization_servers": [ISSUER],
        "scopes_supported": ["kernel:run", "kernel:install"],
        "bearer_methods_supported": ["header"],
    }
    found = metadata_url("https://x.example")
    assert found == "https://x.example/.well-known/oauth-protected-resource/mcp"
