"""The self-test: run a process in a sandbox and check from inside that the boundary holds."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.linux.folders import home_folder
from kernel_mcp.linux.syscalls import REFUSED, architecture
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import GuestPaths, Sandbox, SandboxRequest
from kernel_mcp.sandbox.confinement import CAP_DAC_READ_SEARCH, gainable

SELF_TEST_S = 120.0
"""Time limit in seconds for a command that takes some 30 ms on an idle machine.

It is long, so that a busy machine does not make a start fail.
"""


def run_confined(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    readonly: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    stdin: str | Callable[[GuestPaths], str] = "",
    timeout: float = SELF_TEST_S,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` in the sandbox with an empty workspace; blocks up to `timeout` seconds.

    `stdin` may depend on the guest paths. Raises SandboxUnavailable after the timeout.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-mcp-") as folder:
        workspace, sockets = Path(folder, "workspace"), Path(folder, "sockets")
        identity = sandbox.identity()
        try:
            if identity is not None:  # the user must be able to enter both folders below
                Path(folder).chmod(0o711)
            for made in (workspace, sockets):
                made.mkdir(mode=0o700)
                if identity is not None:
                    os.chown(made, identity.uid, identity.gid)
            command = sandbox.command(
                SandboxRequest(
                    argv=argv,
                    env=env or {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                    workspace=workspace,
                    sockets=sockets,
                    readonly=readonly,
                    limits=limits or Limits(),
                ),
                identity,
            )
            paths = sandbox.guest_paths(workspace, sockets)
            fed = stdin if isinstance(stdin, str) else stdin(paths)
            if command.detached:  # then the started process waits for the end
                os.close(command.status_fd)
            try:
                return subprocess.run(
                    command.argv,
                    env=command.env,
                    pass_fds=command.pass_fds,
                    input=fed,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout,
                    check=False,
                    # Ctrl-C in a terminal would end bwrap only: its child is an init and keeps
                    # waiting
                    start_new_session=True,
                )
            except subprocess.TimeoutExpired as late:
                raise SandboxUnavailable(
                    f"a command in the {sandbox.name} sandbox did not end within {timeout:g} s; "
                    "the machine may be overloaded: try again"
                ) from late
            finally:
                command.close_passed()
                if command.status_fd >= 0 and not command.detached:
                    os.close(command.status_fd)
        finally:
            sandbox.release(identity)


_SYSTEM = tuple(map(Path, ("/etc/shadow", "/etc/ssh", "/var/log", "/sys/kernel")))
_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
REFUSED_CALL = " refused"
"""Suffix of the names of checks for single system calls."""
_UPDATE = "update bubblewrap and the Linux kernel, then run `kernel-mcp doctor`"
_REPORT = "do not use this backend here; report it as a defect with the output of this check"


@dataclass(frozen=True, slots=True)
class Check:
    """One guarantee of the boundary: if it holds here, what was found, and the remedy.

    A check that was not `tried` has not passed, and says nothing about the boundary.
    """

    name: str
    passed: bool
    found: str
    remedy: str = _REPORT
    tried: bool = True


def require_boundary(sandbox: Sandbox) -> None:
    """Run the quick checks and require the guaranteed ones; blocks some 30 ms.

    Raises SandboxUnavailable.
    """
    excused = sandbox.report().unpromised
    failed = [
        check for check in quick_checks(sandbox) if not check.passed and check.name not in excused
    ]
    if failed:
        told = "; ".join(f"{check.name}: {check.found} ({check.remedy})" for check in failed)
        raise SandboxUnavailable(f"the {sandbox.name} sandbox does not hold here: {told}")


def quick_checks(sandbox: Sandbox) -> list[Check]:
    """Run the checks of a server's start; blocks some 30 ms. Raises SandboxUnavailable."""
    return _run(sandbox, calls=False)


def thorough_checks(sandbox: Sandbox) -> list[Check]:
    """Run the quick checks and try refused system calls one by one. Raises SandboxUnavailable."""
    return _run(sandbox, calls=True)


@dataclass(frozen=True, slots=True)
class _Host:
    """Facts about the host that the sandbox must not show."""

    environ: str
    namespaces: dict[str, str]
    tmp_bytes: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """One run of the self-test: the task for `kernel_specs.selftest`, and facts to compare with."""

    task: dict[str, Any]
    _host: _Host

    def checks(self, facts: dict[str, Any]) -> list[Check]:
        """Return the checks, judged by the facts that the self-test has sent.

        Raises KeyError, TypeError, ValueError for malformed facts.
        """
        found = _evaluate(self._host, facts)
        answers = facts.get("calls", {})
        return found + [
            Check(
                f"system call {name}{REFUSED_CALL}",
                answers.get(name) == "EPERM",
                str(answers.get(name, "not tried: there is no filter")),
            )
            for name in self.task["calls"]
        ]


@contextmanager
def prepared_self_test(
    shown: Sequence[Path], *, calls: bool, limits: Limits | None = None
) -> Iterator[SelfTest]:
    """Yield the self-test of a sandbox that shows the folders `shown`; blocks for a millisecond.

    With `calls` it also tries the refused system calls. Inside the block, sockets listen which it
    must not reach. The caller adds `workspace`, the guest's path, to the task.
    """
    host = _Host(
        environ=Path("/proc/self/environ").read_bytes().hex(),
        namespaces={name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},  # noqa: PTH115
        tmp_bytes=(limits or Limits()).tmp_bytes,
    )
    with _listeners() as addresses:
        task = {
            "hidden": _hidden(shown),
            "unwritable": ["/", "/usr", "/etc", "/dev", "/opt", "/run", "/var/tmp"],
            "addresses": addresses,
            "namespaces": _NAMESPACES,
            "processes": [os.getpid(), os.getppid()],
            "calls": _refused_calls() if calls else {},
        }
        yield SelfTest(task, host)


def self_test_source() -> str:
    """Return the source of the half that runs inside the sandbox."""
    return resources.files("kernel_specs").joinpath("selftest.py").read_text("utf-8")


def _run(sandbox: Sandbox, *, calls: bool) -> list[Check]:
    source = self_test_source()
    limits = Limits()
    prefixes = [Path(path) for path in {sys.prefix, sys.base_prefix, sys.base_exec_prefix}]
    shown = [*prefixes, *sandbox.report().listable]
    with prepared_self_test(shown, calls=calls, limits=limits) as probe:
        done = run_confined(
            sandbox,
            [sys.executable, "-I", "-S", "-c", source],
            readonly=sorted(prefixes),
            limits=limits,
            stdin=lambda paths: json.dumps({**probe.task, "workspace": paths.workspace}),
        )
        try:
            return probe.checks(json.loads(done.stdout))
        except (ValueError, KeyError, TypeError):
            said = done.stderr.strip()[-400:]
            raise SandboxUnavailable(
                f"the self-test could not run in the {sandbox.name} sandbox "
                f"(exit code {done.returncode}): {said}"
            ) from None


def _hidden(shown: Sequence[Path]) -> list[str]:
    """Return paths that must be hidden: of the system, and up to 32 entries of the home folder.

    Paths that lead to the folders `shown` are skipped: folders above them, and symlinks.
    """
    places = [place for path in shown for place in (path, Path(os.path.realpath(path)))]

    def leads_there(entry: Path) -> bool:
        target = Path(os.path.realpath(entry)) if entry.is_symlink() else None
        return any(
            place.is_relative_to(entry) or (target is not None and target.is_relative_to(place))
            for place in places
        )

    home = home_folder()
    try:
        entries = sorted(home.iterdir()) if home is not None else []
    except OSError:
        entries = []
    system = [str(each) for each in _SYSTEM if not leads_there(each)]
    return system + [str(each) for each in entries if not leads_there(each)][:32]


@contextmanager
def _listeners() -> Iterator[list[str | list[str | int]]]:
    """Listen on the host; yield the addresses, which a sandboxed process must not reach."""
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        name = f"kernel-mcp-{secrets.token_hex(8)}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield [name, list(tcp.getsockname())]


def _evaluate(host: _Host, facts: dict[str, Any]) -> list[Check]:
    status = facts["status"]
    shared = [name for name in _NAMESPACES if facts["namespaces"][name] == host.namespaces[name]]
    held = gainable(status)
    told = f"{held:#x}" if held else "none"
    own, server = set(facts["ids"]), {os.geteuid(), os.getegid()}
    same_user = os.geteuid() == 0 and bool(own & server)
    return [
        Check("host files hidden", not facts["readable"], _listed(facts["readable"])),
        Check("host files not writable", not facts["writable"], _listed(facts["writable"])),
        Check("workspace writable", facts["workspace_writable"], "the kernel's own folder"),
        Check(
            "server's environment hidden",
            host.environ not in facts["environments"],
            f"{len(facts['environment'])} variables of its own",
        ),
        Check("network closed", not facts["connected"], _listed(map(str, facts["connected"]))),
        Check("network empty", set(facts["interfaces"]) <= {"lo"}, _listed(facts["interfaces"])),
        Check("not root", 0 not in own and not same_user, f"user and group ids {sorted(own)}"),
        Check("no groups of the server", 0 not in facts["groups"], f"groups {facts['groups']}"),
        Check("no capabilities", not held, told),
        Check("no capability to change anything", not held & ~CAP_DAC_READ_SEARCH, told),
        Check("no new privileges", status.get("NoNewPrivs") == "1", status.get("NoNewPrivs", "?")),
        Check("system call filter", status.get("Seccomp") == "2", f"mode {status.get('Seccomp')}"),
        Check("socket families limited", facts["vsock"] == "ENOTSUP", facts["vsock"]),
        Check("socket protocols limited", facts["multipath"] != "opened", facts["multipath"]),
        Check("no urgent data on Unix sockets", facts["urgent"] != "sent", facts["urgent"]),
        Check("own namespaces", not shared, f"shared: {_listed(shared)}"),
        Check("other processes hidden", facts["processes"] <= 3, f"{facts['processes']} visible"),
        Check("no descriptors leaked", not facts["descriptors"], _listed(facts["descriptors"])),
        Check(
            "/tmp limited",
            facts["tmp_bytes"] <= host.tmp_bytes,
            f"{facts['tmp_bytes']} bytes",
            _UPDATE,
        ),
    ]


def _refused_calls() -> dict[str, list[int]]:
    arch = architecture(platform.machine())
    if arch is None:
        return {}
    return {name: [arch.numbers[name], *[-1] * 6] for name in sorted(REFUSED & set(arch.numbers))}


def _listed(values: Any) -> str:
    return ", ".join(values) or "none"
