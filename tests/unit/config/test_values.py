"""Reading single values: what is taken, and what the refusal says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from kernel_mcp.config import values
from kernel_mcp.config.values import GIB, KIB, MIB, HeaderSecret, header_secrets


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("30", 30.0),
        ("30s", 30.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        (" 1D ", 86400.0),
        (12, 12.0),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_a_number_with_an_optional_unit(given: object, seconds: float) -> None:
    assert values.duration(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "0", "-5", "5 minutes", "1h30m", "nan", "inf", True, -1, math.inf, None, [5]]
)
def test_a_duration_above_zero_is_demanded(given: object) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        values.duration(given)


def test_a_limit_of_zero_seconds_lifts_it() -> None:
    assert values.limit_duration("0") == 0


def test_an_idle_time_can_be_never() -> None:
    assert values.idle_duration("Never") == math.inf
    with pytest.raises(ValueError, match="or never"):
        values.idle_duration("0")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("512M", 512 * MIB),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("2gb", 2 * GIB),
        ("1.5k", 1536),
        ("64 K", 64 * KIB),
        ("4000000b", 4_000_000),
        ("0", 0),
        (4 * MIB, 4 * MIB),
        (str(MIB), MIB),
    ],
)
def test_a_size_counts_in_powers_of_1024(given: object, size: int) -> None:
    assert values.size(given) == size


@pytest.mark.parametrize("given", ["", "-1", "2X", "G", "1e9", 1.5, True, -1, None])
def test_a_size_that_is_none_says_what_one_looks_like(given: object) -> None:
    with pytest.raises(ValueError, match="512M or 2G"):
        values.size(given)


@pytest.mark.parametrize(
    ("given", "meant"), [(2, "2G"), ("0.5", "0.5G"), (" 200", "200M"), ("2b", "2G")]
)
def test_a_number_that_lacks_its_unit_is_no_size(given: object, meant: str) -> None:
    with pytest.raises(ValueError, match=f"write {meant} if you mean that"):
        values.size(given)


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


def test_a_share_is_of_processors_or_with_a_unit_of_their_time() -> None:
    for text in (1.5, "1.5", " 1.5 "):
        assert values.share(text) == values.Share(cpus=1.5)
    assert values.share("30s") == values.Share(seconds=30)
    assert values.share("500 ms") == values.Share(seconds=0.5)
    wrong: list[object] = ["", "0", 0, "-1", "x", True, None, "0s", "0.001", math.nan, math.inf, []]
    for given in wrong:
        with pytest.raises(ValueError, match=r"processors such as 1\.5, or a time such as 30s"):
            values.share(given)


def test_an_answer_has_room_for_a_thousand_characters() -> None:
    assert values.characters("1000") == 1000
    for given in ("999", 0):
        with pytest.raises(ValueError, match="1000 or more"):
            values.characters(given)


@pytest.mark.parametrize("given", ["", "x", "1.5", "-3", True, 1.5, -1])
def test_a_count_is_a_whole_number(given: object) -> None:
    with pytest.raises(ValueError, match="whole number"):
        values.count(given)


def test_a_choice_is_one_of_its_words_in_any_case() -> None:
    read = values.choice("auto", "bwrap", "none")
    assert read("BWRAP") == "bwrap"
    with pytest.raises(ValueError, match="expected auto, bwrap or none"):
        read("docker")


@pytest.mark.parametrize("given", ["3.10", "3.15", "3.12.1", "3", "python3.11"])
def test_a_python_is_a_version_kernels_run_on(given: str) -> None:
    assert values.python(given) == given.removeprefix("python")


def test_a_python_is_a_path_when_it_has_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert values.python("~/env/bin/python") == "/home/ada/env/bin/python"


@pytest.mark.parametrize("given", ["3.9", "2.7", "3.16", "4", "pypy", "", "3.12.1.1", 3.12])
def test_a_python_that_cannot_be_used_says_which_can(given: object) -> None:
    with pytest.raises(ValueError, match=r"from 3\.10 to 3\.15"):
        values.python(given)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("numpy,pandas", ["numpy", "pandas"]),
        (" numpy , ,pandas, ", ["numpy", "pandas"]),
        ("pandas>=2,<3,numpy", ["pandas>=2,<3", "numpy"]),
        ("dask[array,dataframe],numpy", ["dask[array,dataframe]", "numpy"]),
        ("", []),
    ],
)
def test_a_comma_list_keeps_specifiers_and_extras_whole(text: str, names: list[str]) -> None:
    assert values.split_names(text) == names


def test_entries_of_several_lists_come_once_in_their_order() -> None:
    assert values.entries(["numpy,os", "pandas", "numpy"]) == ("numpy", "os", "pandas")
    assert values.entries("*") == ("*",)


@pytest.mark.parametrize(
    "given", ["./pkg", "a @ https://x/y.whl", "-r req.txt", "git+https://x", "a b", 5, [1]]
)
def test_an_entry_is_a_name_and_never_a_place_or_an_option(given: object) -> None:
    with pytest.raises(ValueError, match=r"place|option|not the name|expected names"):
        values.entries(given)


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
