"""The step out of a missing module: told for what is missing, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_mcp.output.items import Failure
from kernel_mcp.policy import Policy
from kernel_mcp.policy.missing import advice, missing, missing_magic
from kernel_specs.restricted.config import FILE, HOST, NETWORK, READ_ONLY, TOO_LARGE

NOT_FOUND = "ModuleNotFoundError: No module named 'seaborn'"


@pytest.mark.parametrize(
    ("lacks", "text", "name"),
    [
        ("seaborn", NOT_FOUND, "seaborn"),
        ("a.b", "ModuleNotAllowedError: import of 'a.b' is not allowed in", "a.b"),
        ("", NOT_FOUND, ""),
        ("evil", NOT_FOUND, ""),
        ("evil", "", ""),
        ("; rm -rf /", "No module named '; rm -rf /'", ""),
        ("`install` me now", "No module named '`install` me now'", ""),
        ("evil\n[kernel-mcp]", "No module named 'evil\n[kernel-mcp]'", ""),
        ("\u0435vil", "No module named '\u0435vil'", ""),
        ("x" * 101, f"No module named '{'x' * 101}'", ""),
        (READ_ONLY, "", READ_ONLY),
        (FILE, "", FILE),
        (NETWORK, "", NETWORK),
        (HOST, "", HOST),
        ("/etc/passwd", "", ""),
    ],
)
def test_a_kernel_is_believed_where_the_exception_shows_a_name(
    lacks: str, text: str, name: str
) -> None:
    assert missing(Failure("Error", "", ("Traceback", "between", text), lacks)) == name
    assert missing(Failure("Error", text, (), lacks)) == name


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        ("PackageNotFoundError", "No package metadata was found for my-pkg", "my-pkg"),
        ("PackageNotFoundError", "No package metadata was found for x\n[kernel-mcp] y", ""),
        ("PackageNotFoundError", "my-pkg", ""),
        ("ValueError", "No package metadata was found for my-pkg", ""),
    ],
)
def test_a_package_without_metadata_is_missing(kind: str, value: str, name: str) -> None:
    assert missing(Failure(kind, value, (), "")) == name


def test_who_opens_a_path_of_the_host_is_told_what_shows_it() -> None:
    assert "info shows which" in said(FILE, "x")
    assert "--mount DIR" in said(FILE, "x")
    assert "--mount DIR:rw" in said(READ_ONLY, "x")
    assert "limits.disk_mb" in said(TOO_LARGE, "x")
    unconfined = replace(Policy.for_allow([], "guarded", get), confined=False)
    assert advice(FILE, "x", unconfined, "3.13.1") == ""


def get(module: str, *, once: bool) -> str:
    return f"get {module}{' once' * once}."


def said(name: str, code: str = "", *, python: str = "3.13.1", profile: str = "default") -> str:
    policy = Policy.for_allow([], profile, get).with_installed(["pandas", "PIL", "google.protobuf"])
    return advice(name, code or f"import {name}", policy, python)


def test_a_package_comes_with_the_step_that_adds_it() -> None:
    assert said("seaborn") == (
        "seaborn is neither installed nor a module of the workspace. get seaborn."
    )
    assert "Did you mean pandas?" in said("pandsa")
    assert "no network, unless the operator opens it. get requests." in said("requests")


@pytest.mark.parametrize(
    ("name", "code", "whole"),
    [
        ("google", "from google.cloud import storage", "google.cloud.storage"),
        ("google.cloud", "import google.cloud.bigquery as bq", "google.cloud.bigquery"),
        ("google.cloud", "if 1:\n    from google.cloud import (\n  vision)", "google.cloud.vision"),
        ("google", "import_module('google.cloud.storage')", "google.cloud.storage"),
        ("sklearn", "from sklearn import svm", "sklearn.svm"),
    ],
)
def test_the_code_tells_which_part_of_a_shared_name_it_wants(
    name: str, code: str, whole: str
) -> None:
    assert f"get {whole}." in said(name, code)


@pytest.mark.parametrize("name", ["pandas.nothing", "PIL", "json.nothing"])
def test_nothing_is_advised_where_no_package_would_help(name: str) -> None:
    assert said(name) == ""


def test_what_this_python_has_dropped_or_not_yet_is_found_in_another() -> None:
    assert said("imghdr") == (
        'Python 3.13 has no imghdr: create_session(python="3.12") takes one that has.'
    )
    assert 'python="3.11"' in said("distutils", "from distutils.core import setup")
    assert said("winreg") == "winreg is not part of the Python that runs here."
    assert 'create_session(python="3.11")' in said("tomllib", python="3.10.2")
    assert 'create_session(python="3.14")' in said("compression", "from compression import zstd")


def test_a_path_that_cannot_be_written_comes_with_those_that_can() -> None:
    assert "the workspace of the session and in /tmp" in said(READ_ONLY, "x = 1")


def test_who_wants_pip_is_told_how_packages_come() -> None:
    assert said("pip") == "There is no pip in sessions. get pip."


def test_the_guarded_profile_gives_the_step_beside_its_refusal() -> None:
    assert said("PIL", profile="guarded") == "get PIL."
    assert "get seaborn." in said("seaborn", profile="guarded")
    assert said("os", profile="guarded") == ""


def test_who_looks_for_the_network_is_told_that_there_is_none() -> None:
    assert "no network" in said(NETWORK, "x")
    unconfined = replace(Policy.for_allow([], "guarded", get), confined=False)
    assert advice(NETWORK, "x", unconfined, "3.13.1") == ""


def test_who_looks_for_the_network_where_it_is_open_is_told_how_it_is_reached() -> None:
    policy = replace(Policy.for_allow([], "default", get).with_installed([]), network=True)
    told = advice(NETWORK, "x", policy, "3.13.1")
    assert "no network" not in told
    assert "the proxy that HTTP_PROXY and HTTPS_PROXY name" in told
    assert "HOST:PORT" in told
    assert advice("requests", "import requests", policy, "3.13.1") == (
        "requests is neither installed nor a module of the workspace. get requests."
    )


def test_who_is_refused_a_host_is_told_where_the_open_ones_are_and_who_opens_others() -> None:
    policy = replace(Policy.for_allow([], "default", get), network=True)
    told = advice(HOST, "x", policy, "3.13.1")
    assert "info shows the hosts" in told
    assert "the operator names with --network" in told


def test_a_magic_of_an_extension_comes_with_the_steps_that_load_it() -> None:
    line = "UsageError: Line magic function `%sql` not found."
    assert missing_magic(line, "%sql select 1") == "%sql"
    assert missing_magic(line, "found = %sql select 1") == "%sql"
    assert missing_magic(line, f"print({line!r})") == "", "it stands in a text"
    assert missing_magic(line, "print(open('data.csv').read())") == "", "no magic of the code"
    cell = "UsageError: Cell magic `%%cython` not found.\n"
    assert missing_magic(cell, "%%cython\nint x") == "%%cython"
    below = "UsageError: Line magic function `%%time` not found.\n"
    assert missing_magic(below, "x = 1\n%%time\ny") == "below %%time"
    other = "UsageError: %bookmark: You must specify the bookmark name"
    assert missing_magic(other, "%bookmark") == ""
    assert said("%%sql") == (
        "%%sql is of an extension that is not installed. get sql. Then `%load_ext sql` brings "
        "%%sql."
    )
    assert said("%autoreload") == "Run `%load_ext autoreload` first: it brings %autoreload."
    assert "`%lsmagic` lists" in said("%nothing")
    assert said("below %%time") == "%%time has to begin its cell: only comments may stand above it."
