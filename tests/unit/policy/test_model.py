from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_mcp.config.settings import PROFILES
from kernel_mcp.errors import ConfigError
from kernel_mcp.policy import Policy
from kernel_mcp.policy.model import DATA_MODULES, DEFAULT_MODULES, STRICT_MODULES, words

ALWAYS_REFUSED = sorted(
    words(
        """
        os sys subprocess socket ctypes shutil importlib signal multiprocessing http
        builtins gc code pty resource runpy pickle urllib urllib.request ssl select mmap
        webbrowser venv site
        """
    )
)

PROMISED = sorted(
    words(
        """
        collections datetime itertools math queue random re stat statistics time
        unicodedata json csv decimal fractions functools typing dataclasses string
        textwrap enum heapq bisect hashlib base64 io copy operator pprint uuid zoneinfo
        calendar pathlib tempfile glob zipfile gzip sqlite3 asyncio contextlib abc types
        numbers array struct difflib html xml urllib.parse secrets warnings traceback
        inspect logging timeit graphlib concurrent.futures threading
        """
    )
)


@pytest.mark.parametrize("module", PROMISED)
def test_the_default_policy_allows_the_promised_standard_library(module: str) -> None:
    assert Policy.for_allow([]).allows_members(module)


@pytest.mark.parametrize("module", ALWAYS_REFUSED)
def test_the_default_policy_lets_no_module_through_that_leaves_python(module: str) -> None:
    assert not Policy.for_allow([]).allows_members(module)


def test_an_allowed_package_brings_its_submodules() -> None:
    policy = Policy.for_allow(["numpy"])
    assert policy.allows("numpy")
    assert policy.allows("numpy.linalg")
    assert not policy.allows("numpyro")


def test_a_dotted_entry_brings_its_parent_as_a_bare_package_only() -> None:
    policy = Policy.for_allow([])
    assert policy.allows("urllib.parse")
    assert policy.allows("urllib")
    assert not policy.allows_members("urllib")
    assert not policy.allows("urllib.request")
    assert not policy.allows("urllib.parser")


def test_display_of_ipython_is_allowed_and_its_core_is_not() -> None:
    policy = Policy.for_allow([])
    assert policy.allows("IPython.display")
    assert not policy.allows("IPython.core")


def test_a_star_allows_everything() -> None:
    policy = Policy.for_allow(["*"])
    assert policy.allow_all
    assert policy.allows("os")
    assert policy.allows_members("ctypes.util")


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("pandas>=2", "pandas"),
        ("pandas >=2, <3", "pandas"),
        ("uvicorn[standard]>=0.30", "uvicorn"),
        ("scikit-learn", "scikit_learn"),
        ("Pillow==11.0", "pillow"),
        ("  numpy  ", "numpy"),
        ("numpy; python_version < '3.13'", "numpy"),
        ("urllib.request", "urllib.request"),
    ],
)
def test_an_entry_may_carry_extras_versions_and_markers(entry: str, module: str) -> None:
    assert Policy.for_allow([entry]).allows(module)


@pytest.mark.parametrize("entry", ["--index-url", "1numpy", "a b", "x @ https://e.org/x.whl", "é"])
def test_an_entry_that_is_no_name_is_refused_with_an_example(entry: str) -> None:
    with pytest.raises(ConfigError, match="for example numpy"):
        Policy.for_allow([entry])


def test_empty_entries_are_ignored() -> None:
    assert Policy.for_allow(["", " "]) == Policy.for_allow([])


def test_more_modules_make_a_new_policy_and_leave_the_old_one() -> None:
    before = Policy.for_allow([])
    after = before.with_modules(["polars"])
    assert after.allows("polars")
    assert not before.allows("polars")


def test_the_strict_profile_has_the_short_list_and_no_files() -> None:
    policy = Policy.for_allow([], profile="strict")
    assert policy.modules == STRICT_MODULES
    assert {"open", "eval", "exec", "compile", "__import__", "input"} <= policy.deny_builtins
    assert not policy.allows("json")


def test_the_strict_profile_can_be_widened_by_name() -> None:
    assert Policy.for_allow(["json"], profile="strict").allows("json")


def test_the_data_profile_is_the_default_with_the_packages_of_an_analysis() -> None:
    policy = Policy.for_allow([], profile="data")
    assert policy.modules == DEFAULT_MODULES | DATA_MODULES
    assert policy.allows("sklearn.linear_model")
    assert not policy.allows("os")


def test_the_open_profile_allows_everything() -> None:
    assert Policy.for_allow([], profile="open").allow_all


def test_everything_allowed_leaves_no_builtin_denied() -> None:
    assert Policy.for_allow(["*"], profile="strict").deny_builtins == frozenset()


def test_an_unknown_profile_is_refused_with_the_list_of_profiles() -> None:
    with pytest.raises(ConfigError, match=", ".join(PROFILES)):
        Policy.for_allow([], profile="loose")


def test_a_refusal_names_the_module_the_alternative_the_list_and_the_flag() -> None:
    text = Policy.for_allow(["numpy"]).refusal("os.path")
    assert text.startswith("import of 'os.path' is not allowed in this session.")
    assert "pathlib" in text
    assert "Allowed: numpy and " in text
    assert "--allow os (or --allow '*')" in text


def test_a_refusal_of_a_foreign_package_points_to_the_install_tool() -> None:
    assert "`install`" in Policy.for_allow([]).refusal("polars")
    assert "`install`" not in Policy.for_allow([]).refusal("gc")


def test_the_flag_for_a_module_beside_a_listed_one_is_dotted() -> None:
    policy = Policy.for_allow([])
    assert policy.flag("urllib.request") == "urllib.request"
    assert policy.flag("polars.io") == "polars"
    assert policy.flag("urllib.*") == "urllib"


def test_the_json_form_is_plain_sorted_and_complete() -> None:
    policy = Policy.for_allow(["numpy"], profile="strict")
    data = json.loads(json.dumps(policy.to_json()))
    assert data["modules"] == sorted(policy.modules)
    assert data["profile"] == "strict"
    assert data["allow_all"] is False
    assert "open" in data["deny_builtins"]


def test_the_documentation_lists_exactly_what_is_allowed() -> None:
    text = (Path(__file__).parents[3] / "docs" / "policy.md").read_text(encoding="utf-8")
    (listed,) = [line for line in text.splitlines() if line.startswith("> ")]
    assert words(listed.removeprefix("> ")) == DEFAULT_MODULES - STRICT_MODULES
    (data,) = [line for line in text.splitlines() if line.startswith("| `data` |")]
    assert all(name in data for name in DATA_MODULES)
