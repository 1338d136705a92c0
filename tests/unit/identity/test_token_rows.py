"""The rows of a tokens file: what they may say, and errors with the line."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import ConfigError
from kernel_mcp.identity import INSTALL, OPERATOR, RUN, digest
from kernel_mcp.identity.token_rows import MOST_BYTES, MOST_LINE, MOST_ROWS, Claim, TokenRow, parse
from kernel_mcp.units import GIB


def row(**more: Any) -> dict[str, Any]:
    """A row that is good without more."""
    return {"principal": "alice", "sha256": digest("a").hex(), **more}


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


def test_a_row_says_who_and_what_for() -> None:
    found = parse(
        lines(
            row(
                scopes=[RUN],
                quotas={"sessions": 4, "memory": "8G", "cpu": 1.5},
                doors=["network", "mount:/data"],
                added="2026-11-23T08:00:00Z",
            )
        ),
        "file",
    )
    assert found == (
        TokenRow(
            line=1,
            principal="alice",
            digest=digest("a"),
            scopes=frozenset({RUN}),
            quotas=Quotas(sessions=4, memory=8 * GIB, cpu=1.5),
            grants=("mount:/data", "network"),
            added="2026-11-23T08:00:00Z",
        ),
    )


def test_without_words_about_it_a_row_has_all_scopes_and_no_door() -> None:
    (found,) = parse(lines(row()), "file")
    assert found.scopes == {RUN, INSTALL}
    assert found.grants == ()
    assert found.quotas == Quotas()


def test_a_claim_needs_no_principal_and_empty_lines_count() -> None:
    found = parse(b"\n" + lines({"claim": "groups=a=b"}) + b"\n \n" + lines(row()), "file")
    assert [(each.line, each.principal) for each in found] == [(2, ""), (5, "alice")]
    assert found[0].claim == Claim("groups", "a=b")
    assert found[0].scopes == OPERATOR  # it takes nothing from those of the token


@pytest.mark.parametrize(
    ("claims", "holds"),
    [
        ({"groups": "x"}, True),
        ({"groups": ["y", "x"]}, True),
        ({"groups": "x y"}, False),
        ({"groups": {"x": 1}}, False),
        ({"groups": 1}, False),
        ({}, False),
    ],
)
def test_a_claim_is_held_as_text_or_in_a_list(claims: dict[str, Any], holds: bool) -> None:
    assert Claim("groups", "x").holds(claims) is holds


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (b"\xff", "not UTF-8"),
        (b'{"quotas": {"cpu": NaN}}', "not JSON: NaN"),
        (b'{"quotas": {"sessions": ' + b"9" * 5000 + b"}}", "a number is too large"),
        (b'{"principal": "a", "principal": "b"}', "the key 'principal' is there twice"),
        (b" " + b"x" * MOST_LINE, "longer than"),
        (json.dumps(row(quota={})).encode(), "there is no key 'quota'"),
        (json.dumps(row(claim="a=b")).encode(), "one of `sha256` and `claim`"),
        (b'{"principal": "alice"}', "one of `sha256` and `claim`"),
        (json.dumps(row(sha256="AB")).encode(), "64 hexadecimal digits"),
        (json.dumps(row(sha256=7)).encode(), "64 hexadecimal digits"),
        (json.dumps(row(principal="..")).encode(), "not dots alone"),
        (json.dumps(row(principal="a/b")).encode(), "a principal has a name of"),
        (json.dumps(row(principal="a\n")).encode(), "a principal has a name of"),
        (json.dumps(row(principal=None)).encode(), "a principal has a name of"),
        (json.dumps(row(principal="a@0123abcd")).encode(), "those of an issuer's subjects"),
        (json.dumps(row(scopes=["kernel:all"])).encode(), "'kernel:all' is no scope"),
        (json.dumps(row(scopes=RUN)).encode(), "`scopes`: expected a list"),
        (json.dumps(row(doors=["mounts"])).encode(), "'mounts' is no door"),
        (json.dumps(row(doors=["mount:/a\x1b"])).encode(), "is no door"),
        (json.dumps(row(doors=["mount:/\ud800"])).encode(), "is no door"),
        (json.dumps(row(quotas=[])).encode(), "`quotas`: expected an object"),
        (json.dumps(row(quotas={"session": 1})).encode(), "'session' is no quota"),
        (json.dumps(row(quotas={"sessions": -1})).encode(), "expected a whole number"),
        (b'{"quotas": {"cpu": 1e999}, "claim": "a=b"}', "`quotas`: expected a number"),
        (json.dumps(row(added=5)).encode(), "`added`: expected a time"),
        (json.dumps({"claim": "groups"}).encode(), "`claim`: expected NAME=VALUE"),
        (json.dumps({"claim": "=x"}).encode(), "`claim`: expected NAME=VALUE"),
        (json.dumps({"claim": ["a=b"]}).encode(), "`claim`: expected NAME=VALUE"),
    ],
    ids=range(30),
)
def test_an_error_names_file_and_line_and_says_what_is_expected(line: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(lines(row(principal="bob", sha256="0" * 64)) + line, "the/file")
    text = str(caught.value)
    assert text.startswith("the/file, line 2: ")
    assert words in text
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize("part", [b"[", b'{"a":'])
def test_no_depth_of_a_line_is_too_much(part: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(part * (MOST_LINE // len(part)), "the/file")
    # Python 3.13 reads to the end what earlier versions give up
    refusal = "(not a row: it is nested too deeply|not JSON: Expecting value at character [0-9]+)"
    assert re.search(f"^the/file, line 1: {refusal}", str(caught.value))


def test_rows_of_a_principal_agree() -> None:
    two = row(sha256=digest("b").hex())
    parse(lines(row(), two, row(principal="bob", quotas={"cells": 1}, sha256="0" * 64)), "file")
    for other in ({"quotas": {"cells": 1}}, {"doors": ["*"]}):
        with pytest.raises(ConfigError, match=r"file, line 2: .* of alice are others than in line"):
            parse(lines(row(), {**two, **other}), "file")


def test_one_token_has_one_row() -> None:
    with pytest.raises(ConfigError, match="line 2: it has the same `sha256` as line 1"):
        parse(lines(row(), row(principal="bob")), "file")


def test_a_file_and_its_rows_are_bounded() -> None:
    with pytest.raises(ConfigError, match="larger than the 4 MiB"):
        parse(b"\n" * (MOST_BYTES + 1), "file")
    many = b"".join(b'{"claim":"a=%d"}\n' % number for number in range(MOST_ROWS + 1))
    with pytest.raises(ConfigError, match="more than 10,000 rows"):
        parse(many, "file")


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_whatever_is_in_a_file_it_is_rows_or_one_error(content: bytes) -> None:
    with contextlib.suppress(ConfigError):
        parse(content, "file")
