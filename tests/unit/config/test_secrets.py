"""The values of `--secret`: what is taken, and what the refusal says."""

from __future__ import annotations

import re

import pytest

from kernel_mcp.config.secrets import HeaderSecret, header_secrets


def test_secrets_name_a_variable_a_host_and_a_header() -> None:
    assert header_secrets("KEY@Api.Example.com.") == (HeaderSecret("KEY", "api.example.com"),)
    assert header_secrets(["A@h.test:X-Key, B@h.test"]) == (
        HeaderSecret("A", "h.test", "X-Key"),
        HeaderSecret("B", "h.test", "Authorization"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("KEY", "NAME@HOST"),
        ("sk-12345@api.test", "the value itself is never given"),
        ("KEY@*.api.test", "one host"),
        ("KEY@10.0.0.1", "one host"),
        ("KEY@https://api.test", "name of a header"),
        ("KEY@api.test:8443:", "name of a header"),
        ("KEY@api.test:Host", "connection itself"),
        ("KEY@api.test:8443", "port with --network api.test:8443"),
        ("KEY@api.test:", "name of a header"),
    ],
)
def test_secrets_are_nothing_else(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        header_secrets(text)


@pytest.mark.parametrize("value", ["short", "with\nlines-of-text", "ünïcode-text", " blank-before"])
def test_values_of_secrets_that_no_header_holds_are_refused_and_not_told(value: str) -> None:
    with pytest.raises(ValueError, match="its value has") as refused:
        HeaderSecret("KEY", "api.test").with_value(value)
    assert value not in str(refused.value)
    assert "12345678" not in repr(HeaderSecret("KEY", "api.test").with_value("12345678"))
