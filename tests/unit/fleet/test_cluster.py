"""What a cluster has to be like."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet.cluster import check_address, check_ways_out, secret_of

TOKEN = "t" * 48


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_token_is_taken_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert secret_of("127.0.0.2:6379") == TOKEN
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with pytest.raises(ConfigError, match="there is no token"):
        secret_of("127.0.0.2:6379")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert secret_of("127.0.0.2:6379") == TOKEN


@pytest.mark.parametrize("mode", ["", "disabled", "k8s"])
def test_without_a_token_no_cluster_is_used(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ConfigError, match="without authentication"):
        secret_of("127.0.0.2:6379")


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with pytest.raises(ConfigError, match="6 characters"):
        secret_of("127.0.0.2:6379")


def test_off_loopback_it_takes_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="RAY_USE_TLS=1"):
        secret_of("10.0.0.5:6379")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert secret_of("10.0.0.5:6379") == TOKEN


@pytest.mark.parametrize("address", ["", "10.0.0.5", "10.0.0.5:0", "ray://10.0.0.5:1", "a b:1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize(
    "entry", ["10.0.0.5:6379", "10.0.0.6:443", "127.0.0.1:80", "127.9.9.9:80", "[::1]:80"]
)
def test_no_way_out_leads_to_a_machine_of_the_fleet(entry: str) -> None:
    with pytest.raises(ConfigError, match="machine of the fleet"):
        check_ways_out([entry], ["10.0.0.5", "10.0.0.6"])


def test_other_ways_out_are_the_operators_choice() -> None:
    check_ways_out(["*", "example.com", "192.0.2.7:443", "*.example.com:8443"], ["10.0.0.5"])
