"""Requirements on a cluster."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet import cluster
from kernel_mcp.fleet.cluster import (
    FleetUnavailable,
    check_address,
    check_head,
    check_network,
    secret_of,
)
from kernel_mcp.network.authority import Authority

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
        check_network([entry], ["10.0.0.5", "10.0.0.6"])


def test_other_ways_out_are_the_operators_choice() -> None:
    check_network(["*", "example.com", "192.0.2.7:443", "*.example.com:8443"], ["10.0.0.5"])


@contextmanager
def head(context: ssl.SSLContext | None) -> Iterator[str]:
    """The address of a server that speaks TLS with a context, else answers with plain bytes."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                if context is None:
                    connection.recv(10_000)
                    connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05")
                else:
                    context.wrap_socket(connection, server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("wanted", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("mutual", [False, True], ids=["one side", "mutual"])
def test_a_head_with_tls_is_told_from_one_without(
    wanted: bool, mutual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Authority(["head.test"]).context("head.test")
    context.sni_callback = None  # as that of a head, which is called by its address
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    if wanted:
        monkeypatch.setenv("RAY_USE_TLS", "1")
        with head(context) as address:
            check_head(address)
        with head(None) as address, pytest.raises(ConfigError, match="does not speak TLS"):
            check_head(address)
    else:
        with head(None) as address:
            check_head(address)
        with head(context) as address, pytest.raises(ConfigError, match=r"speaks TLS\. Set"):
            check_head(address)


def test_a_head_that_is_not_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(FleetUnavailable, match=f"nobody listens at {address}: Connection refused"):
        check_head(address)


def test_a_head_that_hangs_is_told_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "HELLO_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel accepts for it
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(FleetUnavailable, match="accepts connections, but has not answered"):
            check_head(address)
