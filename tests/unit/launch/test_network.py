"""The network door on the server's side: what listens where, for whom, and what it says."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernel_mcp.config.secrets import HeaderSecret
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, InputError, LaunchError
from kernel_mcp.launch.network import (
    PORT,
    Network,
    NetworkAccess,
    granted_network,
    listen_addresses,
)
from kernel_mcp.launch.proxy_client import ProxyClient
from kernel_mcp.network.rules import Rules
from kernel_mcp.network.secrets import Vault
from kernel_mcp.sandbox.base import Sandbox
from kernel_specs import linux

pytestmark = pytest.mark.anyio


def door(*entries: str) -> Network:
    return Network(Rules.parse(entries))


class Silent(ProxyClient):
    """It is not started: what it is told is kept."""

    def __init__(self) -> None:
        super().__init__(Vault(), None, lambda _: None)
        self.told: list[Mapping[str, Any]] = []
        self._process.send = self._keep  # type: ignore[method-assign]

    def start(self) -> None:
        pass

    def _keep(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        self.told.append(message)


def test_every_named_host_and_port_listens_at_an_address_of_the_sandbox() -> None:
    entries = ("api.example.com", "db.example.com:5432", "db.example.com:443", "other.test:5432")
    addresses, hosts = listen_addresses(Rules.parse(entries))
    found = [(each.address, each.port, str(each.entry or "")) for each in addresses]
    assert found == [
        ("127.0.0.1", PORT, ""),
        ("127.0.0.2", 5432, "db.example.com:5432"),
        ("127.0.0.2", 443, "db.example.com:443"),
        ("127.0.0.3", 5432, "other.test:5432"),
    ]
    assert hosts == (("127.0.0.2", "db.example.com"), ("127.0.0.3", "other.test"))


def test_an_address_is_itself_and_the_proxy_gives_way() -> None:
    rules = Rules.parse(
        [f"127.0.0.1:{PORT}", "127.0.0.2:80", "10.0.0.1:5432", "db.test:1", "[::1]:9"]
    )
    addresses, hosts = listen_addresses(rules)
    assert (addresses[0].address, addresses[0].port) == ("127.0.0.1", PORT + 1)
    assert [(each.address, each.port) for each in addresses[1:]] == [
        ("127.0.0.1", PORT),
        ("127.0.0.2", 80),
        ("10.0.0.1", 5432),
        ("127.0.0.3", 1),
    ]
    assert hosts == (("127.0.0.3", "db.test"),)


def test_a_closed_door_has_no_socket_and_no_variable() -> None:
    network = Network()
    access = network.access()
    access.receive()
    access.open(None, lambda _: None)
    access.close()
    assert not network
    assert (access.addresses, network.variables, network.hosts) == ([], {}, ())
    assert network.words(None) == "none"


def test_variables_name_the_proxy_in_both_spellings() -> None:
    found = door("*").variables
    assert found["https_proxy"] == found["HTTP_PROXY"] == f"http://127.0.0.1:{PORT}"
    assert found["no_proxy"] == "localhost,127.0.0.1,::1"


def test_a_session_may_have_less_and_is_told_what_when_it_asks_for_more() -> None:
    network = door("*.example.com")
    assert str(network.rules_for(("a.example.com",))) == "a.example.com"
    assert not network.rules_for(())
    with pytest.raises(InputError, match=r"ask for hosts of \*\.example\.com, or leave it out"):
        network.rules_for(("evil.test",))
    with pytest.raises(InputError, match=r"started with --network pypi\.org"):
        Network().rules_for(("pypi.org",))


@pytest.mark.parametrize(
    ("entries", "sandbox", "words"),
    [
        (("10.0.0.1",), "bwrap", "--network: .*name its port"),
        (("localhost",), "bwrap", "--network: "),
        (("*",), "landlock", "no network of its own .* --sandbox bwrap or container"),
    ],
)
def test_what_cannot_be_opened_is_refused_with_words(
    entries: tuple[str, ...], sandbox: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        granted_network(
            Settings(network=entries), cast(Sandbox, SimpleNamespace(name=sandbox)), Path("/")
        )


def test_a_secret_opens_its_own_host_and_takes_a_sandbox(tmp_path: Path) -> None:
    secrets = tuple(HeaderSecret("KEY", each, value="x" * 9) for each in ("a.test", "b.test"))
    settings = Settings(network=("*.test",), secrets=secrets)
    for name in ("none", "landlock"):
        with pytest.raises(ConfigError, match="--secret"):
            granted_network(settings, cast(Sandbox, SimpleNamespace(name=name)), tmp_path)
    sandbox = cast(Sandbox, SimpleNamespace(name="bwrap"))
    with pytest.raises(ConfigError, match="--secret: 'localhost'"):
        granted_network(Settings(secrets=(HeaderSecret("KEY", "localhost"),)), sandbox, tmp_path)
    long = tuple(HeaderSecret("KEY", f"{each}.test", value="x" * 8000) for each in range(9))
    with pytest.raises(ConfigError, match="--secret: all values together"):
        granted_network(Settings(secrets=long), sandbox, tmp_path)
    assert str(granted_network(settings, sandbox, tmp_path).rules) == "*.test"
    alone = granted_network(Settings(secrets=secrets), sandbox, tmp_path)
    assert str(alone.rules) == "a.test:443, b.test:443"
    assert alone.rules_for(("a.test",)).rule_for("a.test", 443) is not None
    assert "a placeholder for a secret" in alone.words(None)
    words = alone.words(("b.test",))
    assert "https://b.test" in words
    assert "https://a.test" not in words
    found = alone.variables
    assert found["KEY"].startswith("kmcp_")
    assert found["SSL_CERT_FILE"] == str(tmp_path / "authorities.pem")


def made(access: NetworkAccess) -> None:
    """Create the listeners as a sandbox does, in this network namespace."""
    linux.send_listeners(access.guest(), access.addresses)


def listening(*names: str) -> Network:
    """A door with places that are free here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    network = door(f"127.0.0.1:{port}", *names)
    network.proxy = Silent()
    network.addresses = network.addresses[1:]  # the proxy's port may be taken here
    return network


async def test_only_sockets_of_another_network_are_taken() -> None:
    network = listening()
    access = network.access()
    made(access)
    with pytest.raises(LaunchError, match="not what it has to be"):
        access.receive()
    access.close()


async def test_a_kernel_that_sent_nothing_has_no_way() -> None:
    access = listening().access()
    with socket.socket(fileno=access.guest()):
        pass
    with pytest.raises(LaunchError, match=r"not what it has to be|no access"):
        access.receive()


async def test_a_session_gets_what_it_asked_for_and_records_find_it_after_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.launch.network._namespace_of", lambda _: None)
    network = listening()
    proxy = network.proxy
    assert isinstance(proxy, Silent)
    access = network.access()
    made(access)
    access.receive()
    heard: list[Mapping[str, Any]] = []
    access.open(None, heard.append)
    access.open(None, heard.append)
    (message,) = proxy.told
    assert message["exact"] == str(network.rules)
    number = message["listen"]
    access.close()
    assert proxy.told[-1] == {"close": number}
    proxy._on_message({"end": number, "host": "x"}, [])
    assert heard == [{"host": "x"}]

    other = network.access()
    made(other)
    other.receive()
    other.open((), heard.append)
    assert proxy.told[-1] == {"close": number}, "what the session did not ask for is closed"
    other.close()
