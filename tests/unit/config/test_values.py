"""Reading single values: what is taken, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.config import values
from kernel_mcp.units import MIB


def test_memory_is_enough_for_a_kernel_or_unlimited() -> None:
    assert (values.memory("200M"), values.memory("0")) == (200 * MIB, 0)
    for given in ("2k", "15M", "0.001k"):
        with pytest.raises(ValueError, match="a kernel needs 16 MiB at least"):
            values.memory(given)


def test_processes_are_enough_for_a_kernel_or_unlimited() -> None:
    assert (values.processes("4"), values.processes(0)) == (4, 0)
    for given in ("1", 3):
        with pytest.raises(ValueError, match="a kernel needs 4 processes and threads at least"):
            values.processes(given)


def test_an_answer_has_room_for_a_thousand_characters() -> None:
    assert values.characters("1000") == 1000
    for given in ("999", 0):
        with pytest.raises(ValueError, match="1000 or more"):
            values.characters(given)


def test_a_choice_is_one_of_its_words_in_any_case() -> None:
    read = values.choice("auto", "bwrap", "none")
    assert read("BWRAP") == "bwrap"
    with pytest.raises(ValueError, match="expected auto, bwrap or none"):
        read("docker")


def test_a_path_is_not_empty() -> None:
    assert values.path("a/b") == Path("a/b")
    with pytest.raises(ValueError, match="expected a path"):
        values.path(" ")


@pytest.mark.parametrize("given", [True, 1, "1", "true", " Yes ", "on"])
def test_a_switch_is_on(given: object) -> None:
    assert values.switch(given) is True


@pytest.mark.parametrize("given", [False, 0, "0", "false", "No", "off"])
def test_a_switch_is_off(given: object) -> None:
    assert values.switch(given) is False


@pytest.mark.parametrize("given", ["", "maybe", 2, None, []])
def test_a_switch_is_nothing_else(given: object) -> None:
    with pytest.raises(ValueError, match="expected true or false"):
        values.switch(given)


@pytest.mark.parametrize("given", ["mirror.example", "ftp://x", "https://", 5, ""])
def test_an_index_is_an_address(given: object) -> None:
    with pytest.raises(ValueError, match="https://"):
        values.url(given)


def test_places_are_folders_or_addresses() -> None:
    assert values.places("wheels") == ("wheels",)
    assert values.places(["/a", " https://x/w "]) == ("/a", "https://x/w")
    for given in ("", [""], [5], 5, ["a\0b"]):
        with pytest.raises(ValueError, match="folder"):
            values.places(given)


def test_groups_are_a_list_with_the_first_among_them() -> None:
    read = values.some_of("core", "packages", "files", group="no.such.group")
    assert read(" Core, files,core") == ("core", "files")
    assert read(["core"]) == ("core",)
    with pytest.raises(ValueError, match="core has to be among them: core,files"):
        read("files")
    wrong: list[object] = ["core,branches", "", [], 1, None]
    for given in wrong:
        with pytest.raises(ValueError, match="expected core, packages or files"):
            read(given)
