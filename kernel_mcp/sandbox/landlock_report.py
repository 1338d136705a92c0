"""What kernels under Landlock are kept from, and what they are not."""

from __future__ import annotations

from kernel_mcp.sandbox.base import SandboxReport


def landlock_report(*, own_user: bool) -> SandboxReport:
    """The report; `own_user` when each kernel has a host user id to itself."""
    user = (
        "a host user id of its own for each session, no new privileges"
        if own_user
        else "no capabilities, no new privileges"
    )
    return SandboxReport(
        backend="landlock",
        enforced=(*_ENFORCED, user),
        gaps=(*_GAPS, *(_OWN_USER_GAPS if own_user else _SHARED_USER_GAPS)),
        unpromised=_UNPROMISED | ({"no capabilities"} if own_user else frozenset()),
    )


_UNPROMISED = frozenset({"own namespaces", "/tmp limited"})


_ENFORCED = (
    "nothing can be connected to: internet sockets are refused, Unix sockets only listen",
    "writable: the workspace, the folder of its sockets and one for temporary files, no other",
    (
        "readable: the system's programs, the interpreter and its packages, few files of /etc, "
        "facts about the machine and the kernel's main process in /proc; no other contents"
    ),
    "signals, tracing, limits and scheduling reach only the kernel's own processes",
    "system call filters (seccomp)",
    "ends with the server, with all its processes",
)
_GAPS = (
    "shares the host's Linux kernel, so a kernel exploit leaves the sandbox",
    (
        "no file namespace: whether a path that the server's user can reach exists, and its owner, "
        "size, times and link target, can be asked for one by one (no listing, no contents)"
    ),
    "the names of files in the folder that kernel-mcp is installed in can be listed",
    (
        "no process namespace: which process ids exist can be probed, and of each its session, "
        "process group, priority, processors and processor time (command lines and environments "
        "are hidden)"
    ),
    (
        "no network, IPC or host name namespace: the host's name shows, and free names of abstract "
        "Unix sockets can be taken and listened on"
    ),
    (
        "/tmp and /dev/shm cannot be used; TMPDIR is a private folder on the disk of the server's "
        "run folder, which only a watchdog keeps small"
    ),
    (
        "does not work inside: internet and datagram sockets (not even to localhost), connecting "
        "to Unix sockets, multiprocessing queues, pools and locks, System V IPC, terminals (pty), "
        "new sessions and process groups, inotify, extended attributes, the passwd database, /proc "
        "of child processes"
    ),
)
_SHARED_USER_GAPS = (
    "chmod and changes of file times succeed without effect",
    (
        "kernels run under the server's user: Linux counts processes, pending signals, pipe memory "
        "and descriptors on their way of all of them together, and only Landlock separates their "
        "files"
    ),
)
_OWN_USER_GAPS = (
    (
        "when a folder above the kernel's files is closed to others (such as /root), the kernel "
        "keeps the capability CAP_DAC_READ_SEARCH; Landlock's rules still decide what it can open"
    ),
)
