"""Prove, from inside a sandboxed process, that the promised boundary is in force."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kernel_mcp.errors import SandboxUnavailable
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.run import run_confined
from kernel_mcp.sandbox.syscalls import REFUSED, architecture
from kernel_mcp.settings import Limits

_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_CAP_DAC_READ_SEARCH = 1 << 2
REFUSED_CALL = " refused"
"""How the names of checks of single system calls end."""
_UPDATE = "update bubblewrap and the Linux kernel, then run `kernel-mcp doctor`"
_REPORT = "do not use this backend here; report it as a defect with the output of this check"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing the boundary promises, whether it holds here, and what to do if not."""

    name: str
    passed: bool
    found: str
    remedy: str = _REPORT


def require_boundary(sandbox: Sandbox) -> None:
    """Let a server start only where the quick checks pass that the backend promises.

    Blocks for some 30 ms. Raises SandboxUnavailable.
    """
    excused = sandbox.report().unpromised
    failed = [
        check for check in quick_checks(sandbox) if not check.passed and check.name not in excused
    ]
    if failed:
        told = "; ".join(f"{check.name}: {check.found} ({check.remedy})" for check in failed)
        raise SandboxUnavailable(f"the {sandbox.name} sandbox does not hold here: {told}")


def quick_checks(sandbox: Sandbox) -> list[Check]:
    """The checks a server makes at start; blocks for some 30 ms.

    Raises SandboxUnavailable when the sandboxed process does not report.
    """
    return _evaluate(*_run(sandbox, calls={}))


def thorough_checks(sandbox: Sandbox) -> list[Check]:
    """The quick checks and refused system calls, one by one. Raises SandboxUnavailable."""
    calls = _refused_calls()
    expected, facts = _run(sandbox, calls=calls)
    answers = facts.get("calls", {})
    return _evaluate(expected, facts) + [
        Check(
            f"system call {name}{REFUSED_CALL}",
            answers.get(name) == "EPERM",
            answers.get(name, "not tried: there is no filter"),
        )
        for name in calls
    ]


@dataclass(frozen=True, slots=True)
class _Host:
    """What the host knows and the sandbox must not show."""

    environ: str
    namespaces: dict[str, str]
    tmp_bytes: int


def _run(sandbox: Sandbox, *, calls: dict[str, list[int]]) -> tuple[_Host, dict[str, Any]]:
    limits = Limits()
    host = _Host(
        environ=Path("/proc/self/environ").read_bytes().hex(),
        namespaces={name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},  # noqa: PTH115
        tmp_bytes=limits.tmp_bytes,
    )
    source = resources.files("kernel_mcp.sandbox").joinpath("inside.py").read_text("utf-8")
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.base_exec_prefix})
    with listeners() as addresses:
        task = {
            "hidden": ["/etc/shadow", "/etc/ssh", "/var/log", "/sys/kernel", *_at_home(prefixes)],
            "unwritable": ["/", "/usr", "/etc", "/dev", "/opt", "/run", "/var/tmp"],
            "addresses": addresses,
            "namespaces": _NAMESPACES,
            "processes": [os.getpid(), os.getppid()],
            "calls": calls,
        }
        done = run_confined(
            sandbox,
            [sys.executable, "-I", "-S", "-c", source],
            readonly=[Path(prefix) for prefix in prefixes],
            limits=limits,
            stdin=lambda paths: json.dumps({**task, "workspace": paths.workspace}),
        )
    try:
        return host, json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip()[-400:]
        raise SandboxUnavailable(
            f"the self-test could not run in the {sandbox.name} sandbox "
            f"(exit code {done.returncode}): {said}"
        ) from None


def _at_home(shown: list[str]) -> list[str]:
    """Some of the home folder, without the way to what the interpreter needs."""
    try:
        entries = [str(entry) for entry in Path.home().iterdir()]
    except (OSError, RuntimeError):
        return []
    return [entry for entry in entries if not any(path.startswith(entry) for path in shown)][:32]


@contextmanager
def listeners() -> Iterator[list[str | list[str | int]]]:
    """Servers on the host that a sandboxed process must not reach."""
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
    capabilities = {name: status.get(name, "?") for name in _CAPABILITY_SETS}
    held = _listed(f"{name} {value}" for name, value in capabilities.items() if int(value, 16))
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
        Check(
            "no capabilities",
            all(not int(value, 16) for value in capabilities.values()),
            held,
        ),
        Check(
            "no capability to change anything",
            all(not int(value, 16) & ~_CAP_DAC_READ_SEARCH for value in capabilities.values()),
            held,
        ),
        Check("no new privileges", status.get("NoNewPrivs") == "1", status.get("NoNewPrivs", "?")),
        Check("system call filter", status.get("Seccomp") == "2", f"mode {status.get('Seccomp')}"),
        Check("socket families limited", facts["vsock"] == "ENOTSUP", facts["vsock"]),
        Check("own namespaces", not shared, f"shared: {_listed(shared)}"),
        Check("other processes hidden", facts["processes"] <= 3, f"{facts['processes']} visible"),
        Check("no descriptors leaked", facts["descriptors"] <= 3, f"{facts['descriptors']} open"),
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
