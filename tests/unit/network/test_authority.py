"""The authority that kernels trust for the hosts of secrets, and for no others."""

from __future__ import annotations

import contextlib
import ssl

import pytest

from kernel_mcp.network.authority import Authority


def shaken(serving: ssl.SSLContext, trust: str, name: str) -> str:
    """Return the outcome of a handshake, in memory, with a client that trusts `trust`.

    The TLS version, or the client's reason against it.
    """
    context = ssl.create_default_context(cadata=trust)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_host, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_host, server_hostname=name)
    host = serving.wrap_bio(to_host, to_client, server_side=True)
    try:
        for end in (client, host) * 5:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return str(error.reason)
    return str(client.version())


def test_strict_clients_believe_it_for_its_hosts() -> None:
    long = f"{'a' * 60}.{'b' * 60}.test"
    own = Authority(["api.test", "git.test", long])
    for host in ("api.test", "git.test", long):
        assert shaken(own.context(host), own.certificate, host) == "TLSv1.3"
    assert own.context("api.test") is own.context("api.test")


def test_clients_believe_it_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Authority(["api.test"])
    with pytest.raises(KeyError):
        own.context("bank.test")
    monkeypatch.setattr(own, "_hosts", {"bank.test", "api.test.bank.test"})
    for host in ("bank.test", "api.test.bank.test"):
        assert shaken(own.context(host), own.certificate, host) == "permitted subtree violation"


def test_one_authority_is_nothing_to_those_that_trust_another() -> None:
    one, other = Authority(["api.test"]), Authority(["api.test"])
    assert "certificate" in shaken(one.context("api.test"), other.certificate, "api.test")


def test_a_later_one_is_the_same_to_those_that_trust_the_first() -> None:
    one = Authority(["api.test"])
    later = Authority(["api.test"], one.saved)
    assert later.certificate == one.certificate
    assert shaken(later.context("api.test"), one.certificate, "api.test") == "TLSv1.3"
    assert "key" not in one.certificate.lower()
    with pytest.raises(ValueError, match="PEM"):
        Authority(["api.test"], {"certificate": one.certificate, "key": "none"})


def test_a_client_that_asks_for_another_name_gets_no_certificate() -> None:
    own = Authority(["api.test", "git.test"])
    assert shaken(own.context("api.test"), own.certificate, "git.test") in (
        "TLSV1_UNRECOGNIZED_NAME",
        "CALLBACK_FAILED",
    )
