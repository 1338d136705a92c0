"""Packages and Python versions, as the operator or an agent names them."""

from __future__ import annotations

import pytest

from kernel_mcp.config import requirements


@pytest.mark.parametrize("given", ["3.10", "3.15", "3.12.1", "3", "python3.11"])
def test_a_python_is_a_version_kernels_run_on(given: str) -> None:
    assert requirements.python(given) == given.removeprefix("python")


def test_a_python_is_a_path_when_it_has_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert requirements.python("~/env/bin/python") == "/home/ada/env/bin/python"


@pytest.mark.parametrize("given", ["3.9", "2.7", "3.16", "4", "pypy", "", "3.12.1.1", 3.12])
def test_a_python_that_cannot_be_used_says_which_can(given: object) -> None:
    with pytest.raises(ValueError, match=r"from 3\.10 to 3\.15"):
        requirements.python(given)


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
    assert requirements.split_names(text) == names


def test_entries_of_several_lists_come_once_in_their_order() -> None:
    assert requirements.entries(["numpy,os", "pandas", "numpy"]) == ("numpy", "os", "pandas")
    assert requirements.entries("*") == ("*",)


@pytest.mark.parametrize(
    "given", ["./pkg", "a @ https://x/y.whl", "-r req.txt", "git+https://x", "a b", 5, [1]]
)
def test_an_entry_is_a_name_and_never_a_place_or_an_option(given: object) -> None:
    with pytest.raises(ValueError, match=r"place|option|not the name|expected names"):
        requirements.entries(given)
