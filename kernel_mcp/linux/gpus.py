"""GPUs of this machine as their driver shows them: device nodes, and where libcuda is."""

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
"""Where drivers are that the loader's cache does not know: containers, Colab, WSL, NixOS."""
_CARDS = ("nvidia[0-9]*", "dxg")
_MEMORY = "nvidia-uvm"
"""Without it CUDA does not start; the driver of WSL has it in `dxg`."""
_HELPERS = ("nvidiactl", _MEMORY, "nvidia-caps/nvidia-cap[3-9]*", "nvidia-caps/nvidia-cap[12]?*")
"""Of the capabilities all but 1 and 2, which configure and watch the parts of every card."""
_SYSTEM = ("/usr", "/lib", "/lib64")
"""Folders that every sandbox shows, except that of containers."""
_LDCONFIG = ("/sbin/ldconfig", "/usr/sbin/ldconfig")
_LDCONFIG_S = 10.0


@dataclass(frozen=True, slots=True)
class Driver:
    """The parts of a GPU's driver that code requires.

    devices  nodes below /dev: the cards first
    folder   where libcuda is, None where the loader of a sandbox finds it by itself
    """

    devices: tuple[Path, ...]
    folder: Path | None = None


def of_system(path: Path) -> bool:
    """Return True if every sandbox shows this path."""
    return any(path.is_relative_to(each) for each in _SYSTEM)


def driver(
    dev: Path = Path("/dev"), path: str | None = None, folders: Iterable[str] = FOLDERS
) -> Driver:
    """Return the driver of this machine's GPUs.

    `path` has folders as LD_LIBRARY_PATH has them, by default those of the server.
    Raises ConfigError where there is none, or a part of it is missing.
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
        folder = library.resolve().parent  # what it links to is to be there, too
        if library.exists() and (folder / LIBRARY).exists():
            return Driver(devices, folder)
    raise ConfigError(
        f"--gpu: {cards[0]} is here, but not {LIBRARY}, the library of its driver. Neither "
        f"`ldconfig -p` nor {LIBRARY_PATH} leads to it, nor is it in {', '.join(folders)}. Install "
        "the libraries of the driver, or run `ldconfig` where they are installed"
    )


def known_library() -> Path | None:
    """Return where the loader's cache has libcuda; None if nowhere, or if it cannot be asked."""
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
    """Return the path of libcuda in what `ldconfig -p` prints, that of 64 bits first."""
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
