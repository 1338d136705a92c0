"""Kernels under Landlock: file rules, closed network, two system call filters, no namespaces.

Weaker than bubblewrap, and for machines where nothing stronger works: it takes neither root nor
user namespaces. Paths are the host's own. A root server gives each kernel a host user id.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path

from kernel_mcp.config.settings import GIB, Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.linux.folders import SCRATCH, Identity, scratch_folder
from kernel_mcp.linux.syscalls import architecture
from kernel_mcp.sandbox.base import (
    BOOT_FOLDER,
    GuestPaths,
    SandboxCommand,
    SandboxReport,
    SandboxRequest,
)
from kernel_mcp.sandbox.identity import IdentityPool
from kernel_mcp.sandbox.landlock_abi import Access, Ruleset, unavailable
from kernel_mcp.sandbox.landlock_filter import compile_landlock_filter
from kernel_mcp.sandbox.landlock_report import landlock_report
from kernel_mcp.sandbox.landlock_rules import (
    RUN,
    WRITE,
    allow_required,
    allow_system,
    closed_folder,
)
from kernel_mcp.sandbox.passed import Passed
from kernel_mcp.sandbox.promise import CAP_DAC_READ_SEARCH, Promise, user_of
from kernel_mcp.sandbox.seccomp import compile_filter
from kernel_mcp.sandbox.users import KernelUsers, reservable_ids
from kernel_specs.restricted.confine import PENDING_SIGNALS

_ENTER = BOOT_FOLDER / "landlock" / "enter.py"
ADDRESS_SPACE_RESERVE = 1 * GIB
"""Above the memory limit: the kernel itself sets a lower one, which counts what numpy maps."""


def landlock_available() -> str | None:
    """Why this backend cannot be used here, or None when it can."""
    if architecture(platform.machine()) is None:
        return (
            f"there is no system call filter for {platform.machine()} machines; kernel-mcp can "
            "sandbox on x86_64 and aarch64"
        )
    return unavailable()


class LandlockSandbox(KernelUsers):
    """One Landlock domain per kernel; the started process is the kernel itself."""

    name = "landlock"
    forks = False

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
        """The backend as this machine allows it. Raises SandboxUnavailable with the remedy."""
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
        """The host's own paths; temporary files go to a folder beside the sockets."""
        return GuestPaths(
            workspace=str(workspace),
            sockets=str(sockets),
            boot=str(self._boot),
            tmp=str(sockets / SCRATCH),
            own_process_count=self._identities is not None,
        )

    def command(self, request: SandboxRequest, identity: Identity | None) -> SandboxCommand:
        """A bare interpreter that restricts itself with prepared rules and executes `argv`.

        Has to be started by this process, which it dies with.
        """
        scratch = scratch_folder(request.sockets, identity)
        with Passed() as passed:
            rules = Ruleset()
            passed.add(rules.fd)
            allow_system(rules)
            allow_required(rules, (*request.readonly, self._boot), RUN)
            allow_required(rules, (request.workspace, request.sockets, scratch), WRITE)
            # import looks for the package by listing the folder it is in
            rules.allow(str(self._boot.parent), Access.READ_DIR)
            options = ["--ruleset", str(rules.fd), "--parent", str(os.getpid())]
            program = f"/proc/self/fd/{passed.file(self._program)}"
            for calls in self._filters:
                options += ["--filter", passed.file(calls)]
            for kept in request.inherit:
                options += ["--keep", str(kept)]
            for kind, value in resource_limits(request.limits, identity).items():
                options += ["--limit", f"{kind}:{_no_more_than_own(kind, value)}"]
            options += self._user_options(request, identity)
            return SandboxCommand(
                argv=[sys.executable, "-I", "-S", "-B", program, *options, "--", *request.argv],
                pass_fds=[*passed.keep(), *request.inherit],
                env={**request.env, "TMPDIR": str(scratch)},
            )

    def promise(self, identity: Identity | None, *, forked: bool = False) -> Promise:
        """Its user and filters; the rules of Landlock itself do not show in /proc."""
        kept = 0 if identity is None else CAP_DAC_READ_SEARCH
        return Promise(user_of(identity), filters=len(self._filters), capabilities=kept)

    def report(self) -> SandboxReport:
        """What Landlock and the filters put in force here."""
        return landlock_report(own_user=self._identities is not None)

    def _user_options(self, request: SandboxRequest, identity: Identity | None) -> list[str]:
        if identity is None:
            return ["--uid", "-1", "--search", "0"]
        needed = [
            *(*request.readonly, self._boot, request.workspace, request.sockets),
            Path(request.argv[0]),
        ]
        closed = closed_folder(needed, identity)
        if closed is not None and not _may_search_everywhere():
            raise LaunchError(
                f"kernels of a root server run as user ids of their own, which may not enter "
                f"{closed}. Allow it with `chmod o+x {closed}`, keep the server's state, cache and "
                "interpreter elsewhere, or start the server as an ordinary user."
            )
        return ["--uid", str(identity.uid), "--search", "0" if closed is None else "1"]


def resource_limits(limits: Limits, identity: Identity | None) -> dict[int, int]:
    """Ceilings for every process of a kernel, by RLIMIT_ number.

    Linux counts processes per user: those that a shared user runs already are added.
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
    if limits.memory_bytes:
        found[resource.RLIMIT_AS] = limits.memory_bytes + ADDRESS_SPACE_RESERVE
    if limits.pids:
        others = _threads_of(os.geteuid()) if identity is None else 1  # its watcher
        found[resource.RLIMIT_NPROC] = limits.pids + others
    return found


def _no_more_than_own(kind: int, value: int) -> int:
    """The value, or the hard limit of this process where that is lower."""
    most = resource.getrlimit(kind)[1]
    return value if most == resource.RLIM_INFINITY else min(value, most)


def _bytecode(source: Path) -> bytes:
    """A script as the content of a .pyc file, which an interpreter starts some ms sooner."""
    code = compile(source.read_bytes(), str(source), "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def _threads_of(uid: int) -> int:
    """How many threads a user runs: a folder of /proc has a link for each of its folders."""
    count = 0
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with suppress(FileNotFoundError, ProcessLookupError):
                    found = Path(entry.path, "task").stat()
                    count += found.st_nlink - 2 if found.st_uid == uid else 0
    return count


def _may_search_everywhere() -> bool:
    """Whether this process holds CAP_DAC_READ_SEARCH, number 2 of <linux/capability.h>."""
    status = Path("/proc/self/status").read_text()
    held = next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm:"))
    return bool(int(held, 16) >> 2 & 1)
