"""All there is, looked through one by one: files, sockets, devices, processes, namespaces."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.escape.attacks.table import Target, attack, syscall

PROGRAMS = ("/usr", "/proc", "/sys", "/opt", sys.base_prefix, sys.prefix)
OWN = ("/workspace", "/tmp", "/dev/shm", "/dev/pts", "/run/kernel")
"""Folders that a kernel may write to."""
MOST_BYTES = 1 << 16
ENOUGH = 5
SO_PEERPIDFD = 77
"""<asm-generic/socket.h>."""
PIDFD_GET_CGROUP_NAMESPACE, PIDFD_GET_TIME_FOR_CHILDREN_NAMESPACE = 0xFF01, 0xFF08
"""<linux/pidfd.h>; those between them are of other kinds."""
NS_GET_PARENT, NS_MNT_GET_NEXT, NS_MNT_GET_PREV = 0xB702, 0x8010B70B, 0x8010B70C
"""<linux/nsfs.h>."""


def _walk(top: str, skipped: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Paths and modes of what lies below a folder; neither links nor what is closed is entered."""
    folders = [top]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode) and entry.path not in skipped:
                        folders.append(entry.path)
                    yield entry.path, mode


def _own_folders() -> tuple[str, ...]:
    return (*OWN, str(Path.cwd()), os.environ.get("TMPDIR", "/tmp"))


@attack("anyone")
def write_anywhere_outside_of_the_own_folders(target: Target) -> list[str]:
    """By opening: nothing is changed."""
    own = (*_own_folders(), *target.opened)
    found: list[str] = []
    for path, mode in _walk("/", (*PROGRAMS, *own)):
        unnamed = os.O_TMPFILE if stat.S_ISDIR(mode) else 0
        if (unnamed or stat.S_ISREG(mode)) and not path.startswith(own):
            with suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | unnamed, 0o600))
                found.append(path)
        if len(found) == ENOUGH:
            break
    return found


@attack("anyone")
def find_the_secret_in_any_file(target: Target) -> str:
    """In the first part of every file that belongs to no program."""
    marker = target.marker.encode()
    for top in ("/dev/shm", "/tmp", "/"):
        for path, mode in _walk(top, PROGRAMS):
            if stat.S_ISREG(mode):
                with suppress(OSError), open(path, "rb", 0) as file:
                    if marker in file.read(MOST_BYTES):
                        return path
    return ""


@attack()
def connect_to_any_socket_file(_: Target) -> list[str]:
    """Not tried outside, where it would disturb whoever listens."""
    found = []
    for path, mode in _walk("/", (*PROGRAMS, *_own_folders())):
        if stat.S_ISSOCK(mode):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as client:
                    client.connect(path)
                    found.append(path)
    return found


@attack("root")
def write_to_any_file_of_proc_that_is_not_ones_own(_: Target) -> list[str]:
    """Those about pressure are everybody's: what is written there is a wish to be told of it."""
    skipped = ("/proc/pressure", *(f"/proc/{name}" for name in _own_processes()))
    found: list[str] = []
    for path, mode in _walk("/proc", skipped):
        if stat.S_ISREG(mode) and not path.startswith(skipped):
            with suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                found.append(path)
        if len(found) == ENOUGH:
            break
    return found


def _own_processes() -> list[str]:
    """Below /proc: the first, the reading one, and those above that."""
    pids, pid = ["1", "self", "thread-self"], os.getpid()
    while pid > 1:
        pids.append(str(pid))
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return pids


@attack("anyone")
def look_into_any_process_that_is_not_ones_own(_: Target) -> list[str]:
    own = set(_own_processes()) - {"1"}
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name not in own:
            for name in ("environ", "maps", "exe", "stack", "auxv"):
                with suppress(OSError), open(process / name, "rb", 0) as file:
                    if file.read(1):
                        found.append(f"{process.name}/{name}")
    return found[:ENOUGH]


@attack()
def open_any_device_of_the_machine(target: Target) -> list[str]:
    """Also those that cannot be listed. Not tried outside: opening some has effects."""
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
    names = {
        *("kvm", "fuse", "net/tun", "userfaultfd", "vhost-net", "vhost-vsock", "uinput", "kmsg"),
        *("loop-control", "mapper/control", "autofs", "hpet", "rtc0", "port", "mem", "vda", "sda"),
        *("cpu_dma_latency", "snapshot", "btrfs-control", "vsock", "console", "nvram", "mcelog"),
    }
    names |= {path.removeprefix("/dev/") for path, _ in _walk("/dev", ("/dev/pts", "/dev/shm"))}
    harmless |= {path.removeprefix("/dev/") for path in target.opened}
    found = []
    for name in names - harmless:
        path = Path("/dev", name)
        with suppress(OSError):
            kind = path.lstat().st_mode
            if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
                found.append(name)
    return found


@attack("anyone")
def hold_whoever_is_at_the_other_end_of_a_socket(target: Target) -> list[str]:
    """Linux hands out a handle of that process; a kernel's other end is the server."""
    found = []
    for sock in _connections(target):
        with sock, suppress(OSError):
            (pidfd,) = array.array("i", sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4))
            if _process_of(pidfd) in (os.getpid(), os.getppid()):
                continue
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, 0)
                found.append("signal")
            for kind in range(
                PIDFD_GET_CGROUP_NAMESPACE, PIDFD_GET_TIME_FOR_CHILDREN_NAMESPACE + 1
            ):
                with suppress(OSError):
                    os.close(fcntl.ioctl(pidfd, kind, 0))
                    found.append(f"namespace {kind:#x}")
            with suppress(OSError):
                os.close(syscall(target, "pidfd_getfd", pidfd, 0, 0))
                found.append("descriptor")
    return found


def _process_of(pidfd: int) -> int:
    """Its number here; 0 or less for one of elsewhere."""
    with suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return 0


def _connections(target: Target) -> Iterator[socket.socket]:
    """Those that were handed down to this process, and one to a server of the host."""
    with suppress(OSError):
        client = socket.socket(socket.AF_UNIX)
        client.connect(target.unix)
        yield client
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield socket.socket(fileno=os.dup(int(name)))


@attack("root")
def walk_from_the_own_namespaces_to_others(_: Target) -> list[str]:
    """To the parents of those of processes and users, and to other mount namespaces."""
    found = []
    for name, request in (
        ("pid", NS_GET_PARENT),
        ("user", NS_GET_PARENT),
        ("mnt", NS_MNT_GET_NEXT),
        ("mnt", NS_MNT_GET_PREV),
    ):
        with suppress(OSError):
            own = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
            argument: Any = 0 if request == NS_GET_PARENT else bytearray(16)
            fcntl.ioctl(own, request, argument)
            found.append(f"{name} {request:#x}")
    return found


@attack()
def change_a_program_through_its_mapping(_: Target) -> bool:
    """Linux lets a process write to its own memory past its protection."""
    path = os.path.realpath("/proc/self/exe")
    with open(path, "rb") as file:
        before = file.read(16)
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
            with mmap.mmap(file.fileno(), 4096, flags, mmap.PROT_READ):
                for address in _beginnings(path):
                    with suppress(OSError), open("/proc/self/mem", "r+b", 0) as memory:
                        memory.seek(address)
                        memory.write(b"ESCAPED")
        file.seek(0)
        return file.read(16) != before


def _beginnings(path: str) -> list[int]:
    """Where the start of a file is mapped."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [row[0] for row in rows if int(row[2], 16) == 0 and row[-1] == path]
    return [int(span.split("-")[0], 16) for span in spans]


@attack()
def broadcast_to_the_network(_: Target) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        return sock.sendto(b"x", ("255.255.255.255", 9)) == 1


@attack("anyone")
def leave_a_file_where_a_later_session_finds_it(_: Target) -> list[str]:
    """Where packages and programs keep what outlives them."""
    found = []
    for folder in ("/var/cache", "/var/tmp", "/run", "/var/lib", "/run/lock", "/home"):
        with suppress(OSError):
            os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600))
            found.append(folder)
    return found


@attack("maybe")
def read_who_the_users_of_the_host_are(_: Target) -> list[str]:
    """Accounts beside those that every sandbox names."""
    known = {"root", "kernel", "nobody"}
    accounts = Path("/etc/passwd").read_text().splitlines()
    return [line for line in accounts if line.split(":")[0] not in known][:ENOUGH]
