"""TLS termination for the hosts of secrets: requests are filled, responses are searched.

The host's certificate is verified as any client does it. Compression, ranges and other protocols
are not requested, as such responses could not be searched.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence

import h11

from kernel_mcp.network.authority import Authority
from kernel_mcp.network.http import ByteStream, Head, Headers, ProxyRefusal, values_of
from kernel_mcp.network.relay import HostFilter, ResponseFilter
from kernel_mcp.network.secrets import SearchForms, Secret, SecretFound, StreamSearch
from kernel_mcp.network.tls import Tls
from kernel_mcp.records import dataclass

WHOLE_BYTES = 64 * 1024
"""A response with at most this Content-Length is searched before any of it is passed on."""
_PARTS = frozenset({b"range", b"if-range", b"request-range"})


@dataclass(frozen=True)
class Termination(HostFilter):
    """TLS termination for `host`: fills `secrets` into requests, keeps them out of responses.

    server_context  context that serves TLS to the session as the host
    client_context  context that verifies the real host
    forms           encoded forms of the secrets
    """

    host: str
    secrets: Sequence[Secret]
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext
    forms: SearchForms

    def handshake_error(self, reason: OSError) -> ProxyRefusal:
        """Return the error for a session whose TLS handshake with the proxy failed."""
        return ProxyRefusal(
            f"the session makes no TLS connection to {self.host}: {_reason_text(reason)}. The "
            "proxy ends TLS to it for its secret: trust the file that SSL_CERT_FILE names",
            verdict="failed",
        )

    async def connect_tls(self, outside: ByteStream) -> Tls:
        """Begin TLS with the host over `outside`, and verify the host. Raises ProxyRefusal."""
        tls = Tls(outside, self.client_context, self.host)
        try:
            await tls.begin()
        except OSError as reason:
            words = f"{self.host} makes no TLS connection: {_reason_text(reason)}. Try again later"
            if isinstance(reason, ssl.SSLCertVerificationError):
                words = (
                    f"{self.host} is not who it says it is: {reason.verify_message}. The operator "
                    "may have the server trust it, by SSL_CERT_FILE in the server's environment"
                )
            raise ProxyRefusal(words, 502, "failed") from None
        return tls

    def request_headers(self, head: Head) -> Headers:
        """Return the headers to send to the host, with secrets filled in.

        Raises ProxyRefusal for HTTP/1.0 and websockets.
        """
        if not head.modern:  # a truncated response would look complete
            raise ProxyRefusal(
                f"only HTTP/1.1 is spoken to {self.host}, for which there is a secret: ask in that",
                505,
            )
        if any(b"websocket" in each.lower() for each in values_of(head.headers, b"upgrade")):
            raise ProxyRefusal(
                f"no websockets to {self.host}: there is a secret for it, and what they carry is "
                "not searched for it. Ask by HTTP, or have the operator name another host",
                501,
            )
        headers = [each for each in head.sent_headers() if each[0] != b"accept-encoding"]
        filled = [(name, self._fill(name, text)) for name, text in headers]
        if filled != headers:  # a range may contain a part of the value
            filled = [each for each in filled if each[0] not in _PARTS]
        return (*filled, (b"accept-encoding", b"identity"))

    def _fill(self, name: bytes, text: bytes) -> bytes:
        for secret in self.secrets:
            text = secret.fill(name, text)
        return text

    def response_filter(self, head: Head) -> ResponseFilter:
        """Return the filter that searches the response to this request."""
        return _SecretFilter(self, head)


class _SecretFilter(ResponseFilter):
    """Filter of one response that raises ProxyRefusal if it contains the value of a secret."""

    buffer_bytes = WHOLE_BYTES

    def __init__(self, termination: Termination, head: Head) -> None:
        self._termination = termination
        self._bare = head.method == b"HEAD"
        self._scan = StreamSearch(termination.forms)

    def begin(self, response: h11.Response) -> None:
        """Check the head of the response.

        Raises ProxyRefusal if it has a secret or is compressed.
        """
        self._search(tuple(response.headers.raw_items()), bytes(response.reason))
        codings = values_of(tuple(response.headers), b"content-encoding")
        coding = b", ".join(codings).decode("latin-1").strip().lower()
        bare = self._bare or response.status_code in (204, 304)
        if coding not in ("", "identity") and not bare:
            raise ProxyRefusal(
                f"{self._termination.host} answers compressed ({coding}) though it is asked not "
                "to, and what is compressed cannot be searched for its secret. Ask it for another "
                "form, or without the secret by a host that has none",
                502,
                "failed",
            )

    def pass_on(self, data: bytes) -> bytes:
        """Search the next piece of the body; return what can be passed on now.

        Raises ProxyRefusal.
        """
        try:
            return self._scan.feed(data)
        except SecretFound as secret:
            raise self._refuse(secret) from None

    def end(self, trailers: Headers) -> bytes:
        """Search the trailers; return the rest of the body. Raises ProxyRefusal."""
        self._search(trailers)
        return self._scan.end()

    def _search(self, headers: Headers, reason: bytes = b"") -> None:
        texts = [reason, *(part for each in headers for part in each)]
        try:
            self._termination.forms.search(b"\n".join(texts))
        except SecretFound as secret:
            raise self._refuse(secret) from None

    def _refuse(self, secret: SecretFound) -> ProxyRefusal:
        return ProxyRefusal(
            f"an answer of {self._termination.host} held the value of the secret {secret}, which "
            "code does not get to see, and was cut off. Ask for what does not show it",
            502,
        )


def _reason_text(reason: Exception) -> str:
    return str(reason) or type(reason).__name__


class Terminations:
    """Terminations of all hosts with secrets. `trust` is the CA bundle for real hosts, as PEM.

    Kernels have to trust the `authority`.
    """

    def __init__(
        self, secrets: Sequence[Secret], trust: str, saved: Mapping[str, str] | None = None
    ) -> None:
        """Create the terminations, with the `saved` authority of an earlier proxy, if any.

        Raises ssl.SSLError if `trust` contains no valid certificate.
        """
        self.authority = Authority([each.host for each in secrets], saved)
        self._secrets = {
            host: [each for each in secrets if each.host == host]
            for host in {each.host for each in secrets}
        }
        self._forms = {host: SearchForms(found) for host, found in self._secrets.items()}
        self._trust = ssl.create_default_context(cadata=trust)

    def of(self, host: str) -> Termination | None:
        """Return the termination for `host`, or None if there is no secret for it."""
        if host not in self._secrets:
            return None
        serving = self.authority.context(host)
        return Termination(host, self._secrets[host], serving, self._trust, self._forms[host])
