"""podman or docker on this machine, and what its containers enforce."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.process import find_program, foreign_environment
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import NO_GRANTS, ContainerOptions, Grants, SandboxReport
from kernel_mcp.sandbox.remedies import AT_OWN_RISK, install_hint

ENGINES = ("podman", "docker")
"""Engines in order of preference: podman requires no daemon."""
LABEL = "kernel-mcp.server"
BUILD_HINT = "kernel-mcp image build"
ANSWER_S = 30.0
SWEEP_S = 10.0
"""Time limit in seconds for each of two commands, while a client waits."""
logger = logging.getLogger(__name__)
_NAME = re.compile(r"kernel-mcp-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine on this machine."""

    kind: str
    program: str
    runtime: str = ""

    @classmethod
    def find(cls, options: ContainerOptions) -> Engine:
        """Return the engine of the options; for `auto`, the first that is installed.

        Raises SandboxUnavailable.
        """
        wanted = ENGINES if options.engine == "auto" else (options.engine,)
        for kind in wanted:
            program = find_program(kind)
            if program is not None:
                return cls(kind, program, options.runtime)
        names = " nor ".join(wanted)
        raise SandboxUnavailable(
            f"{'neither ' if len(wanted) > 1 else ''}{names} is {'' if len(wanted) > 1 else 'not '}"
            f"installed, which `--sandbox container` needs. {install_hint(wanted[0])}"
        )

    @property
    def rootless(self) -> bool:
        """Return True if an ordinary user runs podman: containers have a user namespace."""
        return self.kind == "podman" and os.geteuid() != 0

    @property
    def processors(self) -> int:
        """Number of processors to which containers can be limited; 0 if they cannot be."""
        if self.rootless and "cpu" not in _delegated(os.geteuid()):
            return 0
        return os.cpu_count() or 1

    def command(self, *words: str) -> list[str]:
        """Return a command line of this engine."""
        runtime = ["--runtime", self.runtime] if self.runtime and self.kind == "podman" else []
        return [self.program, *runtime, *words]

    def ask(self, *words: str, patience_s: float = ANSWER_S) -> subprocess.CompletedProcess[str]:
        """Run a short command; blocks. Raises SandboxUnavailable after `patience_s` seconds."""
        try:
            return subprocess.run(
                self.command(*words),
                env=foreign_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=patience_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as reason:
            raise SandboxUnavailable(f"{self.kind} does not answer: {reason}") from reason

    def require_image(self, image: str) -> None:
        """Raise SandboxUnavailable if the engine does not work or does not have the image."""
        done = self.ask("image", "inspect", "--format", "{{.Id}}", image)
        if done.returncode == 0:
            return
        said = " ".join(done.stderr.split())[-300:]
        if "no such image" in said.lower() or "not known" in said.lower():
            raise SandboxUnavailable(
                f"{self.kind} has no image {image!r} for kernels to run in; build it with: "
                f"{BUILD_HINT} --engine {self.kind}"
            )
        raise SandboxUnavailable(
            f"{self.kind} cannot be used here (it said: {said or 'nothing'}). {AT_OWN_RISK}"
        )

    def sweep(self) -> None:
        """Remove the containers left by dead servers in this pid namespace.

        If the engine is too slow, a warning is logged, and the next start tries again.
        """
        every = ("ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.ID}} {{.Names}}")
        dead = []
        try:
            for line in self.ask(*every, patience_s=SWEEP_S).stdout.splitlines():
                number, _, name = line.partition(" ")
                if _left_by_a_dead_server(name):
                    dead.append(number)
            if dead:
                self.ask("rm", "--force", *dead, patience_s=SWEEP_S)
        except SandboxUnavailable as reason:
            by_hand = f"; `{self.kind} rm --force {' '.join(dead)}` does it" if dead else ""
            logger.warning("containers of dead servers were not removed: %s%s", reason, by_hand)


def container_name() -> str:
    """Return a new container name with pid namespace, pid and start time of this server."""
    pid = os.getpid()
    return f"kernel-mcp-{_namespace()}-{pid}-{_began(pid)}-{secrets.token_hex(4)}"


def nameable(path: str) -> bool:
    """Return True if command lines of engines can express a path: no comma, quote or newline."""
    return not any(letter in path for letter in ',"\n\r')


def mount(source: Path | str, target: str, *, writable: bool = False) -> Sequence[str]:
    """Return the options that bind a path. Raises ValueError if it is not `nameable`."""
    if not nameable(f"{source}{target}"):
        raise ValueError(f"{source}: docker and podman cannot mount a path with a comma or a quote")
    return ("--mount", f"type=bind,src={source},dst={target}{'' if writable else ',readonly'}")


def _delegated(user: int) -> list[str]:
    """Return the cgroup controllers that systemd delegates to a user, for rootless podman."""
    try:
        return Path(_USERS.format(user)).read_text().split()
    except OSError:
        return []


def _left_by_a_dead_server(name: str) -> bool:
    parts = _NAME.fullmatch(name.strip())
    if parts is None or int(parts[1]) != _namespace():
        return False
    return _began(int(parts[2])) != int(parts[3])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _began(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


_USERS = "/sys/fs/cgroup/user.slice/user-{0}.slice/user@{0}.service/cgroup.controllers"
_UNIFIED = Path("/sys/fs/cgroup/cgroup.controllers")
_SELINUX = Path("/sys/fs/selinux/enforce")


def container_report(
    engine: Engine, grants: Grants = NO_GRANTS, *, own_user: bool
) -> SandboxReport:
    """Return the report of a container sandbox.

    With `own_user`, each session runs as its own host user.
    """
    enforced = [
        f"a container of its own for each kernel ({engine.kind})",
        *grants.reach("the interpreter and its packages"),
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
        limited = "memory, processes and processors" if engine.processors else "memory, processes"
        enforced.append(f"{limited} limited by control groups")
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
        # the daemon, which runs as root, manages them
        own_groups=engine.kind == "docker" and os.geteuid() != 0,
    )
