"""Names that a kernel reports are applied in order, whatever it sends."""

from __future__ import annotations

import pytest

from kernel_mcp.kernels import known_names
from kernel_mcp.kernels.known_names import NAME_CHARS, KnownNames


def test_new_names_follow_and_deleted_ones_go() -> None:
    names = KnownNames()
    names.apply([["a", "b"], []])
    names.apply([["c", "a"], ["b", "unknown"]])
    assert (list(names), names.more) == (["a", "c"], 0)
    copy = KnownNames(names)
    copy.add(["d"])
    assert list(names) == ["a", "c"]


def test_names_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_names, "MOST_NAMES", 2)
    names = KnownNames()
    names.add(["a", "b", "c", "d"])
    assert (list(names), names.more) == (["a", "b"], 2)
    names.apply([[], ["d"]])
    assert (list(names), names.more) == (["a", "b"], 1)


LONG = "x" * (NAME_CHARS + 1)


@pytest.mark.parametrize("sent", [None, "ab", [["a"]], [1, 2], [[1, None, LONG], {}]])
def test_malformed_changes_add_nothing(sent: object) -> None:
    names = KnownNames()
    names.apply(sent)
    assert (list(names), names.more) == ([], 0)
