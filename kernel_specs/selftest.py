"""The half of the self-test that runs inside the sandbox.

A bare interpreter runs this source: it reads the task as JSON from standard input and prints the
results as JSON. A process forked from a template calls `gather` instead. Only small parts of the
standard library are imported, so that it starts in milliseconds.
"""

# importing pathlib would double the start-up time
# ruff: noqa: PTH108, PTH112, PTH115, PTH208

import errno
import json
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing costs more time than all other imports
    from typing import Any


def main() -> None:
    """Read the task from standard input, and print the facts as JSON."""
    json.dump(gather(json.load(sys.stdin), inherited=(0, 1, 2)), sys.stdout)


def gather(task: "dict[str, Any]", *, inherited: "tuple[int, ...]") -> "dict[str, Any]":
    """Return the results for a task; `inherited` are the descriptors that may be open."""
    status = _status()
    confined = status.get("Seccomp") == "2"
    facts = {
        "ids": [*os.getresuid(), *os.getresgid()],
        "groups": os.getgroups(),
        "status": status,
        "readable": [path for path in task["hidden"] if _readable(path)],
        "writable": [path for path in task["unwritable"] if _writable(path, confined)],
        "environment": sorted(os.environ),
        "environments": _environments(task["processes"]),
        "processes": sum(name.isdigit() for name in _names("/proc")),
        "interfaces": _interfaces(),
        "connected": [address for address in task["addresses"] if _connects(address)],
        "host_name": os.uname().nodename,
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in task["namespaces"]},
        "tmp_bytes": _size("/tmp"),
        "workspace_writable": _writable(task["workspace"], True),
        "vsock": _socket_family(40),
        "multipath": _socket_family(socket.AF_INET, 262),
        "urgent": _urgent_data(),
        "descriptors": [
            name
            for name in _names("/proc/self/fd")
            if int(name) not in inherited and _foreign(name)
        ],
    }
    # only under the filter: without it some of these calls would take effect
    if task["calls"] and confined:
        facts["calls"] = _calls(task["calls"])
    return facts


def _status() -> "dict[str, str]":
    with open("/proc/self/status") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def _readable(path: str) -> bool:
    try:
        if os.path.isdir(path):
            return bool(os.listdir(path))
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False


def _writable(folder: str, attempt: bool) -> bool:
    """Return True if a file can be made in a folder.

    Without `attempt` (no sandbox) access(2) is called and no file is made.
    """
    if not attempt:
        return os.access(folder, os.W_OK)
    path = f"{folder}/.kernel-mcp-selftest"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    os.unlink(path)
    return True


def _names(folder: str) -> "list[str]":
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _foreign(descriptor: str) -> bool:
    """Return True if a descriptor refers to anything but this process's own /proc files."""
    try:
        return not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/proc/{os.getpid()}/")
    except OSError:
        return False  # the listing itself


def _environments(known: "list[int]") -> "list[str]":
    """Return the environment, in hex, of every process that can be read.

    `known` are pids to try besides those listed in /proc.
    """
    found = []
    for name in {*map(str, known), *_names("/proc")}:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    found.append(file.read().hex())
            except OSError:
                continue
    return found


def _interfaces() -> "list[str]":
    try:
        with open("/proc/self/net/dev") as file:
            return [line.split(":")[0].strip() for line in file if ":" in line]
    except OSError:
        return []


def _connects(address: "str | list[str | int]") -> bool:
    """Connect to an abstract Unix socket (a text) or a TCP host and port (a list)."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(0.5)
            client.connect("\0" + address if isinstance(address, str) else tuple(address))
    except OSError:
        return False
    return True


def _urgent_data() -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            ours.send(b"x", socket.MSG_OOB)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, "?")
    return "sent"


def _socket_family(family: int, protocol: int = 0) -> str:
    try:
        socket.socket(family, socket.SOCK_STREAM, protocol).close()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "?")
    return "opened"


def _size(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_frsize * found.f_blocks


def _calls(numbers: "dict[str, list[int]]") -> "dict[str, str]":
    """Return the errno name of each raw system call, or `done`."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    answers = {}
    for name, call in numbers.items():
        ctypes.set_errno(0)
        result = libc.syscall(*(ctypes.c_long(value) for value in call))
        answers[name] = "done" if result != -1 else errno.errorcode.get(ctypes.get_errno(), "?")
    return answers


if __name__ == "__main__":
    main()
