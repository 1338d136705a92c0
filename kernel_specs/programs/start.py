"""Entry point of any Jupyter kernel: `python -I -S -B start.py -f CONNECTION_FILE`.

It confines this process, reports that it is ready, and waits. The host inspects the process, then
closes the channel. Only then the process executes the kernel's own program, named in program.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from pathlib import Path

EXIT_CODE = 70  # EX_SOFTWARE
MEMORY_SHARE = 0.9
"""Part of a session's memory that one process may have, so that the language reports an error
before the kernel is killed."""


def main(argv: list[str]) -> int:
    """Become the kernel's program; return 70 if it cannot start."""
    folder = str(Path(__file__).resolve().parent.parent.parent)
    sys.path.insert(0, folder)
    from kernel_specs.restricted import config, confine

    boot = config.BootConfig()
    try:
        connection_file = Path(argv[argv.index("-f") + 1]).absolute()
        boot = config.load(connection_file)
        program = json.loads(connection_file.with_name("program.json").read_bytes())
        confine.confine(boot)
        _limit_memory(boot.limits.memory_bytes)
        os.environ["XDG_RUNTIME_DIR"] = boot.tmp
        os.environ.update({**program["env"], **boot.variables})
        for fd in (boot.ready_fd, boot.ring_fd):
            os.set_inheritable(fd, False)
        with socket.socket(fileno=os.dup(boot.ready_fd)) as channel:
            channel.send(json.dumps({"ready": True, "pid": os.getpid()}).encode())
            while channel.recv(64):  # ends when the host closes the channel
                pass
        os.execv(program["argv"][0], program["argv"])  # no shell is meant
    except Exception as error:  # noqa: BLE001  # any error is reported to the host
        _report(boot.ready_fd, f"{type(error).__name__}: {error}")
    return EXIT_CODE


def _limit_memory(memory_bytes: int) -> None:
    """Raise the soft limit of address space, which only Python renews; limit the data instead."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if memory_bytes > 0:
        most = int(memory_bytes * MEMORY_SHARE)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _report(fd: int, error: str) -> None:
    print(error, file=sys.__stderr__)
    if fd >= 0:
        # the host has closed its end if the program itself cannot be executed
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as channel:
            channel.send(json.dumps({"ready": False, "error": error}).encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
