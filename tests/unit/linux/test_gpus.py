"""GPUs as their driver shows them, without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.linux import gpus

NODES = (
    "nvidia0",
    "nvidia1",
    "nvidiactl",
    "nvidia-uvm",
    "nvidia-caps/nvidia-cap3",
    "nvidia-caps/nvidia-cap12",
)
LEFT = ("nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2", "nvidia-uvm-tools", "nvidia-modeset")
"""Devices that configure a card, inspect other processes, or drive screens."""
CACHE = """2 libs found in cache `/etc/ld.so.cache'
	libcudart.so.12 (libc6,x86-64) => /opt/cuda/lib64/libcudart.so.12
	libcuda.so.1 (libc6,x86-64) => /opt/driver/lib64/libcuda.so.1
	libcuda.so.1 (libc6) => /opt/driver/lib/libcuda.so.1
"""


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that stand for devices: only root may make those."""

    def nodes(folder: Path, names: Iterable[str]) -> Iterator[Path]:
        return (path for name in names for path in sorted(folder.glob(name)))

    monkeypatch.setattr(gpus, "_nodes", nodes)
    for name in (*LEFT, *NODES):
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "dev"


def known(monkeypatch: pytest.MonkeyPatch, library: str | None) -> None:
    """Make the loader's cache lead there."""
    found = None if library is None else Path(library)
    monkeypatch.setattr(gpus, "known_library", lambda: found)


def library(folder: Path) -> Path:
    """Make a driver's library, as it is installed: a link to the one with its version."""
    folder.mkdir(parents=True)
    (folder / "libcuda.so.550").touch()
    (folder / gpus.LIBRARY).symlink_to("libcuda.so.550")
    return folder


def test_the_cards_come_first_and_what_concerns_others_not_at_all(
    dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, "/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    found = gpus.driver(dev, "")
    assert [str(path.relative_to(dev)) for path in found.devices] == list(NODES)
    assert found.folder is None


def test_libraries_that_the_loader_does_not_know_are_found_where_drivers_put_them(
    dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, None)
    empty, given = tmp_path / "empty", tmp_path / "driver"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"nvidia0 is here, but not libcuda\.so\.1.*ldconfig"):
        gpus.driver(dev, "lib:", [str(given)])
    library(given)
    for path, folders in (("", [str(empty), str(given)]), (f":lib:{empty}:{given}", [])):
        assert gpus.driver(dev, path, folders).folder == given


def test_a_link_to_libraries_elsewhere_leads_to_the_folder_that_has_them(
    dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, None)
    store = library(tmp_path / "store/driver-550/lib")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / gpus.LIBRARY).symlink_to(store / gpus.LIBRARY)
    assert gpus.driver(dev, "", [str(tmp_path / "run")]).folder == store


def test_libraries_outside_of_the_system_are_named_though_the_loader_knows_them(
    dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = library(tmp_path / "opt")
    known(monkeypatch, str(folder / gpus.LIBRARY))
    assert gpus.driver(dev, "", []).folder == folder


def test_the_loaders_cache_is_read() -> None:
    assert gpus.library_in(CACHE) == Path("/opt/driver/lib64/libcuda.so.1")
    assert gpus.library_in("") is None


def test_a_machine_without_a_gpu_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no GPU of NVIDIA here.*nvidia-smi"):
        gpus.driver(tmp_path)


def test_a_driver_whose_memory_manager_is_not_loaded_says_what_to_do(dev: Path) -> None:
    (dev / "nvidia-uvm").unlink()
    with pytest.raises(ConfigError, match=r"not .*nvidia-uvm, .*nvidia-modprobe -u -c 0"):
        gpus.driver(dev)
    (dev / "dxg").touch()
    assert dev / "dxg" in gpus.driver(dev, str(library(dev.parent / "wsl"))).devices
