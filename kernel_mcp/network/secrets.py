"""Values that code may use and never read: placeholders of theirs, and the search in replies."""

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

from kernel_mcp.config.values import HeaderSecret
from kernel_mcp.errors import ConfigError
from kernel_mcp.network.decoding import Decoder
from kernel_mcp.records import dataclass

PREFIX = "kmcp_"
"""What all placeholders begin with; nothing in them is changed by URLs, JSON or quotes."""
_SHOWN = bytes(range(0x20, 0x7F))
"""What values and all forms of them consist of."""
_LONGEST = 12
"""Characters of a form for one of its value: `%26%2343%3B`, and an end of a line."""
_LETTERS = string.ascii_letters + string.digits
_BASE64 = _LETTERS.encode() + b"+/-_="
_LEAST = 8
"""Characters of a value without its escapes that is looked for."""
_LEAST_WRAPPED = 16
"""Characters of a line of base64 that goes on in the next one."""
_KEPT_IN_URLS = ("", "/", "*", "$&+=:@", "!'()*", "!'()*;,/?:@&=+$#", "!$%&'()*+,/:;=@[\\]|")
"""Beside letters, digits and `-._~`: RFC 3986, Python, forms of WHATWG and Java (which escape `~`,
too), paths of Go, encodeURIComponent, encodeURI, and paths of WHATWG.
"""
_ESCAPED_IN_JSON = ("", "<>&", "<>&'\"", "<>&'\"+`", "<>&'=")
"""As `\\u0026`, by who writes JSON for HTML: none, Go and Rails, PHP, .NET, Gson."""
_QUOTES_IN_HTML = (
    *(("&quot;", "&#x27;"), ("&quot;", "&#39;"), ("&quot;", "&#039;"), ("&quot;", "&apos;")),
    *(("&#34;", "&#39;"), ("&quot;", "'")),
)
"""Of Python, JavaScript, PHP, XML; of Go and Jinja; of attributes alone."""
_HTML = frozenset("".join(_ESCAPED_IN_JSON))

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Secret:
    """One value for one header of requests to one host; code knows its `placeholder`.

    The value is text of visible ASCII, and stays out of what is shown of this.
    """

    name: str
    host: str
    header: str
    value: str = field(repr=False)
    placeholder: str

    def to_json(self) -> list[str]:
        """For the proxy, by its own socket and nothing else."""
        return [self.name, self.host, self.header, self.value, self.placeholder]

    def fill(self, name: bytes, text: bytes) -> bytes:
        """The content of a header as the host gets it: as it was, except for this one's header."""
        if name.lower() != self.header.lower().encode():
            return text
        scheme, blank, rest = text.partition(b" ")
        if scheme.lower() == b"basic":
            return scheme + blank + self._fill_basic(rest)
        return self._filled(text)

    def _filled(self, text: bytes) -> bytes:
        return text.replace(self.placeholder.encode(), self.value.encode())

    def _fill_basic(self, text: bytes) -> bytes:
        """User and password, as base64 (RFC 7617)."""
        try:
            plain = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            return text
        return base64.b64encode(self._filled(plain))


def placeholder(length: int, taken: Iterable[str] = ()) -> str:
    """One of that many characters, as Content-Length may count it; none of `taken`."""
    while True:
        made = PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(length - len(PREFIX)))
        if made not in taken:
            return made


def forms(value: str) -> tuple[bytes, ...]:
    """What hosts commonly make of a value: literal, for URLs, JSON, HTML, in base64 of any text."""
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
    """Base64 of a value that has any text before it and behind it."""
    found: set[bytes] = set()
    for before in range(3):
        bits = 8 * (before + len(plain))
        encoded = base64.b64encode(bytes(before) + plain)
        # whole characters only: those at both ends depend on what is next to it
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
    """Return a value as decoded replies hold it: without escapes and blanks, and in base64."""
    texts = {value, value.replace(" ", "+")}
    plain = {decode(each.encode(), mail=mail) for each in texts for mail in (False, True)}
    return {each for each in plain if len(each) >= _LEAST} | _in_base64(value.encode())


class Found(Exception):
    """A reply held what is told to nobody; the text is the name of the secret."""


class Sought:
    """The forms of secrets that replies are searched for; `most` is what a `Scan` holds back."""

    def __init__(self, found: Iterable[Secret]) -> None:
        secrets = tuple(found)
        self.most = max((_LONGEST * len(each.value) - 1 for each in secrets), default=0)
        """Bytes, by the length of values alone."""
        self._forms = [(each.name, form) for each in secrets for form in forms(each.value)]
        self._decode = Decoder().decoded
        self._decoded = [
            (each.name, form)
            for each in secrets
            for form in decoded_forms(each.value, self._decode)
        ]

    def search(self, text: bytes) -> None:
        """Raise Found for a text that holds one."""
        found = (name for name, form in self._forms if form in text)
        if (name := next(found, None)) is not None:
            raise Found(name)
        for plain in {self._decode(text), self._decode(text, mail=True)}:
            for name, form in self._decoded:
                if form in plain:
                    raise Found(name)


class Scan:
    """Searches one reply as it comes; the end of it is held back until the reply goes on.

    How much is held back tells nothing of a value but its length: what a client sees of it, by
    the sizes of TLS records or by time, would otherwise say whether the host's last bytes, which
    code may have put there, are the beginning of one. It is all since the last character that no
    value has, as one that ends a line, and no more than any form of the longest value. Lines that
    go on in the next one, as those of base64, are held back, too.
    `feed` returns what can be passed on. Both methods raise Found.
    """

    def __init__(self, sought: Sought) -> None:
        self._sought = sought
        self._before = b""
        """Bytes passed on last, as forms may begin there."""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece of the reply."""
        text = self._held + data
        try:
            self._sought.search(self._before + text)
        except Found:
            self._held = b""
            raise
        passed = len(text) - min(_unfinished(text), self._sought.most)
        self._held = text[passed:]
        most = self._sought.most
        self._before = (self._before + text[:passed])[-most:] if most else b""
        return text[:passed]

    def end(self) -> bytes:
        """What was held back of a reply that has ended."""
        held, self._held = self._held, b""
        return held


def _unfinished(text: bytes) -> int:
    """How many characters at the end of a text may go on in what follows it."""
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
"""Where Debian, Fedora, SUSE and Alpine have the authorities that everyone trusts."""
_TRUSTING = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "PIP_CERT"),
    *("GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"),
)
"""Variables by which programs find the authorities that they trust."""
_CERTIFICATE_BYTES, _HOST_BYTES = 2048, 350
"""Of the proxy's authority as PEM, and of each host that it is for, at most."""
_CERTIFI = ("lib", "python3*", "site-packages", "certifi", "cacert.pem")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")


def authorities(environ: Mapping[str, str]) -> str:
    """The certificates that this machine trusts, or that the operator names with SSL_CERT_FILE.

    Raises ConfigError where there are none.
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
    """The secrets of a server: what its proxy gets, what kernels find, and whom they trust.

    One placeholder for each name and server, not for each kernel: variables that hold one work on
    after a kernel was replaced, and it opens nothing to whoever knows it.
    """

    def __init__(
        self,
        given: Sequence[HeaderSecret] = (),
        folder: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`folder` is one of the server's own, for what kernels are shown. Raises ConfigError."""
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
        """Have kernels trust the proxy's authority besides. Raises OSError.

        In its place, as running kernels have that file mounted, and so that who reads it meanwhile
        finds all others: these are not written again, and its length stays.
        """
        with open(os.open(self.bundle, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as file:
            os.pwrite(file.fileno(), certificate.ljust(self.room, "\n").encode(), len(self.trust))

    @property
    def room(self) -> int:
        """Bytes of the proxy's certificate at most."""
        return _CERTIFICATE_BYTES + _HOST_BYTES * len({each.host for each in self.secrets})

    @property
    def shown(self) -> tuple[Path, ...]:
        """What kernels have to see of the host."""
        return (self.bundle,) if self else ()

    def replaced(self, folders: Iterable[Path]) -> tuple[tuple[Path, Path], ...]:
        """The list of certifi in environments, or in parts of them, which many programs trust.

        Each once, as folders may lie in one another, and none that a link leads to.
        """
        found = (
            place
            for folder in folders
            for start in range(len(_CERTIFI) - 1)
            for place in folder.glob("/".join(_CERTIFI[start:]))
            if place.resolve() == folder.resolve() / place.relative_to(folder)
        )
        return tuple((bundle, place) for bundle in self.shown for place in dict.fromkeys(found))

    @property
    def variables(self) -> dict[str, str]:
        """What code finds in its environment."""
        found = dict.fromkeys(_TRUSTING, str(self.bundle)) if self else {}
        return {**found, **{each.name: each.placeholder for each in self.secrets}}

    def words(self, reached: Callable[[str], bool]) -> list[str]:
        """For people and models: of the hosts that are reached."""
        return [
            f"os.environ[{each.name!r}] is a placeholder for a secret, put into {each.header} of "
            f"requests to https://{each.host}"
            for each in self.secrets
            if reached(each.host)
        ]
