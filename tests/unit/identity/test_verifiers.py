"""The verifiers of callers by the settings of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import OneToken, Unauthenticated
from kernel_mcp.identity.issuer import Issuer
from kernel_mcp.identity.tokens import TokenFile
from kernel_mcp.identity.verifiers import Verifiers, verifier_of
from tests.unit.identity.signing import AUDIENCE, ISSUER, Clock, FakeIssuer
from tests.unit.identity.test_tokens import line, write

pytestmark = pytest.mark.anyio
URL = "https://kernels.example"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "tokens", line("kmcp_1"))
    return tmp_path / "tokens"


async def test_a_server_of_whom_nothing_is_said_makes_a_token() -> None:
    made = verifier_of(Settings(), URL)
    assert isinstance(made, OneToken)
    assert (await made.verify(made.token)).name == "local"


def test_no_auth_asks_nobody() -> None:
    assert verifier_of(Settings(no_auth=True), URL) is None


HERE = ("127.0.0.1", 8000)


async def test_each_token_is_for_the_one_that_knows_its_kind(path: Path) -> None:
    server = FakeIssuer()
    server.make()
    tokens = TokenFile(path)
    issuer = Issuer(ISSUER, AUDIENCE, tokens=tokens, clock=Clock(), fetch=server.fetch)
    both = Verifiers(tokens, issuer)
    assert (await both.verify("kmcp_1")).name == "alice"
    assert not server.asked
    await both.prepare()
    assert (await both.verify(server.token())).name.startswith("alice@")
    for verifier, wrong in (
        (both, "kmcp_2"),
        (both, "x"),
        (Verifiers(tokens, None), server.token()),
        (Verifiers(None, issuer), "kmcp_1"),
    ):
        with pytest.raises(Unauthenticated):
            await verifier.verify(wrong)
    await both.aclose()


async def test_the_settings_name_file_and_issuer(path: Path) -> None:
    found = verifier_of(Settings(http=HERE, tokens=path), URL)
    assert isinstance(found, Verifiers)
    assert (await found.verify("kmcp_1")).name == "alice"
    await found.prepare()
    assert isinstance(verifier_of(Settings(http=HERE, issuer=ISSUER, tokens=path), URL), Verifiers)
    with pytest.raises(ConfigError, match="no such file"):
        verifier_of(Settings(http=HERE, tokens=path.with_name("x")), URL)
    with pytest.raises(ConfigError, match="--issuer"):
        verifier_of(Settings(http=HERE, issuer="http://as.example"), URL)
