"""The folder that one run of the tests keeps its caches in, and the disk that a run takes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.linux.folders import try_lock
from kernel_mcp.linux.safe_tree import remove_tree
from kernel_mcp.units import GIB, MIB

PLACE = Path("/var/tmp")
"""On a disk, and short: paths of sockets lie below."""
VARIABLE = "TESTS_FOLDER"
"""The variable that names the folder to all processes of a run."""
NEEDED_BYTES = 4 * GIB
"""Peak disk use of a run with `--full`; one without uses less than half of it."""
LEAST_BYTES = 256 * MIB
"""With less, tests fail for lack of space and not for what they test."""


class RunFolder:
    """A folder that goes with the run; the next run removes those of runs that were killed."""

    def __init__(self, place: Path = PLACE) -> None:
        prefix = f"kernel-mcp-tests-{os.geteuid()}-"
        alone = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(alone, fcntl.LOCK_EX)
            for left in place.glob(f"{prefix}*"):
                if (lock := _locked(left)) is not None:
                    _remove(left, lock)
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            self._lock = _locked(self.path)
        finally:
            os.close(alone)
        self.path.chmod(0o711)  # the homes of ordinary users are in it

    def tell(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables by which all processes use it; XDG_CACHE_HOME stays if it is set."""
        environ[VARIABLE] = str(self.path)
        environ.setdefault("XDG_CACHE_HOME", str(self.path / "cache"))

    def close(self) -> None:
        """Remove it, and what killed servers have left in the place that is theirs by default."""
        assert self._lock is not None
        _remove(self.path, self._lock)
        try:
            RunDirectory.create().close()
        except ConfigError as reason:
            print(f"what killed servers have left was not looked for: {reason}")


def own_folder() -> Path:
    """The folder of this run, for what is to be on a disk or lie where others may pass."""
    return Path(os.environ.get(VARIABLE, PLACE))


def short_of(needed: int) -> str:
    """Where fewer than `needed` bytes are free for tests, as a sentence; empty for nowhere."""
    for place in (PLACE, Path(tempfile.gettempdir())):
        free = shutil.disk_usage(place).free
        if free < needed:
            return (
                f"the tests need {needed / GIB:.2g} GiB of free disk, and {place} has "
                f"{free / GIB:.2g}: make room in {place}"
            )
    return ""


def _locked(folder: Path) -> int | None:
    """Lock a folder; None where another run has it, or has removed it just now."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    return try_lock(fd)


def _remove(folder: Path, lock: int) -> None:
    try:
        remove_tree(folder)
    finally:
        os.close(lock)
