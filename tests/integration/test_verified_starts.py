"""What does not hold is refused, wherever in a kernel's start it was lost."""

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
from kernel_mcp.errors import BoundaryBroken
from kernel_mcp.launch import template_outer
from kernel_mcp.launch.base import KernelRequest
from kernel_mcp.launch.local import LocalLauncher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.policy import Policy
from kernel_mcp.settings import Limits
from tests.integration.agent import Agent, agent, command
from tests.integration.sabotaged import Sabotaged
from tests.integration.test_template import ENVIRONMENT, bench, descendants, is_forked, run
from tests.integration.unprivileged import REPOSITORY, as_ordinary_user

pytestmark = pytest.mark.anyio

ALLOW_ALL = r'b"\x06\0\0\0\0\0\xff\x7f"'
"""One `struct sock_filter`: BPF_RET | BPF_K with SECCOMP_RET_ALLOW."""
KEEPING = """\
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_filter(ground.program)
"""
SABOTAGE = {
    "no filter": (
        ("privileges.py", "    linux.install_filter(filter_program)\n", ""),
        "1 system call filters instead of",
    ),
    "a filter that allows everything": (
        ("privileges.py", "install_filter(filter_program)", f"install_filter({ALLOW_ALL})"),
        "system call unshare refused",
    ),
    "capabilities kept": (
        ("cell.py", "processes)\n    privileges.drop(ground.program)", f"processes)\n{KEEPING}"),
        "it has capabilities",
    ),
    "the network of the template": (
        ("cell.py", "    | linux.CLONE_NEWNET\n)\n_INERT", ")\n_INERT"),
        "it shares namespaces with others: net",
    ),
    "the mounts of the template": (
        ("cell.py", "    linux.CLONE_NEWNS\n    | linux.CLONE_NEWIPC", "    linux.CLONE_NEWIPC"),
        "it shares namespaces with others: mnt",
    ),
    "the ipc of the template": (
        ("cell.py", "    | linux.CLONE_NEWIPC\n", ""),
        "it shares namespaces with others: ipc",
    ),
}


def sabotaged(folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of the guest's package in which one file of the template is changed."""
    copy = folder / "kernel_specs"
    shutil.copytree(
        Path(kernel_specs.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
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
    monkeypatch.setattr(template_outer, "BOOT_FOLDER", sabotaged(tmp_path, *change))
    async with bench(ready=False) as b:
        b.launcher.prepare(ENVIRONMENT)
        assert not await b.launcher.ready(ENVIRONMENT)
        first = await b.kernel()
        assert not is_forked(first)
        assert await run(first, "print(6 * 7)") == "42\n"
        assert words in b.launcher.refusal(ENVIRONMENT)
        assert first.handle.boundary[0] == "started cold"
    assert any(words in record.message for record in caplog.records if record.levelname == "ERROR")


@pytest.fixture
def without_filter(tmp_path: Path) -> Path:
    """A folder from which programs use a package whose template installs no filter."""
    change, _ = SABOTAGE["no filter"]
    sabotaged(tmp_path, *change)
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def test_the_doctor_fails_when_the_template_lacks_its_filter(without_filter: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "doctor", "--json", "--sandbox", "bwrap"],
        env={**os.environ, "PYTHONPATH": str(without_filter)},
        cwd=without_filter / "elsewhere",
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    failed = [c for c in report["backends"][0]["checks"] if c["state"] == "fails"]
    assert (done.returncode, report["holds"]) == (1, False)
    assert [check["name"] for check in failed] == ["forked: a template is confined"]
    assert "system call filters" in failed[0]["found"]


def test_the_doctor_fails_when_kernels_of_an_ordinary_user_see_all_sessions() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:  # pytest's folders are closed
        folder = Path(name)
        folder.chmod(0o755)
        sabotaged(
            folder, "cell.py", "        _put(place)\n    hide_sessions()\n", "        _put(place)\n"
        )
        argv = [sys.executable, "-m", "kernel_mcp", "doctor", "--json", "--sandbox", "bwrap"]
        words = ["env", "--chdir=/", f"PYTHONPATH={folder}:{REPOSITORY}", *argv]
        command = as_ordinary_user(words) if os.geteuid() == 0 else words
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failed = [c for c in report["backends"][0]["checks"] if c["state"] == "fails"]
    assert [check["name"] for check in failed] == ["forked: a template is confined"]
    assert "host files hidden: /sessions/0" in failed[0]["found"]


async def found_in(notebook: Agent, words: str) -> list[str]:
    """What `info` tells once it says these words; templates get ready beside the first sessions."""
    found: list[str] = []
    for _ in range(1000):
        session = (await notebook.call("create_session")).data["session"]
        await notebook.run("1", session=session)
        found = (await notebook.call("info", session=session)).data["sandbox_found"]
        await notebook.call("close_session", session=session)
        if any(words in text for text in found):
            break
    return found


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
    sandbox = Sabotaged.without(*missing)
    with RunDirectory.create(Path("/tmp", f"kmv-{os.getpid()}")) as runs:
        request = KernelRequest("s", ENVIRONMENT, Policy.for_allow(()), Limits(), tmp_path)
        with pytest.raises(BoundaryBroken, match=told):
            await LocalLauncher(sandbox, runs).launch(request)
        assert list(runs.kernels.iterdir()) == []
    assert descendants(os.getpid()) == []
    assert told in caplog.text
