"""Grants of a server that a session did not have when it was saved."""

from __future__ import annotations

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.sessions.grants import grants_of, wider_grants

THEN = {"sandbox": ("bwrap",), "network": ("a.org",), "env": ()}


@pytest.mark.parametrize(
    ("now", "wider"),
    [
        ({}, []),
        ({"network": ()}, []),
        ({"network": ("a.org", "b.org")}, ["network b.org"]),
        ({"network": ("*",)}, ["network *"]),
        ({"env": ("TOKEN", "KEY")}, ["env TOKEN, KEY"]),
        ({"device": ("/dev/x",)}, ["device /dev/x"]),
        ({"sandbox": ("container",)}, []),
        ({"sandbox": ("landlock",)}, ["sandbox landlock"]),
        ({"sandbox": ("none",), "network": ("*",)}, ["sandbox none", "network *"]),
    ],
)
def test_what_is_open_now_and_was_not_is_wider(
    now: dict[str, tuple[str, ...]], wider: list[str]
) -> None:
    assert wider_grants({**THEN, **now}, THEN) == wider


def test_where_all_was_open_nothing_is_wider() -> None:
    assert wider_grants({"network": ("a.org",)}, {"network": ("*",)}) == []


def test_without_a_sandbox_the_network_is_open() -> None:
    settings = Settings(network=("a.org",))
    assert grants_of(settings, "bwrap")["network"] == ("a.org",)
    assert grants_of(settings, "none")["network"] == ("*",)
    assert grants_of(settings, "none")["sandbox"] == ("none",)
