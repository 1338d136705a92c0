"""HTTPS to the hosts of secrets, ended and begun anew in the proxy: requests filled, answers read.

The host is verified as any client would. What a request asks to have compressed, in parts or as
another protocol is not asked for, as answers could not be searched then.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence

import h11

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.http import Head, Headers, Refused, Stream, values_of
from kernel_mcp.network.relay import Answer, Guard
from kernel_mcp.network.secrets import Found, Scan, Secret, Sought
from kernel_mcp.network.tls import Tls
from kernel_mcp.records import dataclass

WHOLE_BYTES = 64 * 1024
"""An answer that tells it is no longer than this is searched before any of it is passed on."""
_PARTS = frozenset({b"range", b"if-range", b"request-range"})


@dataclass(frozen=True)
class Termination(Guard):
    """What ends TLS of sessions to `host`, and keeps `secrets` out of the answers.

    serving  makes TLS as the host; `trust` verifies the real one
    sought   forms of the secrets
    """

    host: str
    secrets: Sequence[Secret]
    serving: ssl.SSLContext
    trust: ssl.SSLContext
    sought: Sought

    def distrusted(self, reason: OSError) -> Refused:
        """Why a session makes no TLS with the proxy."""
        return Refused(
            f"the session makes no TLS connection to {self.host}: {_said(reason)}. The proxy ends "
            "TLS to it for its secret: trust the file that SSL_CERT_FILE names",
            verdict="failed",
        )

    async def begun(self, outside: Stream) -> Tls:
        """TLS with the host, which is verified. Raises Refused."""
        tls = Tls(outside, self.trust, self.host)
        try:
            await tls.begin()
        except OSError as reason:
            words = f"{self.host} makes no TLS connection: {_said(reason)}. Try again later"
            if isinstance(reason, ssl.SSLCertVerificationError):
                words = (
                    f"{self.host} is not who it says it is: {reason.verify_message}. The operator "
                    "may have the server trust it, by SSL_CERT_FILE in the server's environment"
                )
            raise Refused(words, 502, "failed") from None
        return tls

    def asked(self, head: Head) -> Headers:
        """The headers that the host gets. Raises Refused."""
        if not head.modern:  # an answer that is cut off would look whole
            raise Refused(
                f"only HTTP/1.1 is spoken to {self.host}, for which there is a secret: ask in that",
                505,
            )
        if any(b"websocket" in each.lower() for each in values_of(head.headers, b"upgrade")):
            raise Refused(
                f"no websockets to {self.host}: there is a secret for it, and what they carry is "
                "not searched for it. Ask by HTTP, or have the operator name another host",
                501,
            )
        headers = [each for each in head.sent_headers() if each[0] != b"accept-encoding"]
        filled = [(name, self._fill(name, text)) for name, text in headers]
        if filled != headers:  # a part of an answer may hold a part of the value
            filled = [each for each in filled if each[0] not in _PARTS]
        return (*filled, (b"accept-encoding", b"identity"))

    def _fill(self, name: bytes, text: bytes) -> bytes:
        for secret in self.secrets:
            text = secret.fill(name, text)
        return text

    def answer(self, head: Head) -> Answer:
        """What searches the answer to one request."""
        return _Searched(self, head)


class _Searched(Answer):
    """An answer on its way, which holds no value of a secret."""

    whole = WHOLE_BYTES

    def __init__(self, guard: Termination, head: Head) -> None:
        self._guard = guard
        self._bare = head.method == b"HEAD"
        self._scan = Scan(guard.sought)

    def begin(self, response: h11.Response) -> None:
        """Look at its head. Raises Refused."""
        self._search(tuple(response.headers.raw_items()), bytes(response.reason))
        codings = values_of(tuple(response.headers), b"content-encoding")
        coding = b", ".join(codings).decode("latin-1").strip().lower()
        bare = self._bare or response.status_code in (204, 304)
        if coding not in ("", "identity") and not bare:
            raise Refused(
                f"{self._guard.host} answers compressed ({coding}) though it is asked not to, and "
                "what is compressed cannot be searched for its secret. Ask it for another form, or "
                "without the secret by a host that has none",
                502,
                "failed",
            )

    def pass_on(self, data: bytes) -> bytes:
        """What can be passed on, with the next piece of its body. Raises Refused."""
        try:
            return self._scan.feed(data)
        except Found as secret:
            raise self._held(secret) from None

    def end(self, trailers: Headers) -> bytes:
        """The rest of its body, with what follows it. Raises Refused."""
        self._search(trailers)
        return self._scan.end()

    def _search(self, headers: Headers, reason: bytes = b"") -> None:
        texts = [reason, *(part for each in headers for part in each)]
        try:
            self._guard.sought.search(b"\n".join(texts))
        except Found as secret:
            raise self._held(secret) from None

    def _held(self, secret: Found) -> Refused:
        return Refused(
            f"an answer of {self._guard.host} held the value of the secret {secret}, which code "
            "does not get to see, and was cut off. Ask for what does not show it",
            502,
        )


def _said(reason: Exception) -> str:
    return str(reason) or type(reason).__name__


class Terminations:
    """Those of all hosts with secrets; `trust` are the authorities that real hosts have, as PEM."""

    def __init__(
        self, secrets: Sequence[Secret], trust: str, kept: Mapping[str, str] | None = None
    ) -> None:
        """`kept` is the authority of an earlier proxy. Raises ssl.SSLError for no certificate."""
        self._authority = Authority([each.host for each in secrets], kept)
        self._secrets = {
            host: [each for each in secrets if each.host == host]
            for host in {each.host for each in secrets}
        }
        self._sought = {host: Sought(found) for host, found in self._secrets.items()}
        self._trust = ssl.create_default_context(cadata=trust)

    @property
    def certificate(self) -> str:
        """What kernels have to trust, as PEM."""
        return self._authority.certificate

    @property
    def authority(self) -> dict[str, str]:
        """Its `certificate` and `key` as PEM, for the proxy that replaces this one."""
        return self._authority.kept

    def of(self, host: str) -> Termination | None:
        """That of connections to `host`; None where there is no secret for it."""
        if host not in self._secrets:
            return None
        serving = self._authority.context(host)
        return Termination(host, self._secrets[host], serving, self._trust, self._sought[host])
