"""Which modules a distribution provides, from its RECORD alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.environments import EnvironmentSpec, import_names
from kernel_mcp.environments.metadata import installed_modules, installed_versions
from kernel_mcp.launch.base import KernelEnvironment


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    return folder


def _install(site: Path, name: str, version: str, files: list[str]) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    rows = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{row},sha256=x,1\n" for row in rows))


def test_a_regular_package_gives_its_root(site: Path) -> None:
    _install(site, "pillow", "12.0", ["PIL/__init__.py", "PIL/Image.py", "pillow.libs/a.so"])
    assert installed_modules(site) == {"pillow": ("PIL",)}
    assert installed_versions(site) == ("pillow==12.0",)


def test_lone_modules_and_extensions_give_their_names(site: Path) -> None:
    _install(site, "Six", "1", ["six.py", "_fast.cpython-311-x86_64-linux-gnu.so"])
    assert installed_modules(site) == {"six": ("_fast", "six")}


def test_a_namespace_package_gives_dotted_names_only(site: Path) -> None:
    _install(
        site,
        "google_cloud_storage",
        "3",
        ["google/cloud/storage/__init__.py", "google/cloud/storage/blob.py"],
    )
    assert installed_modules(site) == {"google-cloud-storage": ("google.cloud.storage",)}


def test_scripts_stubs_and_data_give_nothing(site: Path) -> None:
    files = ["../../../bin/tool.py", "x-stubs/__init__.py", "data/readme.txt", "/abs/evil.py"]
    _install(site, "odd", "1", files)
    assert installed_modules(site) == {"odd": ()}


def test_a_distribution_without_record_gives_nothing(site: Path) -> None:
    (site / "bare-1.dist-info").mkdir()
    assert installed_modules(site) == {"bare": ()}


def test_only_the_modules_of_requested_packages_are_named(site: Path, tmp_path: Path) -> None:
    _install(site, "scikit_learn", "1", ["sklearn/__init__.py"])
    _install(site, "scipy", "1", ["scipy/__init__.py"])
    env = KernelEnvironment(python=tmp_path / "bin/python", readonly=())
    spec = EnvironmentSpec.for_allow(["sklearn>=1", "os", "missing"])
    assert import_names(env, spec) == {"sklearn"}
