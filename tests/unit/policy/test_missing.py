"""The step out of a missing module: told for what is missing, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernel_mcp.output.items import Failure
from kernel_mcp.policy import Policy
from kernel_mcp.policy.missing import FILE, HOST, NETWORK, advice, missing, missing_in_words


def failure(name: str, *parts: str) -> Failure:
    return Failure(name, parts[-1], parts)


NOT_FOUND = "ModuleNotFoundError: No module named 'seaborn'"


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (failure("ModuleNotFoundError", "Traceback", NOT_FOUND), "seaborn"),
        (Failure("ModuleNotFoundError", "No module named 'seaborn'", ()), "seaborn"),
        (
            failure("ImportError", NOT_FOUND, "ImportError: Use pip or conda to install Seaborn."),
            "seaborn",
        ),
        (failure("RuntimeError", NOT_FOUND, "RuntimeError: no plots"), "seaborn"),
        (
            failure("ModuleNotFoundError", "ModuleNotFoundError: run `pip install -U pyarrow`"),
            "pyarrow",
        ),
        (
            failure("ModuleNotAllowedError", "ModuleNotAllowedError: import of 'a.b' is not all"),
            "a.b",
        ),
        (
            failure("ImportError", "ImportError: a URI requires 'sqlalchemy' version '2'"),
            "sqlalchemy",
        ),
        (failure("ValueError", "x = 1  # pip install x", "ValueError: no"), ""),
        (failure("ValueError", "ValueError: pip install -r needs.txt"), ""),
        (failure("ValueError", "ValueError: pip install git+https://a.b/c"), ""),
        (failure("AttributeError", "The '.style' accessor requires jinja2"), "jinja2"),
        (
            failure("ImportError", "Use pip, conda, or so to install the pyarrow package."),
            "pyarrow",
        ),
        (failure("OSError", "OSError: [Errno 30] Read-only file system: '/mnt/data'"), "/mnt/data"),
        (failure("F", "[Errno 2] No such file or directory: '/home/me/sales.csv'"), FILE),
        (failure("F", "[Errno 2] No such file or directory: '/workspace/a.csv'"), ""),
        (failure("F", "[Errno 2] No such file or directory: 'a.csv'"), ""),
        (failure("ImportError", "ImportError: cannot import name 'x' from 'y'"), ""),
        (failure("ZeroDivisionError", "ZeroDivisionError: division by zero"), ""),
        (failure("ModuleNotFoundError", "No module named '; rm -rf /'"), ""),
        (failure("ModuleNotFoundError", f"No module named '{'x' * 5000}'"), "x" * 100),
    ],
)
def test_an_exception_tells_what_was_missing(found: Failure, name: str) -> None:
    assert missing(found) == name


def test_who_opens_a_path_of_the_host_is_told_what_shows_it() -> None:
    assert "info shows which" in said(FILE, "x")
    assert "--mount DIR" in said(FILE, "x")
    assert "--mount DIR:rw" in said("/srv/data/x.csv", "x")
    unconfined = replace(Policy.for_allow([], "guarded", get), confined=False)
    assert advice(FILE, "x", unconfined, "3.13.1") == ""


def test_a_child_process_tells_it_too() -> None:
    assert missing_in_words(f"Traceback\n{NOT_FOUND}\n") == "seaborn"
    assert missing_in_words("No module named 'seaborn'") == ""


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
    assert "the workspace, which is the current folder, and in /tmp" in said("/mnt/data", "x = 1")


def test_who_wants_pip_is_told_how_packages_come() -> None:
    assert said("pip") == "There is no pip in sessions. get pip."


def test_the_guarded_profile_gives_the_step_beside_its_refusal() -> None:
    assert said("PIL", profile="guarded") == "get PIL."
    assert "get seaborn." in said("seaborn", profile="guarded")
    assert said("os", profile="guarded") == ""


@pytest.mark.parametrize(
    "words",
    [
        "socket.gaierror: [Errno -2] Name or service not known",
        "<urlopen error [Errno -3] Temporary failure in name resolution>",
        "OSError: [Errno 101] Network is unreachable",
        "HTTPSConnection(host='a.b', port=443): Failed to resolve 'a.b' ([Errno -2] Name or ser",
        "curl: (6) Could not resolve host: a.b",
        "wget: unable to resolve host address 'a.b'",
    ],
)
def test_who_looks_for_the_network_is_told_that_there_is_none(words: str) -> None:
    assert missing(failure("Error", "Traceback", words)) == missing_in_words(words) == NETWORK
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


@pytest.mark.parametrize(
    "words",
    [
        "Tunnel connection failed: 403 the operator's --network does not permit a.b:443 here. It",
        "HTTP Error 403: the operator's --network does not permit a.b:80 here. It permits: c.d",
        "curl: (56) CONNECT tunnel failed, response 403",
        "fatal: unable to access 'https://a.b/': Received HTTP code 403 from proxy after CONNECT",
    ],
)
def test_who_is_refused_a_host_is_told_where_the_open_ones_are_and_who_opens_others(
    words: str,
) -> None:
    assert missing(failure("Error", "Traceback", words)) == missing_in_words(words) == HOST
    assert missing(failure("Error", f"OSError: {words}", "Failed to connect to proxy")) == HOST
    policy = replace(Policy.for_allow([], "default", get), network=True)
    told = advice(HOST, "x", policy, "3.13.1")
    assert "info shows the hosts" in told
    assert "the operator names with --network" in told


def test_a_server_in_the_session_that_does_not_answer_is_no_want_of_network() -> None:
    assert missing(failure("E", "ConnectionRefusedError: [Errno 111] Connection refused")) == ""
    assert missing_in_words("Network is unreachable, says line 7 of the log") == ""


def test_a_magic_of_an_extension_comes_with_the_steps_that_load_it() -> None:
    assert missing_in_words("UsageError: Line magic function `%sql` not found.") == "%sql"
    assert missing_in_words("UsageError: Cell magic `%%cython` not found.\n") == "%%cython"
    assert missing_in_words("UsageError: %bookmark: You must specify the bookmark name") == ""
    assert said("%%sql") == (
        "%%sql is of an extension that is not installed. get sql. Then `%load_ext sql` brings "
        "%%sql."
    )
    assert said("%autoreload") == "Run `%load_ext autoreload` first: it brings %autoreload."
    assert "`%lsmagic` lists" in said("%nothing")
