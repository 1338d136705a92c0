"""A missing confinement is refused, wherever in a kernel's start it was lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from mcp.client import Client

import kernel_specs
from kernel_mcp.config.settings import Limits
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch.assembly import KernelAssembly
from kernel_mcp.launch.base import LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.launch.template import outer
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.landlock import LandlockSandbox, landlock_available
from tests.integration.agent import Agent, agent, command
from tests.integration.processes import descendants
from tests.integration.sabotaged import Sabotaged
from tests.integration.template.bench import ENVIRONMENT, bench, is_forked, run
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user
from tests.run_folder import own_folder

pytestmark = pytest.mark.anyio

ALLOW_ALL = r'b"\x06\0\0\0\0\0\xff\x7f"'
"""One `struct sock_filter`: BPF_RET | BPF_K with SECCOMP_RET_ALLOW."""
KEEPING = """\
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_filter(settings.program)
"""
SABOTAGE = {
    "no filter": (
        ("sandbox.py", "    linux.install_filter(filter_program)\n", ""),
        "1 system call filters instead of",
    ),
    "a filter that allows everything": (
        ("sandbox.py", "install_filter(filter_program)", f"install_filter({ALLOW_ALL})"),
        "system call unshare refused",
    ),
    "capabilities kept": (
        ("sandbox.py", "processes)\n    drop(settings.program)", f"processes)\n{KEEPING}"),
        "it has capabilities",
    ),
    "the network of the template": (
        ("sandbox.py", "    | linux.CLONE_NEWNET\n)\n_INERT", ")\n_INERT"),
        "it shares namespaces with others: net",
    ),
    "the mounts of the template": (
        ("sandbox.py", "    linux.CLONE_NEWNS\n    | linux.CLONE_NEWIPC", "    linux.CLONE_NEWIPC"),
        "it shares namespaces with others: mnt",
    ),
    "the ipc of the template": (
        ("sandbox.py", "    | linux.CLONE_NEWIPC\n", ""),
        "it shares namespaces with others: ipc",
    ),
}


NO_LIMITS = ("../restricted/confine.py", "    apply_limits(config.limits)\n", "")
FORKED_WITH_ALL_OF_IT = {
    "it shares namespaces with others: uts, cgroup, user, /tmp, /dev/shm, /dev/pts": (
        ("sandbox.py", "    | linux.CLONE_NEWUTS\n    | linux.CLONE_NEWCGROUP\n", ""),
        ("sandbox.py", "    _become(entry.uid, processes)\n", ""),
        ("sandbox.py", "    _new_tmp(sandbox.tmp_bytes, settings.kept)\n", ""),
        ("sandbox.py", '    linux.mount("tmpfs", "/dev/shm"', '    ("tmpfs", "/dev/shm"'),
        ("sandbox.py", '    linux.mount("devpts", "/dev/pts"', '    ("devpts", "/dev/pts"'),
    ),
    "it may write to /proc": (("sandbox.py", "_INERT | linux.MS_RDONLY", "_INERT"),),
    "nothing covers /proc/cmdline, ": (("sandbox.py", "in settings.masks", "in ()"),),
}
"""Reports, and the changes of code that cause them."""
COLD_WITH_ALL_OF_IT = {
    "it shares namespaces with others: uts, cgroup": (
        *("--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"),
    ),
    "it may write to /, /dev, /proc": ("--remount-ro", "/proc", "--remount-ro", "/dev"),
    "it has no /dev/shm of its own": ("--size", "*", "--perms", "1777", "--tmpfs", "/dev/shm"),
    "nothing covers /proc/cmdline, ": ("--ro-bind", "/dev/null", "/proc/cmdline"),
    ", /proc/1": ("--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
}


def sabotaged(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of the guest's package with these changes to files of the template: old, new text."""
    copy = folder / "kernel_specs"
    shutil.copytree(
        Path(kernel_specs.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, old, new in changes:
        file = copy / "template" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
    return copy


@pytest.mark.parametrize(("change", "words"), SABOTAGE.values(), ids=SABOTAGE)
async def test_a_template_whose_kernels_are_not_confined_is_refused(
    change: tuple[str, str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(outer, "BOOT_FOLDER", sabotaged(tmp_path, change))
    async with bench(ready=False) as b:
        b.launcher.prepare(ENVIRONMENT)
        assert not await b.launcher.ready(ENVIRONMENT)
        first = await b.kernel()
        assert not is_forked(first)
        assert await run(first, "print(6 * 7)") == "42\n"
        assert words in b.launcher.refusal(ENVIRONMENT)
        assert first.handle.report.boundary[0] == "started cold"
    assert any(words in record.message for record in caplog.records if record.levelname == "ERROR")


async def test_all_that_a_template_leaves_open_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [change for several in FORKED_WITH_ALL_OF_IT.values() for change in several]
    monkeypatch.setattr(outer, "BOOT_FOLDER", sabotaged(tmp_path, *changes))
    async with bench(ready=False) as b:
        b.launcher.prepare(ENVIRONMENT)
        assert not await b.launcher.ready(ENVIRONMENT)
        told = b.launcher.refusal(ENVIRONMENT)
    assert [words for words in FORKED_WITH_ALL_OF_IT if words not in told] == []
    assert ("it runs as host user" in told) == (os.geteuid() == 0)


async def test_a_template_whose_kernels_have_no_limits_is_refused_at_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer, "BOOT_FOLDER", sabotaged(tmp_path, NO_LIMITS))
    async with bench(ready=False) as b:
        b.launcher.prepare(ENVIRONMENT)
        assert await b.launcher.ready(ENVIRONMENT)
        assert not is_forked(await b.kernel())
        told = b.launcher.refusal(ENVIRONMENT)
    assert "its limit “Max open files” is " in told
    assert "its limit “Max address space” is lacking instead of at most " in told


@pytest.fixture
def without_filter(tmp_path: Path) -> Path:
    """A folder from which programs use a package whose template installs no filter."""
    change, _ = SABOTAGE["no filter"]
    sabotaged(tmp_path, change)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


@pytest.mark.ways
def test_the_doctor_fails_when_the_template_lacks_its_filter(without_filter: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "doctor", "--json", "--sandbox", "bwrap"],
        env={**os.environ, "PYTHONPATH": str(without_filter)},
        cwd=without_filter / "elsewhere",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    failed = [c for c in report["backends"][0]["checks"] if c["state"] == "fails"]
    assert (done.returncode, report["holds"]) == (1, False)
    assert [check["name"] for check in failed] == ["forked: a template is confined"]
    assert "system call filters" in failed[0]["found"]


@pytest.mark.ways
def test_the_doctor_fails_when_kernels_of_an_ordinary_user_see_all_sessions() -> None:
    with tempfile.TemporaryDirectory(dir=own_folder()) as name:  # pytest's folders are closed
        folder = Path(name)
        folder.chmod(0o755)
        seen = ("sandbox.py", "    hide_sessions()\n    _new_tmp(", "    _new_tmp(")
        sabotaged(folder, seen)
        argv = [sys.executable, "-m", "kernel_mcp", "doctor", "--json", "--sandbox", "bwrap"]
        words = ["env", "--chdir=/", f"PYTHONPATH={folder}:{REPOSITORY}", *argv]
        command = as_ordinary_user(words) if os.geteuid() == 0 else words
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = [c for c in report["backends"][0]["checks"] if c["state"] == "fails"]
    assert [check["name"] for check in failed] == ["forked: a template is confined"]
    assert "it may write to /sessions/0, /sessions/1" in failed[0]["found"]


async def found_in(notebook: Agent, words: str) -> list[str]:
    """Return `sandbox_found` of `info` once it has these words; templates become ready late."""
    found: list[str] = []
    for _ in range(1000):
        session = (await notebook.call("create_session")).data["session"]
        await notebook.run("1", session=session)
        found = (await notebook.call("info", session=session)).data["sandbox_found"]
        await notebook.call("close_session", session=session)
        if any(words in text for text in found):
            break
    return found


@pytest.mark.ways
async def test_info_tells_of_a_template_that_is_refused(without_filter: Path) -> None:
    start = command("--sandbox", "bwrap", "--warm", "0", env={"PYTHONPATH": str(without_filter)})
    async with Client(start.model_copy(update={"cwd": without_filter / "elsewhere"})) as client:
        found = await found_in(Agent(client), "1 system call filters")
        assert found[0] == "started cold"
        assert found[-1].startswith("kernels are not forked, as their template was refused: ")
        assert "1 system call filters" in found[-1]


async def test_info_tells_what_was_read_of_the_kernels_process() -> None:
    async with agent("--sandbox", "bwrap", "--warm", "1") as notebook:
        found = await found_in(notebook, "forked")
        assert found[0] == "forked from a template that was tried"
        assert {"no capabilities", "no new privileges"} <= set(found)
        assert found[-1] == "namespaces of its own: net mnt pid ipc uts cgroup user"


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (("--seccomp", "*"), "system call filters instead of"),
        (("--unshare-net",), "it shares namespaces with others: net"),
        (("--unshare-ipc",), "it shares namespaces with others: ipc"),
        (("--unshare-cgroup-try",), "it shares namespaces with others: cgroup"),
    ],
)
async def test_a_cold_kernel_that_is_not_confined_is_ended_before_it_runs_code(
    missing: tuple[str, ...], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert told in await refused(Sabotaged.without(*missing), tmp_path)
    assert told in caplog.text


async def refused(sandbox: Sandbox, workspace: Path) -> str:
    """Why no kernel comes out of this sandbox; nothing of it is left."""
    with RunDirectory.create(own_folder() / "refused") as runs:
        request = LaunchRequest("s", ENVIRONMENT, Policy.for_allow(()), Limits(), workspace)
        with pytest.raises(BoundaryBroken) as told:
            await LocalLauncher(KernelAssembly(sandbox, runs)).launch(request)
        assert list(runs.kernels.iterdir()) == []
    assert descendants(os.getpid()) == []
    return str(told.value)


async def test_all_that_a_cold_start_leaves_open_is_told(tmp_path: Path) -> None:
    boot = sabotaged(tmp_path, NO_LIMITS)
    workspace = tmp_path / "w"
    workspace.mkdir(mode=0o700)
    missing = [*COLD_WITH_ALL_OF_IT.values(), ("--remount-ro", "/")]
    told = await refused(Sabotaged.lacking(*missing, boot=boot), workspace)
    assert [words for words in COLD_WITH_ALL_OF_IT if words not in told] == []
    assert "its limit “Max pending signals” is " in told


@pytest.mark.skipif(landlock_available() is not None, reason="takes Landlock")
async def test_a_kernel_under_landlock_without_its_limits_is_refused(tmp_path: Path) -> None:
    boot = sabotaged(tmp_path, NO_LIMITS)
    workspace = tmp_path / "w"
    workspace.mkdir(mode=0o700)
    told = await refused(LandlockSandbox.detect(boot), workspace)
    assert "its limit “Max address space” is " in told
