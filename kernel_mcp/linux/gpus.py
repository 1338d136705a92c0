"""Find the device nodes of this machine's GPUs and their driver's libcuda."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernel_mcp.errors import ConfigError
from kernel_mcp.records import dataclass

LIBRARY = "libcuda.so.1"
LIBRARY_PATH = "LD_LIBRARY_PATH"
FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib64-nvidia",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
)
"""Folders of drivers that the loader's cache does not list: containers, Colab, WSL, NixOS."""
_CARDS = ("nvidia[0-9]*", "dxg")
_MEMORY = "nvidia-uvm"
"""Device that CUDA requires; in WSL `dxg` includes it."""
_HELPERS = ("nvidiactl", _MEMORY, "nvidia-caps/nvidia-cap[3-9]*", "nvidia-caps/nvidia-cap[12]?*")
"""Further devices. Capabilities 1 and 2 are left out: they configure and monitor MIG for all."""
_SYSTEM = ("/usr", "/lib", "/lib64")
"""Folders that every sandbox except containers shows."""
_LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
_LDCONFIG_S = 10.0


@dataclass(frozen=True, slots=True)
class Driver:
    """The parts of a GPU's driver that CUDA code requires.

    devices  nodes below /dev: the cards first
    folder   folder of libcuda, None if a sandbox's dynamic loader finds it anyway
    """

    devices: tuple[Path, ...]
    folder: Path | None = None


def of_system(path: Path) -> bool:
    """Return True if every sandbox except containers shows this path."""
    return any(path.is_relative_to(each) for each in _SYSTEM)


def driver(
    dev: Path = Path("/dev"), path: str | None = None, folders: Iterable[str] = FOLDERS
) -> Driver:
    """Return the driver of this machine's GPUs.

    `path` is a list of folders in the form of LD_LIBRARY_PATH, by default the server's. Raises
    ConfigError if there is no GPU, or a part of its driver is missing.
    """
    cards = list(_nodes(dev, _CARDS))
    if not cards:
        raise ConfigError(
            f"--gpu: there is no GPU of NVIDIA here: neither {dev}/nvidia0 nor {dev}/dxg exists. "
            "Run `nvidia-smi`, which loads the driver; start a container with its GPUs (`--gpus "
            "all`, `--device nvidia.com/gpu=all`); or leave --gpu out"
        )
    devices = (*cards, *_nodes(dev, _HELPERS))
    if not {dev / "dxg", dev / _MEMORY} & set(devices):
        raise ConfigError(
            f"--gpu: {cards[0]} is here, but not {dev / _MEMORY}, and CUDA does not start without. "
            "Load it with `nvidia-modprobe -u -c 0`, or let a program that uses CUDA run once"
        )
    known = known_library()
    if known is not None and of_system(known) and of_system(known.resolve()):
        return Driver(devices)
    given = os.environ.get(LIBRARY_PATH, "") if path is None else path
    named = [Path(each) / LIBRARY for each in (*given.split(":"), *folders) if each[:1] == "/"]
    for library in named if known is None else [known, *named]:
        folder = library.resolve().parent  # the target of a symlink must exist, too
        if library.exists() and (folder / LIBRARY).exists():
            return Driver(devices, folder)
    raise ConfigError(
        f"--gpu: {cards[0]} is here, but not {LIBRARY}, the library of its driver. Neither "
        f"`ldconfig -p` nor {LIBRARY_PATH} leads to it, nor is it in {', '.join(folders)}. Install "
        "the libraries of the driver, or run `ldconfig` where they are installed"
    )


def known_library() -> Path | None:
    """Return the path of libcuda in the dynamic loader's cache; None if absent or unreadable."""
    program = next((path for path in _LDCONFIG if Path(path).exists()), None)
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-p"], capture_output=True, text=True, check=False, timeout=_LDCONFIG_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return library_in(done.stdout)


def library_in(cache: str) -> Path | None:
    """Return the path of libcuda in the output of `ldconfig -p`, which lists 64-bit first."""
    for line in cache.splitlines():
        name, _, found = line.strip().partition(" => ")
        if name.partition(" ")[0] == LIBRARY:
            return Path(found)
    return None


def _nodes(dev: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield the character devices of these names."""
    for name in names:
        for path in sorted(dev.glob(name)):
            if stat.S_ISCHR(path.lstat().st_mode):
                yield path
