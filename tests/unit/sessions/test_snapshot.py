"""Whatever a kernel says of its variables becomes what a tool result may hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.sessions.snapshot import MAX_DESCRIBED, descriptions
from kernel_mcp.tools.models import Variable
from tests.unit.json_values import JSON


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["name", "type", "preview", "length", "size", "shape", "x"]), JSON
        )
        | JSON,
        max_size=5,
    )
    | JSON
)
def test_any_json_becomes_variables(value: Any) -> None:
    for item in descriptions(value):
        Variable.model_validate(item, strict=True)


def test_long_lists_and_texts_are_cut() -> None:
    found = descriptions([{"name": "n" * 10_000, "preview": "a\nb\x1b[2J"}] * 1000)
    assert len(found) == MAX_DESCRIBED
    assert len(found[0]["name"]) <= 200
    assert "\n" not in found[0]["preview"]
    assert "\x1b" not in found[0]["preview"]


def test_sizes_that_cannot_be_are_left_out() -> None:
    (found,) = descriptions([{"name": "x", "size": -1, "length": 2**70, "shape": [1, -2]}])
    assert (found["size"], found["length"], found["shape"]) == (None, None, None)
