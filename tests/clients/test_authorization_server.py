"""A real OAuth 2.1 authorization server, `oidc-provider`: its tokens, and clients that get them.

The clients of the SDK know nothing but the address of MCP: the rest they find from the first 401.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt import PyJWK
from mcp.client import Client
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider, PKCEParameters
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from kernel_mcp.identity import INSTALL, INVALID, RUN, Unauthenticated
from kernel_mcp.identity.issuer import Issuer, principal_name
from tests.clients.node import installed
from tests.integration.agent import Agent
from tests.integration.httpserver import HttpServer, http_server
from tests.unit.identity.signing import forged

pytestmark = [pytest.mark.full, pytest.mark.anyio]

PACKAGE = "oidc-provider@9"
PROGRAM = Path(__file__).with_name("authorization_server.mjs")
AUDIENCE = "http://127.0.0.1:8000/mcp"
CALLBACK = "/callback"
REDIRECT = f"http://127.0.0.1:9{CALLBACK}"
PATIENCE_S = 120.0


@contextmanager
def authorization_server(folder: Path) -> Iterator[str]:
    """One that runs, by its issuer."""
    command = [str(folder / "node_modules/.bin/node"), PROGRAM.name]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        issuer = process.stdout.readline().strip()
        assert issuer.startswith("http://127.0.0.1:")
        try:
            yield issuer
        finally:
            process.stdin.close()  # at which it ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("authorization")
    installed(made, PACKAGE)
    shutil.copy(PROGRAM, made)
    return made


@pytest.fixture(scope="module")
def issuer(folder: Path) -> Iterator[str]:
    with authorization_server(folder) as started:
        yield started


@pytest.fixture(scope="module")
def server(issuer: str) -> Iterator[HttpServer]:
    with http_server("--issuer", issuer) as running:
        yield running


async def machine_token(
    issuer: str, client: str, resource: str = AUDIENCE, scope: str = "kernel:run"
) -> str:
    """A token by client credentials."""
    form = {"grant_type": "client_credentials", "scope": scope, "resource": resource}
    async with httpx2.AsyncClient(auth=(client, f"secret-of-{client}")) as http:
        answer = await http.post(f"{issuer}/token", data=form)
    return str(answer.json()["access_token"])


async def consent(url: str, account: str) -> str:
    """Where the browser of a person ends who logs in and agrees to everything."""
    async with httpx2.AsyncClient() as browser:
        page = await browser.get(url)
        for _ in range(20):
            if page.is_redirect:
                url = urljoin(url, page.headers["location"])
                if urlsplit(url).path == CALLBACK:
                    return url
                page = await browser.get(url)
                continue
            prompt = re.search(r'name="prompt" value="(\w+)"', page.text)
            action = re.search(r'action="([^"]+)"', page.text)
            assert prompt is not None, page.text
            assert action is not None
            form = {"prompt": prompt[1], "login": account, "password": "any"}
            url = urljoin(url, action[1])
            page = await browser.post(url, data=form)
    raise AssertionError("there is no end of it")


async def person_tokens(
    issuer: str,
    account: str,
    scope: str = "openid kernel:run kernel:install",
    resource: str = AUDIENCE,
) -> dict[str, Any]:
    """Return the tokens at the end of an authorization code flow with PKCE."""
    proof = PKCEParameters.generate()
    async with httpx2.AsyncClient() as http:
        about = {"redirect_uris": [REDIRECT], "token_endpoint_auth_method": "none"}
        client = (await http.post(f"{issuer}/reg", json=about)).json()["client_id"]
        asked = httpx2.QueryParams(
            response_type="code",
            client_id=client,
            redirect_uri=REDIRECT,
            scope=scope,
            resource=resource,
            code_challenge=proof.code_challenge,
            code_challenge_method="S256",
            nonce="n",
        )
        place = await consent(f"{issuer}/auth?{asked}", account)
        form = {
            "grant_type": "authorization_code",
            "code": parse_qs(urlsplit(place).query)["code"][0],
            "redirect_uri": REDIRECT,
            "client_id": client,
            "code_verifier": proof.code_verifier,
            "resource": resource,
        }
        found = (await http.post(f"{issuer}/token", data=form)).json()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
async def test_a_machine_has_a_token_of_its_own(issuer: str, algorithm: str) -> None:
    found = await Issuer(issuer, AUDIENCE).verify(await machine_token(issuer, algorithm))
    assert found.name == principal_name(issuer, algorithm)
    assert found.scopes == {RUN}


async def test_a_person_has_an_access_token_and_an_id_token_that_is_none(issuer: str) -> None:
    tokens = await person_tokens(issuer, "alice")
    verifier = Issuer(issuer, AUDIENCE)
    found = await verifier.verify(tokens["access_token"])
    assert found.name == principal_name(issuer, "alice")
    assert found.scopes == {RUN, INSTALL}
    with pytest.raises(Unauthenticated):
        await verifier.verify(tokens["id_token"])


async def test_tokens_that_are_wrong_in_any_way_are_refused_alike(
    issuer: str, folder: Path
) -> None:
    good = await machine_token(issuer, "ES256")
    with authorization_server(folder) as other:
        strange = await machine_token(other, "ES256")
    async with httpx2.AsyncClient() as http:
        keys = (await http.get(f"{issuer}/jwks")).json()["keys"]
    public = PyJWK(next(key for key in keys if key["alg"] == "RS256")).key
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    wrong = {
        "another audience": await machine_token(issuer, "ES256", "http://127.0.0.1:8000/other"),
        "another issuer": strange,
        "opaque": await machine_token(issuer, "opaque"),
        "expired": await machine_token(issuer, "expired"),
        "alg none": forged(good, {"alg": "none"}),
        "HS256 with the public key": forged(good, {"alg": "HS256", "kid": "key-RS256"}, secret),
        "unknown key": forged(good, {"kid": "other"}),
        "key of another kind": forged(good, {"kid": "key-RS256"}),
        "without a signature": good.rpartition(".")[0] + ".",
        "truncated": good[:-20],
        "another payload": ".".join(
            [good.split(".")[0], strange.split(".")[1], good.split(".")[2]]
        ),
    }
    verifier = Issuer(issuer, AUDIENCE)
    await verifier.verify(good)
    for what, token in wrong.items():
        with pytest.raises(Unauthenticated) as caught:
            await verifier.verify(token)
        assert str(caught.value) == INVALID, what


class Memory:
    """The storage of one client."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


def person(server: HttpServer, account: str, memory: Memory) -> OAuthClientProvider:
    """The SDK's client of a person who logs in as `account`."""
    places: list[str] = []

    async def redirected(url: str) -> None:
        places.append(await consent(url, account))

    async def called_back() -> AuthorizationCodeResult:
        found = parse_qs(urlsplit(places[-1]).query)
        return AuthorizationCodeResult(
            code=found["code"][0], state=found["state"][0], iss=found["iss"][0]
        )

    about = OAuthClientMetadata(
        redirect_uris=[AnyUrl(REDIRECT)],
        client_name="a client",
        token_endpoint_auth_method="none",
    )
    return OAuthClientProvider(server.mcp, about, memory, redirected, called_back)


@asynccontextmanager
async def agent(server: HttpServer, auth: httpx2.Auth, era: str) -> AsyncIterator[Agent]:
    async with (
        httpx2.AsyncClient(auth=auth, timeout=PATIENCE_S) as http,
        Client(streamable_http_client(server.mcp, http_client=http), mode=era) as client,
    ):
        yield Agent(client)


@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_a_machine_finds_its_way_from_the_first_answer(
    issuer: str, server: HttpServer, era: str
) -> None:
    auth = ClientCredentialsOAuthProvider(
        server.mcp, Memory(), "RS256", "secret-of-RS256", issuer=issuer
    )
    async with agent(server, auth, era) as client:
        assert "42" in (await client.run("20 + 22")).text


@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_a_person_logs_in_and_has_one_session_whatever_the_client(
    issuer: str, server: HttpServer, era: str
) -> None:
    account = f"alice-{era}"
    memory = Memory()
    async with agent(server, person(server, account, memory), era) as client:
        await client.run("mine = 6 * 7")
        answer = await client.run("mine")
        assert "42" in answer.text
        session = answer.cell["session"]
    assert memory.tokens is not None
    assert memory.tokens.scope is not None
    assert set(memory.tokens.scope.split()) == {"kernel:run", "kernel:install"}
    async with agent(server, person(server, account, Memory()), era) as client:
        assert "42" in (await client.run("mine")).text
    async with agent(server, person(server, "mallory", Memory()), era) as client:
        foreign = await client.call("execute", code="mine", session=session)
        unknown = await client.call("execute", code="mine", session="s-000000000000")
        assert foreign.failed
        assert foreign.text.replace(session, "X") == unknown.text.replace("s-000000000000", "X")


@pytest.mark.parametrize("era", ["legacy", "auto"])
async def test_a_person_is_asked_again_when_packages_are_to_be_added(
    issuer: str, server: HttpServer, era: str
) -> None:
    account, memory = f"bob-{era}", Memory()
    memory.client = OAuthClientInformationFull(
        client_id="app", redirect_uris=[AnyUrl(REDIRECT)], issuer=issuer
    )
    less = await person_tokens(issuer, account, "openid kernel:run", server.mcp)
    memory.tokens = OAuthToken.model_validate(less)
    async with agent(server, person(server, account, memory), era) as client:
        await client.run("1")
        assert memory.tokens.scope == "kernel:run"
        assert "scope" not in await client.refused("install", packages=["not/a/name"])
        assert memory.tokens.scope is not None
        assert set(memory.tokens.scope.split()) == {"kernel:run", "kernel:install"}


async def test_a_token_for_something_else_is_asked_to_be_another(
    issuer: str, server: HttpServer
) -> None:
    metadata = f'resource_metadata="{server.url}/.well-known/oauth-protected-resource/mcp"'
    tokens = {
        "": (401, ""),
        await machine_token(issuer, "RS256"): (401, 'error="invalid_token", '),
        await machine_token(issuer, "RS256", server.mcp, "kernel:install"): (
            403,
            'error="insufficient_scope", ',
        ),
    }
    async with httpx2.AsyncClient() as http:
        for token, (status, error) in tokens.items():
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = await http.post(server.mcp, headers=headers, json={})
            assert answer.status_code == status
            scope = "kernel:run" if status == 403 else "kernel:run kernel:install"
            challenge = f'Bearer realm="kernel-mcp", {error}scope="{scope}", {metadata}'
            assert answer.headers["www-authenticate"] == challenge
        for end in ("", "/mcp"):
            page = await http.get(f"{server.url}/.well-known/oauth-protected-resource{end}")
            assert page.json()["resource"] == server.mcp
            assert page.json()["authorization_servers"] == [issuer]
