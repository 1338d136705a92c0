"""`start.py enter CONTROL_FD ID_MAPS`, the first process of a root server's template.

It enters a user namespace whose root is an ordinary user of the host. The namespace maps the user
ids of kernels, not the host's root. Packages are imported as that user. The processes that stay
root outside have no capability and are not visible inside.

Modules that the init needs are imported before the first fork, so that these processes share their
memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from kernel_specs import linux
from kernel_specs.template import init

_EVERYTHING = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
    | linux.CLONE_NEWNET
)
_HIDDEN = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC


def main(argv: Sequence[str]) -> int:
    """Run the template's init in a user namespace with the id maps of the second argument.

    Returns the exit code. The processes outside the namespace wait for the one inside.
    """
    # a terminal's or a kernel's SIGINT is never meant for these processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = int(argv[0])
    below = os.fork()
    if below:
        os.close(control)
        return _outlive(below)
    linux.mount("proc", "/proc", "proc", _HIDDEN)
    first = _enter([tuple(map(int, row.split(":"))) for row in argv[1].split(",")])
    if first:
        os.close(control)
        return _outlive(first)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.mount("proc", "/proc", "proc", _HIDDEN)
    return init.main(argv[:1])


def _enter(maps: Sequence[tuple[int, ...]]) -> int:
    """Enter a user namespace with these id maps, and fork there; return the result of fork(2)."""
    ask_read, ask_write = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        _write_when_asked(ask_read, ask_write, maps)
    _own_what_comes(maps[0][1])
    linux.unshare(_EVERYTHING)
    os.close(ask_read)
    os.write(ask_write, b"1")
    os.close(ask_write)
    _, status = os.waitpid(mapper, 0)
    if status != 0:
        raise RuntimeError("the id maps of the template could not be written")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    return os.fork()


def _own_what_comes(owner: int) -> None:
    """Switch to user `owner`, with all capabilities: a user namespace is charged to its creator.

    Otherwise queued signals, message queues and watches of kernels count against the host's root.
    """
    linux.prctl(linux.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    linux.use_capabilities()


def _write_when_asked(ask_read: int, ask_write: int, maps: Sequence[tuple[int, ...]]) -> None:
    """Write the id maps on request, from the old user namespace, whose root may; then exit."""
    os.close(ask_write)
    failed = 1
    try:
        if os.read(ask_read, 1):
            processes = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
            linux.write_maps(str(os.getppid()), maps, processes)
            failed = 0
    finally:
        os._exit(failed)


def _outlive(first: int) -> int:
    """Wait for a child, without capabilities; return its exit code.

    The child is killed with this process (PDEATHSIG).

    The first of two such processes is PID 1, whose end kills everything below. It keeps the user
    of bubblewrap, whose own death signal reaches no other.
    """
    linux.set_name("kernel-outer")
    linux.clear_capabilities()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) & 0x7F
