"""What may be installed, and what is no package at all."""

from __future__ import annotations

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, InputError, InstallError
from kernel_mcp.packages.requirements import MAX_PACKAGES, InstallRules


def rules(
    *allow_install: str, allow: tuple[str, ...] = (), profile: str = "default"
) -> InstallRules:
    return InstallRules.of(Settings(allow=allow, allow_install=allow_install, profile=profile))


def test_nothing_may_be_installed_unless_it_was_named() -> None:
    with pytest.raises(InstallError, match=r"Permitted: nothing.*--allow-install polars"):
        rules().admit(["polars"])


def test_named_packages_may_be_installed_in_any_spelling() -> None:
    admitted = rules("Polars", "scikit_learn").admit(["polars>=1", "sklearn"])
    assert admitted == ("polars>=1", "scikit-learn")


def test_packages_of_the_allow_list_may_be_installed_too() -> None:
    assert rules(allow=("pandas",)).admit(["pandas<3"]) == ("pandas<3",)


def test_packages_of_the_profile_may_be_installed_too() -> None:
    assert rules(profile="data").admit(["numpy"]) == ("numpy",)


def test_a_star_permits_everything_but_allowing_every_import_does_not() -> None:
    assert rules("*").admit(["anything"]) == ("anything",)
    with pytest.raises(InstallError):
        rules(allow=("*",)).admit(["anything"])


def test_the_refusal_names_all_that_is_refused() -> None:
    with pytest.raises(InstallError, match=r"rich, tqdm.*Permitted: polars.*rich,tqdm"):
        rules("polars").admit(["rich", "polars", "tqdm"])


def test_version_limits_of_the_operator_become_constraints() -> None:
    found = rules("polars<2", "rich", allow=("pandas>=2",))
    assert found.constraints == ("pandas>=2", "polars<2")


@pytest.mark.parametrize(
    "text",
    [
        "-r requirements.txt",
        "--index-url=http://elsewhere",
        "git+https://example.org/x",
        "x @ https://example.org/x.whl",
        "./local",
        "/etc/passwd",
        "..\\x",
        "numpy\n--index-url x",
        "",
        "a b",
    ],
)
def test_what_is_not_the_name_of_a_package_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="by name"):
        rules("*").admit([text])


def test_the_standard_library_is_passed_over_or_refused() -> None:
    assert rules("*").admit(["json", "polars"]) == ("polars",)
    with pytest.raises(InputError, match="part of Python itself"):
        rules("*").admit(["json"], standard_library=False)


def test_the_last_word_on_a_package_counts() -> None:
    assert rules("*").admit(["polars<1", "polars>=1"]) == ("polars>=1",)


def test_too_many_packages_are_refused() -> None:
    with pytest.raises(InputError, match="too many"):
        rules("*").admit([f"p{number}" for number in range(MAX_PACKAGES + 1)])


def test_a_bad_entry_of_the_operator_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="--allow-install"):
        rules("https://x")


def test_long_lists_are_described_in_short() -> None:
    described = rules(*(f"p{number:03}" for number in range(100))).describe()
    assert described.endswith("and 70 more")
    assert rules("*").describe() == "any package"
