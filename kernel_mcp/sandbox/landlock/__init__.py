"""Kernels under Landlock: file rules, closed network, two system call filters, no namespaces.

This is weaker than bubblewrap, but requires neither root nor user namespaces. Paths are the host's
own. A root server runs each session as a host user of its own.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import platform
import resource
import sys
from dataclasses import replace
from pathlib import Path

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import SCRATCH, Identity, scratch_folder
from kernel_mcp.linux.proc import threads_of_user
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    BY_RULES,
    NO_GRANTS,
    Grants,
    GuestPaths,
    Passed,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
    listed,
)
from kernel_mcp.sandbox.confinement import CAP_DAC_READ_SEARCH, ExpectedConfinement, user_of
from kernel_mcp.sandbox.landlock.rules import (
    DEVICE,
    RUN,
    WRITE,
    Access,
    Ruleset,
    allow_required,
    allow_system,
    closed_folder,
    compile_landlock_filter,
    unavailable,
)
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.users import IdentityPool, KernelUsers, reservable_ids
from kernel_mcp.units import GIB
from kernel_specs.restricted.confine import PENDING_SIGNALS, RESERVED_ADDRESSES


def landlock_report(grants: Grants = NO_GRANTS, *, own_user: bool) -> SandboxReport:
    """Return the report of the Landlock sandbox.

    With `own_user`, each session runs as its own host user.
    """
    user = (
        "a host user id of its own for each session, no new privileges"
        if own_user
        else "no capabilities, no new privileges"
    )
    return SandboxReport(
        backend="landlock",
        enforced=(*_enforced(grants), user),
        gaps=(*_GAPS, *(_OWN_USER_GAPS if own_user else _SHARED_USER_GAPS)),
        unpromised=_UNPROMISED | ({"no capabilities"} if own_user else frozenset()),
    )


_UNPROMISED = frozenset({"own namespaces", "/tmp limited"})


def _enforced(grants: Grants) -> tuple[str, ...]:
    own = ["the workspace", "the folder of its sockets", "one for temporary files"]
    seen = "`mounts` without known secrets, " if grants.mounts else ""
    return (
        "nothing can be connected to: internet sockets are refused, Unix sockets only listen",
        f"writable: {listed([*own, *grants.writable])}, no other",
        (
            f"readable: {seen}the system's programs, the interpreter and its packages, few files "
            "of /etc, facts about the machine and the kernel's main process in /proc; no other "
            "contents"
        ),
        *grants.at_devices,
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
        "to Unix sockets, multiprocessing queues, pools and locks, terminals (pty), new sessions "
        "and process groups, inotify, extended attributes, the passwd database, /proc of child "
        "processes"
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
        "when a folder above the kernel's files is closed to others (such as /root), or "
        "folders are mounted, the kernel keeps the capability CAP_DAC_READ_SEARCH; Landlock's "
        "rules still decide what it can open"
    ),
)


_ENTER = BOOT_FOLDER / "landlock" / "enter.py"
ADDRESS_SPACE_RESERVE = 1 * GIB
"""Bytes of address space above the memory limit; later the kernel itself sets a lower limit."""


def landlock_available() -> str | None:
    """Return why this backend cannot be used here, or None if it can."""
    if architecture(platform.machine()) is None:
        return (
            f"there is no system call filter for {platform.machine()} machines; kernel-mcp can "
            "sandbox on x86_64 and aarch64"
        )
    return unavailable()


class LandlockSandbox(KernelUsers):
    """Runs each kernel in a Landlock domain of its own; the started process becomes the kernel."""

    name = "landlock"
    forks = False
    mount_method = BY_RULES

    def __init__(
        self,
        *,
        filters: tuple[bytes, ...],
        identities: IdentityPool | None,
        boot: Path = BOOT_FOLDER,
    ) -> None:
        self._filters = filters
        self._program = _bytecode(_ENTER)
        super().__init__(identities)
        self._boot = boot

    @classmethod
    def detect(cls, boot: Path = BOOT_FOLDER) -> LandlockSandbox:
        """Return the backend for this machine. Raises SandboxUnavailable with the remedy."""
        reason = landlock_available()
        arch = architecture(platform.machine())
        if reason is not None or arch is None:
            raise SandboxUnavailable(
                f"the landlock sandbox cannot be used: {reason}. `--sandbox none` runs kernels "
                "unconfined, at your own risk."
            )
        identities = reservable_ids()
        own_user = identities is not None
        return cls(
            filters=(compile_filter(arch), compile_landlock_filter(arch, own_user=own_user)),
            identities=identities,
            boot=boot,
        )

    def guest_paths(self, workspace: Path, sockets: Path) -> GuestPaths:
        """Return the host's own paths; temporary files go to a folder beside the sockets."""
        return GuestPaths(
            workspace=str(workspace),
            sockets=str(sockets),
            boot=str(self._boot),
            tmp=str(sockets / SCRATCH),
            own_process_count=self._identities is not None,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """Return the command of an interpreter that restricts itself by rules and executes `argv`.

        It is killed when this process ends.
        """
        scratch = scratch_folder(request.sockets, identity)
        with Passed() as passed:
            mounted = request.folders.rules
            rules = Ruleset() if mounted < 0 else Ruleset(os.dup(mounted))
            passed.add(rules.fd)
            allow_system(rules)
            for device in request.devices:
                rules.allow(device.guest, DEVICE)
            allow_required(rules, (*request.readonly, self._boot), RUN)
            allow_required(rules, (request.workspace, request.sockets, scratch), WRITE)
            # import lists the folder that contains the package
            rules.allow(str(self._boot.parent), Access.READ_DIR)
            options = ["--ruleset", str(rules.fd), "--parent", str(os.getpid())]
            program = f"/proc/self/fd/{passed.file(self._program)}"
            for calls in self._filters:
                options += ["--filter", passed.file(calls)]
            for kept in request.inherit:
                options += ["--keep", str(kept)]
            for kind, (soft, hard) in resource_limits(request.limits, identity).items():
                most = _no_more_than_own(kind, hard)
                options += ["--limit", f"{kind}:{min(soft, most)}:{most}"]
            options += self._user_options(request, identity)
            return SandboxCommand(
                argv=[sys.executable, "-I", "-S", "-B", program, *options, "--", *request.argv],
                pass_fds=[*passed.keep(), *request.inherit],
                env={**request.env, "TMPDIR": str(scratch)},
            )

    def expected_confinement(
        self, identity: Identity | None, *, forked: bool = False
    ) -> ExpectedConfinement:
        """Return the expected user and filters; /proc does not show the rules of Landlock."""
        kept = 0 if identity is None else CAP_DAC_READ_SEARCH
        return ExpectedConfinement(user_of(identity), filters=len(self._filters), capabilities=kept)

    def report(self, grants: Grants = NO_GRANTS) -> SandboxReport:
        """Return the guarantees and gaps of Landlock and the filters on this host."""
        report = landlock_report(grants, own_user=self._identities is not None)
        return replace(report, listable=(self._boot.parent,))

    def _user_options(self, request: SandboxRequest, identity: Identity | None) -> list[str]:
        if identity is None:
            return ["--uid", "-1", "--search", "0"]
        needed = [
            *(*request.readonly, self._boot, request.workspace, request.sockets),
            Path(request.argv[0]),
        ]
        closed = closed_folder(needed, identity)
        if closed is None and request.folders.rules >= 0:
            closed = "the mounted folders"
        if closed is not None and not _may_search_everywhere():
            raise LaunchError(
                f"kernels of a root server run as user ids of their own, which may not enter "
                f"{closed}. Allow it with `chmod o+x {closed}`, keep the server's state, cache and "
                "interpreter elsewhere, or start the server as an ordinary user."
            )
        return ["--uid", str(identity.uid), "--search", "0" if closed is None else "1"]


def resource_limits(limits: Limits, identity: Identity | None) -> dict[int, tuple[int, int]]:
    """Return soft and hard limits for every process of a kernel, by RLIMIT_ number.

    RLIMIT_NPROC counts per user, so the threads that a shared user already runs are added. Only the
    hard RLIMIT_AS is above the soft one, by RESERVED_ADDRESSES.
    """
    found = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
    }
    if limits.open_files:
        found[resource.RLIMIT_NOFILE] = limits.open_files
    if limits.disk_bytes and limits.tmp_bytes:
        found[resource.RLIMIT_FSIZE] = max(limits.disk_bytes, limits.tmp_bytes)
    if limits.memory_bytes and limits.address_space:
        most = limits.memory_bytes + ADDRESS_SPACE_RESERVE
        found[resource.RLIMIT_DATA] = found[resource.RLIMIT_AS] = most
    if limits.pids:
        others = threads_of_user(os.geteuid()) if identity is None else 1  # 1: its watcher
        found[resource.RLIMIT_NPROC] = limits.pids + others
    above = {resource.RLIMIT_AS: RESERVED_ADDRESSES}
    return {kind: (most, most + above.get(kind, 0)) for kind, most in found.items()}


def _no_more_than_own(kind: int, value: int) -> int:
    """Return the value, or the hard limit of this process if that is lower."""
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def _bytecode(source: Path) -> bytes:
    """Return a script as the content of a .pyc file, which starts some ms faster."""
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def _may_search_everywhere() -> bool:
    """Return True if this process has CAP_DAC_READ_SEARCH, number 2 of <linux/capability.h>."""
    status = Path("/proc/self/status").read_text()
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:"))
    return bool(int(held, 16) >> 2 & 1)
