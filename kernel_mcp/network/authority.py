"""Certificate authority of the proxy: kernels trust it for the hosts of secrets and no others.

There is one for each server, not for each session. Its key stays in the memory of proxy and server,
so no session can sign with it. Templates show the certificate to kernels before they have a
session. A restarted proxy reuses the authority: by then programs have read the certificate into
`ssl` contexts that they keep (urllib does from Python 3.12 on).
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import ssl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 3 * 366
"""Validity of the authority in days. Its key is discarded with the server, long before."""
HOST_HOURS = 24
"""Validity of a host's certificate, in hours.

It is replaced after half of that; its validity begins as long before it is issued. This tolerates
clocks that are wrong in either direction.
"""
_NAME = "kernel-mcp, for the hosts of secrets"
_EVERY_ADDRESS = ("0.0.0.0/0", "::/0")
_LONGEST_NAME = 64
"""Characters of a common name (RFC 5280, ub-common-name)."""


class Authority:
    """Issuer of certificates for `hosts`. Its name constraints make clients reject other names."""

    def __init__(self, hosts: Sequence[str], saved: Mapping[str, str] | None = None) -> None:
        """Create the authority, or restore it from the property `saved` of one for these hosts.

        `hosts` are DNS names in lower case. Raises ValueError or KeyError if `saved` is not valid.
        """
        self._hosts = frozenset(hosts)
        self._contexts: dict[str, tuple[dt.datetime, ssl.SSLContext]] = {}
        if saved is not None:
            key = serialization.load_pem_private_key(saved["key"].encode(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("the key is of another kind")
            self._key = key
            self._certificate = x509.load_pem_x509_certificate(saved["certificate"].encode())
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        permitted = [x509.DNSName(host) for host in sorted(hosts)]
        excluded = [x509.IPAddress(ipaddress.ip_network(each)) for each in _EVERY_ADDRESS]
        name = _named(_NAME)
        self._certificate = (
            self._begun(name, self._key.public_key(), dt.timedelta(days=AUTHORITY_DAYS))
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(x509.NameConstraints(permitted, excluded), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> str:
        """The authority's own certificate, which is public, as PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def saved(self) -> dict[str, str]:
        """Certificate and key as PEM, from which a restarted proxy restores the authority."""
        return {"certificate": self.certificate, "key": _pem(self._key)}

    def context(self, host: str) -> ssl.SSLContext:
        """Return a context that serves TLS as `host`, with HTTP/1.1 as the only ALPN protocol.

        It is cached until half of its certificate's validity has passed. Clients that ask for
        another server name are rejected. Raises KeyError if `host` is not one of this authority's.
        """
        if host not in self._hosts:
            raise KeyError(host)
        now = dt.datetime.now(dt.timezone.utc)
        renewal, context = self._contexts.get(host, (now, None))
        if context is None or renewal <= now:
            context = self._context(host)
            self._contexts[host] = now + dt.timedelta(hours=HOST_HOURS / 2), context
        return context

    def _context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        short = len(host) <= _LONGEST_NAME
        subject = _named(host) if short else x509.Name([])
        signed = (
            self._begun(subject, key.public_key(), dt.timedelta(hours=HOST_HOURS))
            .issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=not short)
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])

        def check(_tls: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> int | None:
            wrong = (name or "").lower() != host
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME if wrong else None

        context.sni_callback = check
        _load(
            context,
            signed.public_bytes(serialization.Encoding.PEM),
            _pem(key).encode(),
        )
        return context

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, lasts: dt.timedelta
    ) -> x509.CertificateBuilder:
        """Return a builder with the fields that every certificate has; the issuer is not set.

        It includes both key identifiers, which clients require from Python 3.13 on.
        """
        now = dt.datetime.now(dt.timezone.utc)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=HOST_HOURS / 2))
            .not_valid_after(now + lasts)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(own, critical=False)
        )


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _load(context: ssl.SSLContext, *pem: bytes) -> None:
    """Load a certificate and its key, both PEM, into `context`.

    `ssl` reads them from paths only. They are passed through pipes, as this process may not write
    files.
    """
    with ExitStack() as held:
        names = []
        for content in pem:
            read, write = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, read)
            with open(write, "wb", buffering=0) as pipe:
                pipe.write(content)
            names.append(f"/proc/self/fd/{read}")
        context.load_cert_chain(*names)
