"""Handles of a fleet, and the session that a call is about."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet.handles import check_node, new_handle, node_of, session_named
from kernel_mcp.sessions.directory import HANDLE


def test_a_handle_names_its_node_and_is_one_for_every_server() -> None:
    handle = new_handle("node-7")
    assert node_of(handle) == "node-7"
    assert HANDLE.fullmatch(handle)
    assert new_handle("node-7") != handle


@pytest.mark.parametrize("text", ["", "notes", "s-000000000000", "s-short.one", "s-000000000000."])
def test_other_words_name_no_node(text: str) -> None:
    assert node_of(text) == ""


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a.b", "a" * 33, "a b"])
def test_a_name_that_cannot_stand_in_a_handle_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        check_node(name)


@pytest.mark.parametrize(
    ("tool", "arguments", "about"),
    [
        ("execute", {"code": "1"}, ""),
        ("execute", {"code": "1", "session": "s-1"}, "s-1"),
        ("execute", {"session": 7}, ""),
        ("adopt", {"branch": "s-2"}, "s-2"),
        ("read_file", {"path": "a.txt", "session": "s-3"}, "s-3"),
        ("read_file", {"path": "kernel://s-4/cells/1", "session": "s-3"}, "s-4"),
        ("write_file", {"path": "kernel://s-4/cells/1", "session": "s-3"}, "s-3"),
        ("create_session", {"name": "x"}, None),
        ("run_script", {"script": "1"}, None),
    ],
)
def test_the_session_that_a_call_is_about(
    tool: str, arguments: dict[str, Any], about: str | None
) -> None:
    assert session_named(tool, arguments) == about
