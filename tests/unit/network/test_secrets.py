"""Placeholders, the header that is filled, and the search in replies."""

from __future__ import annotations

import base64
import contextlib
import html
import itertools
import json
import quopri
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_mcp.config.secrets import HeaderSecret
from kernel_mcp.errors import ConfigError
from kernel_mcp.network.authority import Authority
from kernel_mcp.network.secrets import (
    PREFIX,
    SearchForms,
    Secret,
    SecretFound,
    StreamSearch,
    Vault,
    authorities,
    placeholder,
)

VALUE = 's3cr/et+v"al&ue\\='
SECRET = Secret("TOKEN", "api.test", "Authorization", VALUE, placeholder(len(VALUE)))
HELD = SECRET.placeholder.encode()


def tokens(length: int) -> st.SearchStrategy[str]:
    return st.text(
        st.characters(min_codepoint=33, max_codepoint=126), min_size=length, max_size=length
    )


values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=60)


def test_placeholders_are_as_long_as_values_and_all_different() -> None:
    made = {placeholder(20) for _ in range(50)}
    assert len(made) == 50
    assert {len(each) for each in made} == {20}
    assert all(each.startswith(PREFIX) and each == quote_plus(each) for each in made)


def test_values_are_not_shown() -> None:
    assert VALUE not in repr(SECRET)


@pytest.mark.parametrize("name", [b"authorization", b"Authorization"])
def test_the_header_is_filled_as_bearer_and_as_a_part(name: bytes) -> None:
    assert SECRET.fill(name, b"Bearer " + HELD) == b"Bearer " + VALUE.encode()
    assert SECRET.fill(name, b"key=" + HELD + b";") == b"key=" + VALUE.encode() + b";"


def test_user_and_password_are_filled_inside_base64() -> None:
    sent = b"Basic " + base64.b64encode(b"user:" + HELD)
    assert SECRET.fill(b"Authorization", sent) == b"Basic " + base64.b64encode(
        b"user:" + VALUE.encode()
    )
    for other in (b"Basic " + base64.b64encode(b"user:password"), b"Basic not base64!", b"Basic"):
        assert SECRET.fill(b"Authorization", other) == other


def test_other_headers_keep_the_placeholder() -> None:
    for name in (b"x-authorization", b"cookie", b"host"):
        assert SECRET.fill(name, HELD) == HELD


def scanned(pieces: Sequence[bytes], value: str) -> bytes:
    secret = replace(SECRET, value=value)
    scan = StreamSearch(SearchForms([secret]))
    return b"".join([*(scan.feed(piece) for piece in pieces), scan.end()])


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(marks)]


def javascript(value: str, kept: str) -> bytes:
    return quote(value, safe=kept).encode()


FORMS = [
    lambda value, *_: value.encode(),
    lambda value, *_: quote(value).encode(),
    lambda value, *_: quote_plus(value).encode(),
    lambda value, *_: json.dumps(value).encode(),
    lambda value, *_: javascript(value, "-_.!~*'()"),
    lambda value, *_: javascript(value, "-_.!~*'();,/?:@&=+$#"),
    lambda value, *_: quote(value, safe="*").replace("~", "%7E").encode(),
    lambda value, *_: (
        json.dumps(value)
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .encode()
    ),
    lambda value, *_: json.dumps(value).replace("/", "\\/").encode(),
    lambda value, *_: html.escape(value).encode(),
    lambda value, *_: (
        html.escape(value).replace("&quot;", "&#34;").replace("&#x27;", "&#39;").encode()
    ),
    lambda value, before, after: base64.b64encode(before + value.encode() + after),
    lambda value, before, after: base64.urlsafe_b64encode(before + value.encode() + after),
]
text = st.binary(max_size=20)


@given(value=values, before=text, after=text, places=st.lists(st.integers(0, 1000), max_size=30))
@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_a_value_passes_however_the_reply_is_cut(
    form: Callable[[str, bytes, bytes], bytes],
    value: str,
    before: bytes,
    after: bytes,
    places: list[int],
) -> None:
    data = before + form(value, before, after) + after
    with pytest.raises(SecretFound, match="TOKEN"):
        scanned(cut(data, places), value)


def each(form: str) -> Callable[[str], str]:
    """Escapes every character of a value but letters and digits."""
    return lambda value: "".join(
        char if char.isalnum() else form.format(ord(char), hex=f"{ord(char):02x}") for char in value
    )


def mixed(value: str) -> str:
    """Escapes in both cases and several ways, one after the other."""
    ways = "%{0:02x}", "%{0:02X}", "&#{0};", "&#x{0:X};", "\\u{0:04x}", "\\x{0:02X}", "\\u{{{0:x}}}"
    return "".join(ways[at % len(ways)].format(ord(char)) for at, char in enumerate(value))


def wrapped(text: bytes, length: int, end: bytes) -> bytes:
    return end.join(text[at : at + length] for at in range(0, len(text), length))


ENCODED: dict[str, Callable[[str], bytes]] = {
    "decimal entities": lambda value: each("&#{0};")(value).encode(),
    "hexadecimal entities": lambda value: each("&#X{0:x};")(value).encode(),
    "entities with zeros": lambda value: each("&#x0000{0:X};")(value).encode(),
    "named entities": lambda value: (
        value.replace("&", "&amp;")
        .replace("+", "&plus;")
        .replace("/", "&sol;")
        .replace("=", "&equals;")
        .encode()
    ),
    "escapes of JavaScript": lambda value: each("\\u{0:04X}")(value).encode(),
    "short ones": lambda value: each("\\x{0:02x}")(value).encode(),
    "code points": lambda value: each("\\u{{{0:x}}}")(value).encode(),
    "code points of Python and C": lambda value: each("\\U{0:08x}")(value).encode(),
    "octal ones": lambda value: each("\\{0:03o}")(value).encode(),
    "all escaped": lambda value: "".join(f"\\u{ord(char):04x}" for char in value).encode(),
    "in several ways": lambda value: mixed(value).encode(),
    "JSON in JSON": lambda value: json.dumps(json.dumps(json.dumps(value))).encode(),
    "percent twice": lambda value: quote(quote(value, safe=""), safe="").encode(),
    "entities in JSON": lambda value: json.dumps(each("&#{0};")(value)).encode(),
    "entities of URLs": lambda value: html.escape(quote(value, safe="")).encode(),
    "percent of Unicode": lambda value: each("%u{0:04x}")(value).encode(),
    "mail": lambda value: quopri.encodestring(value.encode()),
    "mail of all": lambda value: wrapped(each("={0:02X}")(value).encode(), 30, b"=\r\n"),
    "base64 in lines": lambda value: base64.encodebytes(b"x" * 50 + value.encode()),
    "base64 in short lines": lambda value: wrapped(
        base64.b64encode(b"xy" + value.encode()), 20, b"\r\n"
    ),
    "base64 in JSON": lambda value: json.dumps(
        base64.encodebytes(b"x" * 51 + value.encode()).decode()
    ).encode(),
    "base64 in a URL": lambda value: quote(base64.b64encode(value.encode()), safe="").encode(),
    "base64 in HTML": lambda value: (
        base64.b64encode(value.encode()).replace(b"+", b"&#43;").replace(b"/", b"&#x2F;")
    ),
}
TOKENS = st.text(st.sampled_from(string.ascii_letters + string.digits + "+/=-_.&"), min_size=12)


@pytest.mark.parametrize("form", ENCODED)
@settings(max_examples=30)
@given(value=TOKENS, places=st.lists(st.integers(0, 1000), max_size=20))
def test_no_escapes_and_no_ends_of_lines_hide_a_value(
    form: str, value: str, places: list[int]
) -> None:
    data = b'{"a": "' + ENCODED[form](value) + b'"}\n'
    with pytest.raises(SecretFound, match="TOKEN"):
        scanned(cut(data, places), value)


@pytest.mark.parametrize(
    "lines",
    [
        base64.encodebytes(b"s3cr3t+/token=" * 5),
        wrapped(quote("s3cr3t+/token=" * 5).replace("%", "=").encode(), 75, b"=\n"),
    ],
)
def test_a_value_is_held_back_though_lines_end_within_it(lines: bytes) -> None:
    scan = StreamSearch(SearchForms([replace(SECRET, value="s3cr3t+/token=" * 5)]))
    first, second = lines.split(b"\n", 1)
    assert scan.feed(first + b"\n") == b""
    with pytest.raises(SecretFound):
        scan.feed(second)


def test_a_value_that_only_escapes_is_looked_for_as_it_is() -> None:
    for value in ("\\" * 16, "%41" * 4, "&#65;" * 3, "=41" * 4):
        assert scanned([b"A\\A AA \\\\ AAAA"], value) == b"A\\A AA \\\\ AAAA"
        with pytest.raises(SecretFound):
            scanned([value.encode()], value)


@given(
    value=values, data=st.binary(max_size=200), places=st.lists(st.integers(0, 300), max_size=20)
)
def test_other_replies_pass_unchanged(value: str, data: bytes, places: list[int]) -> None:
    assert scanned(cut(data, places), value) == data


@given(
    values=st.integers(8, 60).flatmap(lambda n: st.lists(tokens(n), min_size=2, max_size=2)),
    data=st.lists(st.binary(max_size=40), max_size=8),
    begun=st.integers(0, 59),
)
def test_what_is_held_back_tells_nothing_of_the_value(
    values: list[str], data: list[bytes], begun: int
) -> None:
    """Code may have the host send the beginning of any guess, and see when it gets what."""
    own, other = (replace(SECRET, value=value) for value in values)
    guess = own.value[: min(begun, len(own.value) - 1)].encode()
    passed = []
    for secret in (own, other):
        scan = StreamSearch(SearchForms([secret]))
        with contextlib.suppress(SecretFound):
            passed.append([scan.feed(piece) for piece in (*data, guess, b"\n", guess)])
    assert passed[1:] == passed[:-1]


@given(value=values, end=st.integers(1, 59), places=st.lists(st.integers(0, 99), max_size=9))
def test_the_beginning_of_a_value_is_held_back_until_the_reply_goes_on(
    value: str, end: int, places: list[int]
) -> None:
    secret = replace(SECRET, value=value)
    scan = StreamSearch(SearchForms([secret]))
    begun = value[: min(end, len(value) - 1)].encode()
    passed = b"".join(scan.feed(piece) for piece in cut(b"\n\n" + begun, places))
    assert passed == b"\n\n"
    assert scan.end() == begun


def test_events_that_end_a_line_are_not_held_back() -> None:
    assert StreamSearch(SearchForms([SECRET])).feed(b"data: 1\n\n") == b"data: 1\n\n"


def test_a_vault_has_one_placeholder_for_each_name_and_shows_no_value(tmp_path: Path) -> None:
    given = [
        HeaderSecret("A", "one.test", value="value-of-a"),
        HeaderSecret("A", "two.test", "X-Key", "value-of-a"),
        HeaderSecret("B", "one.test", value="value-of-b"),
    ]
    vault = Vault(given, tmp_path)
    first, second, third = vault.secrets
    assert first.placeholder == second.placeholder != third.placeholder
    found = vault.variables
    assert (found["A"], found["B"]) == (first.placeholder, third.placeholder)
    assert {found[each] for each in ("SSL_CERT_FILE", "GIT_SSL_CAINFO")} == {str(vault.bundle)}
    (words,) = vault.descriptions(lambda host: host == "two.test")
    assert words.startswith("os.environ['A'] is a placeholder for a secret")
    assert words.endswith("put into X-Key of requests to https://two.test")
    assert "value-of" not in f"{found}{vault.secrets}{vault.bundle.read_text()}"


def test_kernels_trust_this_machines_authorities_and_the_proxys(tmp_path: Path) -> None:
    own, later = Authority(["api.test"]).certificate, Authority(["api.test"]).certificate
    vault = Vault([HeaderSecret("A", "api.test", value="value-of-a")], tmp_path)
    vault.add(own)
    before = vault.bundle.stat().st_ino, vault.bundle.stat().st_size
    vault.add(later)
    assert vault.bundle.read_text().rstrip("\n") == (authorities({}) + later).rstrip("\n")
    # it is seen where it is mounted, and whoever reads it meanwhile finds all others
    assert (vault.bundle.stat().st_ino, vault.bundle.stat().st_size) == before
    (tmp_path / "lib/python3.12/site-packages/certifi").mkdir(parents=True)
    place = tmp_path / "lib/python3.12/site-packages/certifi/cacert.pem"
    place.touch()
    parts = [tmp_path / "lib", place.parents[1], place, tmp_path]
    assert vault.replaced([tmp_path, *parts, Path("/nowhere")]) == ((vault.bundle, place),)
    place.unlink()
    place.symlink_to("/etc/hostname")
    assert vault.replaced([tmp_path, *parts]) == ()


def test_the_operator_names_other_authorities(tmp_path: Path) -> None:
    file = tmp_path / "own.pem"
    file.write_text(f"Größe: 1\n{Authority(['api.test']).certificate}# end", encoding="utf-8")
    environ = {"SSL_CERT_FILE": str(file)}
    assert authorities(environ) == file.read_text(encoding="utf-8")[9:].removesuffix("# end")
    with pytest.raises(ConfigError, match="no certificates in /nowhere"):
        authorities({"SSL_CERT_FILE": "/nowhere"})


def test_without_secrets_kernels_find_and_see_nothing() -> None:
    vault = Vault()
    assert not vault
    assert (vault.variables, vault.visible_paths, vault.replaced([Path("/")])) == ({}, (), ())
