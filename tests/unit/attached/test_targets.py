"""Agents may join the kernels that the operator names, and nothing that looks like them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.attached.targets import AttachTarget, read_connection, target_of
from kernel_mcp.config.attachments import Attachment, attachments
from kernel_mcp.errors import InputError, LaunchError

FILE = Attachment("/run/user/kernel-7.json")
SERVER = Attachment("http://localhost:8888/base", "secret")
NAMED = (FILE, SERVER)
GOOD: dict[str, Any] = {
    "ip": "127.0.0.1",
    "key": "k",
    "transport": "tcp",
    "signature_scheme": "hmac-sha256",
    "shell_port": 1,
    "iopub_port": 2,
    "stdin_port": 3,
    "control_port": 4,
    "hb_port": 5,
}


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ("/run/user/kernel-7.json", AttachTarget(FILE)),
        ("/run/user/../user/kernel-7.json", AttachTarget(FILE)),
        ("kernel-7.json", AttachTarget(FILE)),
        ("http://localhost:8888/base", AttachTarget(SERVER)),
        ("http://localhost:8888/base/lab", AttachTarget(SERVER)),
        ("http://localhost:8888/base/?token=guessed", AttachTarget(SERVER)),
        (
            "http://localhost:8888/base/lab/tree/a%20b/c.ipynb",
            AttachTarget(SERVER, notebook="a b/c.ipynb"),
        ),
        ("http://localhost:8888/base/notebooks/c.ipynb", AttachTarget(SERVER, notebook="c.ipynb")),
        ("http://localhost:8888/base/api/kernels/1-2", AttachTarget(SERVER, kernel="1-2")),
        ("http://localhost:8888/base/api/kernels/1-2/channels", AttachTarget(SERVER, kernel="1-2")),
    ],
)
def test_what_is_named_is_found(asked: str, place: AttachTarget) -> None:
    assert target_of(asked, NAMED) == place


@pytest.mark.parametrize(
    "asked",
    [
        "",
        "/run/user/kernel-8.json",
        "/tmp/kernel-7.json",
        "http://localhost:8888",
        "http://localhost:8888/based",
        "http://localhost:8888/base/../other",
        "http://localhost:8889/base",
        "https://localhost:8888/base",
        "http://localhost:8888@evil.example/base",
        "http://evil.example/?http://localhost:8888/base",
        "http://[bad",
        "ws://localhost:8888/base",
    ],
)
def test_what_is_not_named_is_refused(asked: str) -> None:
    with pytest.raises(InputError, match="not what the operator has named") as refused:
        target_of(asked, NAMED)
    assert "secret" not in str(refused.value)


def test_a_name_that_two_files_have_is_none_of_them() -> None:
    both = (FILE, Attachment("/run/other/kernel-7.json"))
    with pytest.raises(InputError, match=r"/run/user/kernel-7.*/run/other/kernel-7"):
        target_of("kernel-7.json", both)
    assert target_of("/run/other/kernel-7.json", both) == AttachTarget(both[1])


def test_without_anything_named_the_flag_is() -> None:
    with pytest.raises(InputError, match="--attach"):
        target_of("kernel-7.json", ())


@pytest.mark.parametrize("notebook", ["a b.ipynb", "ü/x#1?.ipynb"])
def test_the_words_for_a_place_lead_back_to_it(notebook: str) -> None:
    for place in (
        AttachTarget(FILE),
        AttachTarget(SERVER, kernel="1-2"),
        AttachTarget(SERVER, notebook=notebook),
    ):
        assert target_of(str(place), NAMED) == place


@pytest.mark.parametrize(
    ("text", "place", "token"),
    [
        ("http://localhost:8888/?token=abc", "http://localhost:8888", "abc"),
        ("http://localhost:8888/lab?token=abc", "http://localhost:8888", "abc"),
        ("https://hub.example/user/me/lab/tree/x.ipynb", "https://hub.example/user/me", ""),
        ("kernel-7.json", "kernel-7.json", ""),
    ],
)
def test_flags_are_read(text: str, place: str, token: str) -> None:
    assert attachments([text]) == (Attachment(place, token),)
    assert "abc" not in repr(attachments([text]))


@pytest.mark.parametrize(
    "text",
    ["", "ftp://x/", "http://", "http://user:pw@host/", "http://h/?x=1", "http://h:x/", "a\0b"],
)
def test_flags_that_name_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        attachments([text])


def test_a_connection_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "kernel.json"
    file.write_text(json.dumps({**GOOD, "ip": "0.0.0.0"}))
    found = read_connection(file)
    assert (found.host, found.key, found.ports) == ("127.0.0.1", "k", (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "change",
    [
        {"key": ""},
        {"key": None},
        {"shell_port": 0},
        {"shell_port": True},
        {"shell_port": "1"},
        {"iopub_port": 65536},
        {"signature_scheme": "hmac-md5"},
        {"transport": "inproc"},
        {"ip": 7},
        {"curve_publickey": "x"},
    ],
)
def test_a_connection_file_that_says_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    file = tmp_path / "kernel.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(LaunchError, match="cannot be used"):
        read_connection(file)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ip": "x"}', "[" * 10_000])
def test_a_connection_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kernel.json"
    file.write_text(text)
    with pytest.raises(LaunchError, match="cannot be used"):
        read_connection(file)


def test_nobody_waits_for_a_fifo_or_a_file_that_is_gone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(LaunchError, match="cannot be used"):
        read_connection(tmp_path / "fifo")
    with pytest.raises(LaunchError, match="There is no connection file"):
        read_connection(tmp_path / "gone")
