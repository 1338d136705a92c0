"""From `--allow` entries to what gets installed."""

from __future__ import annotations

import pytest

from kernel_mcp.environments import EnvironmentSpec
from kernel_mcp.environments.metadata import DISTRIBUTIONS, distribution_for, packages_for
from kernel_mcp.errors import ConfigError
from tests.unit.packages.wheels import requirements


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("numpy", "numpy"),
        ("sklearn", "scikit-learn"),
        ("scikit-learn", "scikit-learn"),
        ("PIL", "pillow"),
        ("pil", "pillow"),
        ("PIL.Image", "pillow"),
        ("pillow", "pillow"),
        ("cv2", "opencv-python-headless"),
        ("yaml", "pyyaml"),
        ("PyYAML", "pyyaml"),
        ("bs4", "beautifulsoup4"),
        ("dateutil", "python-dateutil"),
        ("scipy.stats", "scipy"),
        ("google.cloud.storage", "google-cloud-storage"),
        ("google.protobuf.message", "protobuf"),
        ("opentelemetry.sdk", "opentelemetry-sdk"),
        ("ruamel.yaml", "ruamel-yaml"),
        ("typing_extensions", "typing-extensions"),
    ],
)
def test_a_module_or_a_distribution_name_finds_its_distribution(
    name: str, distribution: str
) -> None:
    assert distribution_for(name) == distribution


@pytest.mark.parametrize("name", ["os", "sys", "subprocess", "urllib.request", "imp", "distutils"])
def test_modules_of_the_standard_library_need_no_package(name: str) -> None:
    assert distribution_for(name) is None


def test_entries_keep_their_specifiers_and_extras() -> None:
    found = packages_for(["sklearn>=1.4,<2", "dask[array]", "os", "*", ""])
    assert found == requirements("scikit-learn<2,>=1.4", "dask[array]")


def test_two_names_of_one_distribution_are_one_requirement() -> None:
    assert EnvironmentSpec.for_allow(["PIL", "pillow", "Pillow"]).packages == requirements("pillow")


def test_equal_sets_are_one_environment() -> None:
    one = EnvironmentSpec.for_allow(["Pandas >=2", "NumPy"])
    two = EnvironmentSpec.for_allow(["numpy"], packages=requirements("pandas>=2"))
    assert (one, hash(one)) == (two, hash(two))
    assert one != EnvironmentSpec.for_allow(["numpy", "pandas>=3"])


@pytest.mark.parametrize("entry", ["./wheel.whl", "x @ file:///x", "--index-url=x", "a b", "a=="])
def test_anything_but_a_name_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^--allow: "):
        packages_for([entry])


def test_no_row_of_the_table_says_the_obvious() -> None:
    same = [name for name, dist in DISTRIBUTIONS.items() if name.replace("_", "-") == dist]
    assert same == []
