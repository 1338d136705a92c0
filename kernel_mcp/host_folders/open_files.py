"""Find processes in sandboxes that opened a file before it was covered.

A cover has no effect on files that are already open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Collection, Iterator, Sequence

from kernel_mcp.host_folders.secrets import FIXED
from kernel_mcp.linux.proc import threads
from kernel_mcp.records import dataclass

_OPENED_FOR_CHANGES = os.O_WRONLY | os.O_RDWR
_SHARED_AND_WRITABLE = " mw "
"""Flag in VmFlags of /proc/PID/smaps of a mapping that is or can be made writable."""


@dataclass(frozen=True)
class CoveredFile:
    """A covered file or folder: its place in sandboxes, its kind of cover, device and inode."""

    path: str
    kind: str
    inode: tuple[int, int]

    def holds(self, place: str, inode: tuple[int, int]) -> bool:
        """Return True if a path or inode is the covered one, or the path is below it."""
        return inode == self.inode or place == self.path or place.startswith(f"{self.path}/")


@dataclass(frozen=True)
class OpenFileHolder:
    """A process of the user `uid` that holds `covered`, or something in it, open.

    opened_by  the folder, descriptor or mapping below /proc/PID by which it is held
    immediate  True if the process can change it now; else only by further steps, or not at all
    """

    pid: int
    started: str
    uid: int
    opened_by: str
    covered: CoveredFile
    immediate: bool

    def end(self, namespaces: Collection[int]) -> bool:
        """Kill the process if it is still the same; return True if it was killed."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if _started(self.pid) == self.started and _namespace(self.pid) in namespaces:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return True
        except OSError:
            return False
        finally:
            os.close(process)
        return False


def open_file_holders(
    namespaces: Collection[int], wanted: Sequence[CoveredFile], blank: Collection[tuple[int, int]]
) -> Iterator[OpenFileHolder]:
    """Yield the processes in these mount namespaces that hold one of `wanted` open.

    `blank` are the inodes of the empty files that covers show. Descriptors in transit through a
    socket are not found.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208  # of many processes
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # ended, or of another user
            pid = int(name)
            if _namespace(pid) in namespaces:
                started = _started(pid)
                uid = os.stat(f"/proc/{_running(pid)[0]}").st_uid  # noqa: PTH116
                for link, covered, at_once in _open_files(pid, wanted, blank):
                    yield OpenFileHolder(pid, started, uid, link, covered, at_once)


def _namespace(pid: int) -> int:
    """Return the mount namespace of a process, also of one whose first thread has ended."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino  # noqa: PTH116
    return os.stat(f"/proc/{_running(pid)[0]}/ns/mnt").st_ino  # noqa: PTH116


def _running(pid: int) -> list[int]:
    """Return the threads of a process that have not ended. Raises ProcessLookupError for none."""
    found = [each for each in threads(pid) if os.path.exists(f"/proc/{each}/ns/mnt")]  # noqa: PTH110
    if not found:
        raise ProcessLookupError(f"process {pid} has ended")
    return found


def _started(pid: int) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def _open_files(
    pid: int, wanted: Sequence[CoveredFile], blank: Collection[tuple[int, int]]
) -> Iterator[tuple[str, CoveredFile, bool]]:
    """Yield each folder, descriptor or mapping by which a process holds one of `wanted`.

    Threads share descriptors and mappings, but each may have its own working folder.
    """
    running = _running(pid)
    folders = [f"{thread}/{name}" for thread in running for name in ("cwd", "root")]
    files = os.listdir(f"/proc/{running[0]}/fd")  # noqa: PTH208
    for link in (*folders, *(f"{running[0]}/fd/{number}" for number in files)):
        with contextlib.suppress(OSError):  # closed meanwhile, or without a path
            place = os.readlink(f"/proc/{link}").removesuffix(" (deleted)")  # noqa: PTH115
            if not place.startswith("/"):
                continue
            handle = os.open(f"/proc/{link}", os.O_PATH | os.O_CLOEXEC)
            try:
                info, flags = os.fstat(handle), os.fstatvfs(handle).f_flag
            finally:
                os.close(handle)
            inode = (info.st_dev, info.st_ino)
            if inode in blank or info.st_nlink == 0:  # a removed file has no path
                continue
            for each in wanted:
                fixed = each.kind == FIXED
                if each.holds(place, inode) and not (fixed and flags & os.ST_RDONLY):
                    writes = fixed and stat.S_ISREG(info.st_mode) and _writes(link)
                    yield link, each, writes
                    break
    fixed_ones = [each for each in wanted if each.kind == FIXED]
    yield from ((link, each, True) for link, each in _mapped(running[0], fixed_ones))


def _writes(link: str) -> bool:
    thread, folder, number = link.split("/", maxsplit=2)
    if folder != "fd":
        return False
    with open(f"/proc/{thread}/fdinfo/{number}", encoding="ascii", errors="replace") as file:
        flags = next(line.split()[1] for line in file if line.startswith("flags:"))
    return bool(int(flags, 8) & _OPENED_FOR_CHANGES) and not int(flags, 8) & os.O_PATH


def _mapped(thread: int, wanted: Sequence[CoveredFile]) -> Iterator[tuple[str, CoveredFile]]:
    """Yield shared writable mappings, which can change files after the descriptor is closed."""
    if not any(_mapped_file(line, wanted) for line in _lines(thread, "maps")):
        return
    span, mapped = "", None
    for line in _lines(thread, "smaps"):
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            span, mapped = first, _mapped_file(line, wanted)
        elif mapped is not None and first == "VmFlags:" and _SHARED_AND_WRITABLE in line:
            yield span, mapped


def _lines(thread: int, name: str) -> Iterator[str]:
    with open(f"/proc/{thread}/{name}", encoding="utf-8", errors="surrogateescape") as file:
        yield from file


def _mapped_file(line: str, wanted: Sequence[CoveredFile]) -> CoveredFile | None:
    """Return the file of a line of /proc/PID/maps if it is a shared mapping of one of `wanted`."""
    _, access, _, device, number, *rest = line.rstrip("\n").split(maxsplit=5)
    if access[3] != "s" or number == "0":
        return None
    major, _, minor = device.partition(":")
    inode = (os.makedev(int(major, 16), int(minor, 16)), int(number))
    place = rest[0].removesuffix(" (deleted)") if rest else ""
    return next((each for each in wanted if each.holds(place, inode)), None)
