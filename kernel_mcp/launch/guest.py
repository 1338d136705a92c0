"""What the kernel finds at boot: connection file, boot file, environment, command line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from kernel_mcp.config.settings import KIB, MIB
from kernel_mcp.launch.base import ConnectionInfo, KernelRequest
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import GuestPaths
from kernel_specs.restricted import confine

BOOT_VERSION = 1
CONNECTION_FILE = "connection.json"
BOOT_FILE = "boot.json"


def connection_content(connection: ConnectionInfo, guest: GuestPaths) -> dict[str, Any]:
    """The Jupyter connection file as the kernel sees it: its own path to the sockets."""
    return {
        "transport": "ipc",
        "ip": f"{guest.sockets}/k",
        "shell_port": connection.shell_port,
        "iopub_port": connection.iopub_port,
        "stdin_port": connection.stdin_port,
        "control_port": connection.control_port,
        "hb_port": connection.hb_port,
        "key": connection.key,
        "signature_scheme": connection.signature_scheme,
        "kernel_name": "restricted",
    }


def boot_content(
    request: KernelRequest, guest: GuestPaths, ready_fd: int, recorder_fd: int = -1
) -> dict[str, Any]:
    """The boot file: policy, limits and places."""
    limits = request.limits
    return {
        "version": BOOT_VERSION,
        "policy": request.policy.to_json(),
        "limits": {
            "memory_bytes": limits.memory_bytes,
            "cpus": math.ceil(limits.cpus),
            "pids": limits.pids if guest.own_process_count else 0,
            "open_files": limits.open_files,
            "file_bytes": limits.disk_bytes,
            "cpu_seconds": 0,  # RLIMIT_CPU adds up over cells: the server counts per cell instead
        },
        "workspace": guest.workspace,
        "tmp": guest.tmp,
        "layers": layer_paths(request, guest),
        "ready_fd": ready_fd,
        "recorder_fd": recorder_fd,
        "runtime": ["/usr", *map(str, request.environment.readonly)],
        "output": {"chunk_bytes": 64 * KIB, "flush_seconds": 0.05, "message_bytes": 12 * MIB},
    }


def ceilings(request: KernelRequest, guest: GuestPaths) -> dict[str, int]:
    """The most that the resource limits of a kernel may be, by the names of /proc/PID/limits.

    It has set them itself, before it loads anything, from the boot file.
    """
    limits = request.limits
    memory = limits.memory_bytes + confine.ADDRESS_SPACE_OVERHEAD + confine.MEMORY_RESERVE
    wanted = {
        "Max processes": limits.pids if guest.own_process_count else 0,
        "Max open files": limits.open_files,
        "Max file size": limits.disk_bytes,
        "Max address space": memory if limits.memory_bytes else 0,
        "Max pending signals": confine.PENDING_SIGNALS,
        "Max msgqueue size": confine.MESSAGE_QUEUE_BYTES,
    }
    return {"Max core file size": 0, **{name: most for name, most in wanted.items() if most > 0}}


def layer_paths(request: KernelRequest, guest: GuestPaths) -> list[str]:
    """Where the kernel sees the package layers of its session."""
    if not guest.layers:
        return [str(layer) for layer in request.layers]
    return [f"{guest.layers}/{number}" for number in range(len(request.layers))]


def argv(request: KernelRequest, guest: GuestPaths) -> list[str]:
    """The kernel's command line."""
    return [
        str(request.environment.python),
        *("-I", "-B", f"{guest.boot}/restricted/boot.py"),
        *("-f", f"{guest.sockets}/{CONNECTION_FILE}"),
    ]


def environment(request: KernelRequest, guest: GuestPaths) -> dict[str, str]:
    """What the interpreter starts with; nothing is passed on, and the boot sets the rest."""
    return {
        "PATH": f"{request.environment.python.parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": guest.workspace,
        "LANG": "C.UTF-8",
        "TMPDIR": guest.tmp,
    }


def write_files(
    folder: Path, contents: dict[str, dict[str, Any]], identity: Identity | None
) -> None:
    """Write JSON files that the kernel may read and only the server may change."""
    for name, content in contents.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(folder / name, flags, 0o440)
        with open(fd, "w", encoding="utf-8") as file:
            if identity is not None:
                os.fchown(fd, -1, identity.gid)
            json.dump(content, file)
