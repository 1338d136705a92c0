"""What kernels in containers are kept from, and what they are not."""

from __future__ import annotations

import os
from pathlib import Path

from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.engine import Engine

_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")
_SELINUX = Path("/sys/fs/selinux/enforce")


def container_report(engine: Engine, *, own_user: bool) -> SandboxReport:
    """The report; `own_user` when each session has a host user id to itself."""
    enforced = [
        f"a container of its own for each kernel ({engine.kind})",
        "empty network namespace",
        "only the workspace and a private /tmp are writable; the host's files are hidden",
        "own process, ipc, cgroup and host name namespaces",
        "a host user id of its own for each session, without capabilities"
        if own_user
        else "no capabilities, no new privileges",
        f"system call filters (seccomp): that of {engine.kind} and kernel-mcp's own",
        "ends with the server",
    ]
    gaps = [
        "shares the host's Linux kernel, so a kernel exploit leaves the sandbox",
        f"{engine.kind} and its OCI runtime are trusted: they start each container",
        "the mount table in /proc shows where on the host the mounted folders are",
    ]
    if engine.rootless and not _UNIFIED.exists():
        gaps.append("no control group of podman: without root it takes cgroup version 2")
    else:
        enforced.append("memory, processes and processors limited by control groups")
    if not own_user:
        gaps.append("kernels run under the server's user id; only namespaces separate them")
        gaps.append("the folder of a kernel's sockets is kept small by a watchdog only")
    if engine.kind == "docker":
        gaps.append(
            "facts about the host's Linux are readable in /proc: its boot command line, modules, "
            "the names of its symbols; docker cannot cover them, podman does"
        )
    if _SELINUX.exists():
        gaps.append("SELinux does not separate the containers (label=disable)")
    return SandboxReport(
        backend="container",
        enforced=tuple(enforced),
        gaps=tuple(gaps),
        # those of the daemon, which is root
        own_groups=engine.kind == "docker" and os.geteuid() != 0,
    )
