"""Settings of a server on HTTP that contradict each other are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config.load import load
from kernel_mcp.config.serving import check_serving, is_loopback
from kernel_mcp.errors import ConfigError

HERE = "127.0.0.1:8000"


@pytest.mark.parametrize("flag", ["issuer", "no-auth", "trusted-proxy", "sse"])
def test_what_is_about_http_needs_it(flag: str, tmp_path: Path) -> None:
    value = {"no-auth": "true", "sse": "true", "trusted-proxy": "10.0.0.1"}
    given = value.get(flag, "https://notebook.example")
    with pytest.raises(ConfigError, match=f"--{flag}: .*Add --http"):
        check_serving(load({flag: given}, {}, tmp_path))


def test_the_file_of_tokens_can_be_named_for_the_command_that_writes_it(tmp_path: Path) -> None:
    check_serving(load({"tokens": "t", "public-url": "https://b.example"}, {}, tmp_path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"no-auth": "true", "tokens": "t"}, "leave one of them out"),
        ({"no-auth": "true", "issuer": "https://login.example"}, "leave one of them out"),
        ({"no-auth": "true", "http": "0.0.0.0:8000"}, "could run code here"),
        ({"no-auth": "true", "http": "192.0.2.1:8000"}, "could run code here"),
        ({"no-auth": "true", "http": "box.lan:8000"}, "could run code here"),
        ({"no-auth": "true", "mount": ["/srv"]}, "--mount: with --no-auth"),
        ({"no-auth": "true", "network": ["*"]}, "--network: with --no-auth"),
        ({"no-auth": "true", "env": ["A=b"]}, "--env: with --no-auth"),
        ({"no-auth": "true", "attach": ["http://localhost:8888"]}, "--attach: with --no-auth"),
        ({"no-auth": "true", "device": ["/dev/null"]}, "--device: with --no-auth"),
        ({"no-auth": "true", "secret": ["A@b.example"]}, "--secret: with --no-auth"),
        ({"tokens": "t", "sandbox": "none"}, "can read the files of all"),
        ({"issuer": "https://login.example", "sandbox": "none"}, "can read the files of all"),
        ({"issuer": "https://login.example", "http": "0.0.0.0:80"}, "--public-url"),
        ({"public-url": "ftp://notebook.example"}, "expected an address"),
        ({"public-url": "https://u:p@notebook.example"}, "nothing else"),
        ({"public-url": "https://notebook.example/?a=b"}, "nothing else"),
        ({"public-url": "https://notebook.example/mcp"}, "without /mcp"),
        ({"public-url": "https://notebook.example:many"}, "[Pp]ort"),
    ],
)
def test_contradictions_are_named(
    flags: dict[str, str | list[str]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_serving(load({"http": HERE, **flags}, {}, tmp_path))


@pytest.mark.parametrize(
    "flags",
    [
        {"no-auth": "true"},
        {"no-auth": "true", "http": "[::1]:8000"},
        {"no-auth": "true", "http": "localhost:8000", "sandbox": "none"},
        {"http": "0.0.0.0:8000"},
        {"http": "0.0.0.0:8000", "mount": ["/srv"]},
        {"tokens": "t", "issuer": "https://login.example"},
        {"issuer": "https://a.example", "http": "0.0.0.0:80", "public-url": "https://b.example/x"},
        {"sse": "true", "trusted-proxy": "10.0.0.0/8"},
    ],
)
def test_these_go_together(flags: dict[str, str | list[str]], tmp_path: Path) -> None:
    check_serving(load({"http": HERE, **flags}, {}, tmp_path))


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(each, False) for each in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "")],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, is_it: bool) -> None:
    assert is_loopback(host) is is_it
