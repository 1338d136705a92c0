"""The sandbox on the real machine: what its processes see and what they cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.sandbox.base import Sandbox, SandboxRequest
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.select import NoSandbox, select_sandbox
from kernel_mcp.sandbox.self_test import (
    quick_checks,
    require_boundary,
    run_confined,
    thorough_checks,
)
from kernel_mcp.units import MIB
from tests.integration.unprivileged import as_ordinary_user

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="compares root with an ordinary user")
RUNTIME = [Path(sys.prefix), Path(sys.base_prefix)]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return select_sandbox("auto")


def python(sandbox: Sandbox, code: str, limits: Limits | None = None) -> str:
    """Return the output of a program in the sandbox."""
    done = run_confined(
        sandbox, [sys.executable, "-I", "-S", "-c", code], readonly=RUNTIME, limits=limits
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_check_of_the_self_test_passes(sandbox: Sandbox) -> None:
    failed = [check for check in thorough_checks(sandbox) if not check.passed]
    assert failed == []


@AS_ROOT
def test_an_ordinary_user_gets_the_same_boundary() -> None:
    script = (
        "from kernel_mcp.sandbox.select import select_sandbox\n"
        "from kernel_mcp.sandbox.self_test import thorough_checks\n"
        "for check in thorough_checks(select_sandbox('auto')):\n"
        "    print('passed' if check.passed else 'FAILED', check.name, check.found)\n"
    )
    done = subprocess.run(
        as_ordinary_user([sys.executable, "-c", script]), capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) > 50
    assert [line for line in lines if not line.startswith("passed")] == []


def test_without_a_sandbox_the_self_test_says_what_is_missing() -> None:
    failed = {check.name for check in quick_checks(NoSandbox()) if not check.passed}
    assert {"system call filter", "network closed", "own namespaces", "/tmp limited"} <= failed


def test_a_server_does_not_start_where_the_boundary_does_not_hold(sandbox: Sandbox) -> None:
    require_boundary(sandbox)
    with pytest.raises(SandboxUnavailable, match="network closed"):
        require_boundary(NoSandbox())


def test_the_short_self_test_is_short(sandbox: Sandbox) -> None:
    spent = []
    for _ in range(5):
        before = processor_time()
        quick_checks(sandbox)
        spent.append(processor_time() - before)
    assert min(spent) < 0.1


def processor_time() -> float:
    """Seconds of processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def test_the_environment_is_the_one_that_was_asked_for(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "hunter2")
    found = json.loads(python(sandbox, "import json, os; print(json.dumps(dict(os.environ)))"))
    assert found.pop("PWD") == "/"
    assert found == {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def test_the_users_of_the_host_are_unknown(sandbox: Sandbox) -> None:
    names = "import pwd, grp; print([e.pw_name for e in pwd.getpwall()])"
    assert python(sandbox, names) == "['root', 'kernel', 'nobody']"
    assert python(sandbox, "import socket; print(socket.gethostname())") == "sandbox"
    assert python(sandbox, "print(open('/etc/resolv.conf').read())") == ""


def test_scratch_space_ends_at_its_limit(sandbox: Sandbox) -> None:
    fill = (
        "import errno, os\nfor folder in ('/tmp', '/dev/shm'):\n"
        "    written = 0\n    try:\n        with open(folder + '/x', 'wb') as file:\n"
        "            while True: written += file.write(bytes(2**20)); file.flush()\n"
        "    except OSError as error: print(errno.errorcode[error.errno], written // 2**20)\n"
        "    os.truncate(folder + '/x', 0)"
    )
    limits = replace(Limits(), tmp_bytes=8 * MIB)
    assert python(sandbox, fill, limits) == "ENOSPC 8\nENOSPC 8"


def test_only_scratch_workspace_and_sockets_are_writable(sandbox: Sandbox) -> None:
    search = (
        "import os\nfound = []\n"
        "for folder, below, _ in os.walk('/'):\n"
        "    below[:] = [b for b in below if folder != '/' or b not in ('proc', 'usr')]\n"
        "    if os.access(folder, os.W_OK) and folder != '/dev/pts': found.append(folder)\n"
        "print(*sorted(found))"
    )
    assert python(sandbox, search).split() == ["/dev/shm", "/run/kernel", "/tmp", "/workspace"]


def test_nothing_of_the_first_process_shows(sandbox: Sandbox) -> None:
    seen = "import os; print(os.listdir('/proc/1'), os.access('/proc/1', os.W_OK), os.getppid())"
    assert python(sandbox, seen) == "[] False 1"


def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    assert python(sandbox, "import subprocess as s; print(s.getoutput('echo $((6*7))'))") == "42"
    threads = (
        "import threading; t = [threading.Thread(target=print, args=(1,)) for _ in 'abc']\n"
        "for x in t: x.start()\nfor x in t: x.join()"
    )
    assert python(sandbox, threads).split() == ["1", "1", "1"]
    pool = (
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: "
        "print(p.map(abs, [-1, -2]))"
    )
    assert python(sandbox, pool) == "[1, 2]"
    loopback = (
        "import socket, threading; s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname()); a, _ = s.accept(); a.send(b'hi')\n"
        "print(c.recv(2).decode())"
    )
    assert python(sandbox, loopback) == "hi"
    terminal = "import os, pty; a, b = pty.openpty(); os.write(b, b'x'); print(os.read(a, 1))"
    assert python(sandbox, terminal) == "b'x'"


def test_a_command_that_hangs_is_given_up(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxUnavailable, match="did not end"):
        run_confined(sandbox, ["/bin/sleep", "60"], timeout=0.3)


def test_a_refused_request_leaves_no_descriptor(sandbox: Sandbox, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    identity = sandbox.identity()
    request = SandboxRequest(
        argv=["/bin/true"],
        env={},
        workspace=tmp_path,
        sockets=tmp_path,
        readonly=[tmp_path / "gone"],
        limits=Limits(),
    )
    with pytest.raises(LaunchError):
        sandbox.command(request, identity)
    sandbox.release(identity)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_report_names_the_shared_kernel_as_a_gap(sandbox: Sandbox) -> None:
    report = sandbox.report()
    assert report.backend == "bwrap"
    assert any("kernel exploit" in gap for gap in report.gaps)
    assert len(report.enforced) >= 5


@AS_ROOT
def test_kernels_of_a_root_server_run_as_users_that_nobody_else_has() -> None:
    sandbox = BwrapSandbox.detect()
    identities = [sandbox.identity() for _ in range(3)]
    uids = {identity.uid for identity in identities if identity is not None}
    assert len(uids) == 3
    assert min(uids) > 60_000
    for identity in identities:
        sandbox.release(identity)
