"""Ids of tasks, which name a cell and which only the server can make."""

from __future__ import annotations

import pytest

from kernel_mcp.tools.task_ids import CellTask

KEY = b"k" * 32
TASK = CellTask("s-abcdefghijkl", "my.notes-2", 12, 1_790_000_000_000)


def test_an_id_names_its_cell_for_its_principal_and_key_alone() -> None:
    made = TASK.id(KEY, "alice")

    assert made.startswith("cell-12:s-abcdefghijkl:my.notes-2:")
    assert CellTask.of(made, KEY, "alice") == TASK
    assert CellTask.of(made, KEY, "bob") is None
    assert CellTask.of(made, b"j" * 32, "alice") is None


@pytest.mark.parametrize(
    "forge",
    [
        lambda made: made.replace("cell-12", "cell-13"),
        lambda made: made.replace("cell-12", "cell-012"),
        lambda made: made.replace("my.notes-2", "other"),
        lambda made: made.replace("abcdefghijkl", "abcdefghijkm"),
        lambda made: made[:-1],
        lambda made: made + "0",
        lambda made: made.upper(),
        lambda made: f"{made}:x",
        lambda made: "",
        lambda made: ":::::",
        lambda made: "cell-" + "9" * 10_000 + "::::",
        lambda made: "cell-1:s-abcdefghijkl::zz:0",
    ],
)
def test_a_changed_id_names_nothing(forge: object) -> None:
    assert callable(forge)
    assert CellTask.of(forge(TASK.id(KEY, "alice")), KEY, "alice") is None


def test_the_parts_of_an_id_cannot_move_between_its_fields() -> None:
    other = CellTask("s-abcdefghijkl", "my.notes-21", 2, TASK.created)
    assert other.id(KEY, "a").rpartition(":")[2] != TASK.id(KEY, "a").rpartition(":")[2]
