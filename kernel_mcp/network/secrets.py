"""Secrets that code can use but not read: their placeholders, and the search of responses."""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
import secrets
import ssl
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from urllib.parse import quote

from kernel_mcp.config.secrets import HeaderSecret
from kernel_mcp.errors import ConfigError
from kernel_mcp.network.decoding import EscapeDecoder
from kernel_mcp.records import dataclass

PREFIX = "kmcp_"
"""Prefix of placeholders. No character of one is escaped in URLs, JSON or quotes."""
_SHOWN = bytes(range(0x20, 0x7F))
"""Bytes that values and their encoded forms consist of: visible ASCII and blank."""
_LONGEST = 12
"""Most characters of an encoded form per character of a value: `%26%2343%3B`, a newline."""
_LETTERS = string.ascii_letters + string.digits
_BASE64 = _LETTERS.encode() + b"+/-_="
_LEAST = 8
"""Fewest characters of a decoded value for it to be searched for."""
_LEAST_WRAPPED = 16
"""Fewest characters of a base64 line that may continue in the next one."""
_KEPT_IN_URLS = ("", "/", "*", "$&+=:@", "!'()*", "!'()*;,/?:@&=+$#", "!$%&'()*+,/:;=@[\\]|")
"""Characters that URL encoders leave as they are, beside letters, digits and `-._~`.

In this order: RFC 3986; Python; forms of WHATWG and Java, which escape `~`, too; paths of Go;
encodeURIComponent; encodeURI; paths of WHATWG.
"""
_ESCAPED_IN_JSON = ("", "<>&", "<>&'\"", "<>&'\"+`", "<>&'=")
"""Characters that JSON writers escape as `\\u0026`: none; Go and Rails; PHP; .NET; Gson."""
_QUOTES_IN_HTML = (
    *(("&quot;", "&#x27;"), ("&quot;", "&#39;"), ("&quot;", "&#039;"), ("&quot;", "&apos;")),
    *(("&#34;", "&#39;"), ("&quot;", "'")),
)
"""Escapes of `"` and `'` in HTML: Python, JavaScript, PHP, XML; Go and Jinja; attributes only."""
_HTML = frozenset("".join(_ESCAPED_IN_JSON))

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Secret:
    """A value for one header of requests to one host. Code sees only its `placeholder`.

    The value is visible ASCII, and is not part of the `repr`.
    """

    name: str
    host: str
    header: str
    value: str = field(repr=False)
    placeholder: str

    def to_json(self) -> list[str]:
        """Return the fields and the value, to be sent over the control socket of the proxy only."""
        return [self.name, self.host, self.header, self.value, self.placeholder]

    def fill(self, name: bytes, text: bytes) -> bytes:
        """Return the value of a header for the host, with the placeholder replaced.

        Only this secret's header is changed. Basic authentication is decoded and encoded again.
        """
        if name.lower() != self.header.lower().encode():
            return text
        scheme, blank, rest = text.partition(b" ")
        if scheme.lower() == b"basic":
            return scheme + blank + self._fill_basic(rest)
        return self._filled(text)

    def _filled(self, text: bytes) -> bytes:
        return text.replace(self.placeholder.encode(), self.value.encode())

    def _fill_basic(self, text: bytes) -> bytes:
        """Fill the base64 of user and password (RFC 7617); return other text unchanged."""
        try:
            plain = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            return text
        return base64.b64encode(self._filled(plain))


def placeholder(length: int, taken: Iterable[str] = ()) -> str:
    """Return a random placeholder of `length` characters that is not among `taken`.

    It is as long as the value, so that a Content-Length stays right.
    """
    while True:
        made = PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(length - len(PREFIX)))
        if made not in taken:
            return made


def forms(value: str) -> tuple[bytes, ...]:
    """Return common encodings of a value: plain, for URLs, JSON, HTML, and inside base64."""
    plain = value.encode()
    in_html = html.escape(value, quote=False)
    texts = {value, in_html}
    texts |= {in_html.replace('"', two).replace("'", one) for two, one in _QUOTES_IN_HTML}
    for kept in _KEPT_IN_URLS:
        quoted = quote(value, safe=kept)
        for each in (quoted, quoted.replace("~", "%7E")):
            texts |= {each, _lower_escapes(each), each.replace("%20", "+")}
    in_json = json.dumps(value)[1:-1]
    texts.add(in_json.replace("/", "\\/"))
    for escaped in _ESCAPED_IN_JSON if set(value) & _HTML else ("",):
        texts |= {_escaped(in_json, escaped, "\\u%04x"), _escaped(in_json, escaped, "\\u%04X")}
    return tuple(sorted({each.encode() for each in texts} | _in_base64(plain)))


def _in_base64(plain: bytes) -> set[bytes]:
    """Return the base64 of a value at each alignment, without characters that depend on context."""
    found: set[bytes] = set()
    for before in range(3):
        bits = 8 * (before + len(plain))
        encoded = base64.b64encode(bytes(before) + plain)
        # only characters that do not depend on the bytes before and after the value
        part = encoded[-(-8 * before // 6) : bits // 6]
        found |= {part, part.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


def _escaped(text: str, characters: str, form: str) -> str:
    if '"' in characters:
        text = text.replace('\\"', '"')
    return "".join(form % ord(each) if each in characters else each for each in text)


def _lower_escapes(text: str) -> str:
    first, *rest = text.split("%")
    return "%".join([first, *(each[:2].lower() + each[2:] for each in rest)])


def decoded_forms(value: str, decode: Callable[..., bytes]) -> set[bytes]:
    """Return the forms of a value in decoded responses: no escapes or blanks, and in base64."""
    texts = {value, value.replace(" ", "+")}
    plain = {decode(each.encode(), mail=mail) for each in texts for mail in (False, True)}
    return {each for each in plain if len(each) >= _LEAST} | _in_base64(value.encode())


class SecretFound(Exception):
    """A response contains the value of a secret; the message is the name of the secret."""


class SearchForms:
    """Encoded forms of secrets that responses are searched for."""

    def __init__(self, secrets: Iterable[Secret]) -> None:
        secrets = tuple(secrets)
        self.most = max((_LONGEST * len(each.value) - 1 for each in secrets), default=0)
        """Most bytes that a `StreamSearch` holds back. It depends on the length of values alone."""
        self._forms = [(each.name, form) for each in secrets for form in forms(each.value)]
        self._decode = EscapeDecoder().decoded
        self._decoded = [
            (each.name, form)
            for each in secrets
            for form in decoded_forms(each.value, self._decode)
        ]

    def search(self, text: bytes) -> None:
        """Raise SecretFound if `text` contains a secret in any form."""
        found = (name for name, form in self._forms if form in text)
        if (name := next(found, None)) is not None:
            raise SecretFound(name)
        for plain in {self._decode(text), self._decode(text, mail=True)}:
            for name, form in self._decoded:
                if form in plain:
                    raise SecretFound(name)


class StreamSearch:
    """Streaming search of one response; its tail is held back until more arrives.

    The amount held back reveals nothing about a value except its length. Otherwise TLS record sizes
    or timing would show if the last bytes are the beginning of a value, and code may have chosen
    those bytes. Everything since the last character that no value contains, such as a newline, is
    held back. The bound is the longest form of the longest value. Lines that continue in the next
    one, as those of base64, are held back, too. Both methods raise SecretFound.
    """

    def __init__(self, forms: SearchForms) -> None:
        self._forms = forms
        self._before = b""
        """Bytes passed on last: a form may begin in them."""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Search the next piece of the response; return what can be passed on now."""
        text = self._held + data
        try:
            self._forms.search(self._before + text)
        except SecretFound:
            self._held = b""
            raise
        passed = len(text) - min(_unfinished(text), self._forms.most)
        self._held = text[passed:]
        most = self._forms.most
        self._before = (self._before + text[:passed])[-most:] if most else b""
        return text[:passed]

    def end(self) -> bytes:
        """Return what was held back, when the response has ended."""
        held, self._held = self._held, b""
        return held


def _unfinished(text: bytes) -> int:
    """Return how many bytes at the end of `text` may be the beginning of a form."""
    start = len(text.rstrip(_SHOWN))
    while start and text[start - 1 : start] == b"\n":
        line_end = start - 2 if text[start - 2 : start - 1] == b"\r" else start - 1
        line = text[text.rfind(b"\n", 0, line_end) + 1 : line_end]
        wrapped = len(line) >= _LEAST_WRAPPED and not line.strip(_BASE64)
        if not (wrapped or line.endswith(b"=")):
            break
        start = line_end - len(line)
    return len(text) - start


_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Paths of the system's CA bundle on Debian, Fedora, SUSE and Alpine."""
_TRUSTING = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "PIP_CERT"),
    *("GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
"""Environment variables that name the CA bundle of programs."""
_CERTIFICATE_BYTES, _HOST_BYTES = 2048, 350
"""Upper bounds on the PEM of the proxy's authority: without hosts, and for each host."""
_CERTIFI = ("lib", "python3*", "site-packages", "certifi", "cacert.pem")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def authorities(environ: Mapping[str, str]) -> str:
    """Return the CA certificates of this machine, or those of SSL_CERT_FILE, as PEM.

    Raises ConfigError if there are none.
    """
    usual = ssl.get_default_verify_paths().cafile
    named = environ.get("SSL_CERT_FILE")
    for name in [named] if named else [usual, *_BUNDLES]:
        try:
            found = _CERTIFICATE.findall(Path(name or "").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if found:
            return "\n".join([*found, ""])
    raise ConfigError(
        f"--secret: there are no certificates in {named or 'the usual places'} to verify hosts "
        "with; install ca-certificates, or name a file with SSL_CERT_FILE"
    )


class Vault:
    """The secrets of a server, with the CA bundle and environment variables of its kernels.

    There is one placeholder for each name and server, not for each kernel: variables that hold one
    stay valid after a kernel was replaced. A placeholder alone gives no access.
    """

    def __init__(
        self,
        given: Sequence[HeaderSecret] = (),
        folder: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Write the CA bundle that kernels see into `folder`, a private one. Raises ConfigError."""
        held: dict[str, str] = {}
        for each in given:
            if each.name not in held:
                held[each.name] = placeholder(len(each.value), held.values())
        self.secrets = tuple(
            Secret(each.name, each.host, each.header, each.value, held[each.name]) for each in given
        )
        self.bundle = folder / "authorities.pem"
        self.trust = authorities(environ or {}) if given else ""
        if given:
            self.bundle.write_text(self.trust, encoding="ascii")
            self.bundle.chmod(0o644)
            self.add("")

    def __bool__(self) -> bool:
        return bool(self.secrets)

    def add(self, certificate: str) -> None:
        """Write the proxy's CA certificate into the bundle that kernels trust. Raises OSError.

        The file is changed in place, as running kernels have it mounted. The other certificates are
        not rewritten and the length stays the same, so a concurrent reader always finds them.
        """
        with open(os.open(self.bundle, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as file:
            os.pwrite(
                file.fileno(),
                certificate.ljust(self.certificate_bytes, "\n").encode(),
                len(self.trust),
            )

    @property
    def certificate_bytes(self) -> int:
        """Bytes reserved in the bundle for the proxy's certificate."""
        return _CERTIFICATE_BYTES + _HOST_BYTES * len({each.host for each in self.secrets})

    @property
    def visible_paths(self) -> tuple[Path, ...]:
        """Host paths that kernels have to see: the CA bundle; empty without secrets."""
        return (self.bundle,) if self else ()

    def replaced(self, folders: Iterable[Path]) -> tuple[tuple[Path, Path], ...]:
        """Return pairs of the CA bundle and a `cacert.pem` of certifi that it replaces.

        `folders` are environments or parts of them, perhaps nested: each file is returned once,
        and none that a symlink leads to.
        """
        found = (
            place
            for folder in folders
            for start in range(len(_CERTIFI) - 1)
            for place in folder.glob("/".join(_CERTIFI[start:]))
            if place.resolve() == folder.resolve() / place.relative_to(folder)
        )
        return tuple(
            (bundle, place) for bundle in self.visible_paths for place in dict.fromkeys(found)
        )

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for kernels: placeholders, and paths of the CA bundle."""
        found = dict.fromkeys(_TRUSTING, str(self.bundle)) if self else {}
        return {**found, **{each.name: each.placeholder for each in self.secrets}}

    def descriptions(self, reached: Callable[[str], bool]) -> list[str]:
        """Describe the placeholders of hosts for which `reached` is True, one text a secret."""
        return [
            f"os.environ[{each.name!r}] is a placeholder for a secret, put into {each.header} of "
            f"requests to https://{each.host}"
            for each in self.secrets
            if reached(each.host)
        ]
