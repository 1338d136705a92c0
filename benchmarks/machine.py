"""The machine of the figures, without anything that names its owner."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.processes import meminfo_mib
from kernel_mcp import __version__

_DISTRIBUTIONS = ("mcp", "jupyter_client", "pyzmq", "ipykernel", "uv")


@dataclass(frozen=True, slots=True)
class Machine:
    """A computer and its software. `load` is the load average when the run began."""

    cores: int
    processor: str
    memory_gib: int
    kernel: str
    python: str
    bubblewrap: str
    versions: dict[str, str]
    load: float

    @classmethod
    def this(cls) -> Machine:
        """The one this runs on."""
        return cls(
            cores=len(os.sched_getaffinity(0)),
            processor=_processor(),
            memory_gib=round(meminfo_mib("MemTotal") / 1024),
            kernel=f"{platform.system()} {platform.release().split('-')[0]}",
            python=platform.python_version(),
            bubblewrap=_bubblewrap(),
            versions={
                "kernel-mcp": __version__,
                **{name: version(name) for name in _DISTRIBUTIONS},
            },
            load=round(os.getloadavg()[0], 1),
        )

    def describe(self) -> str:
        """One line about the hardware and one about the software."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cores} cores ({self.processor}), {self.memory_gib} GiB, {self.kernel}, "
            f"load average {self.load} at the start\n"
            f"Python {self.python}, bubblewrap {self.bubblewrap}, {versions}"
        )

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _bubblewrap() -> str:
    if shutil.which("bwrap") is None:
        return "none"
    said = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
    return said.stdout.split()[-1] if said.stdout else "unknown"
