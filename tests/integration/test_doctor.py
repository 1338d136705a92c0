"""`kernel-mcp doctor` on the real machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.sandbox.landlock import landlock_available
from tests.languages.kernels import STOCK

NEEDS_LANDLOCK = pytest.mark.skipif(
    (reason := landlock_available()) is not None, reason=str(reason)
)
EVERYWHERE = {
    "host files hidden",
    "network closed",
    "not root",
    "no capability to change anything",
    "system call filter",
    "no new privileges",
    "a cell is confined",
    "interrupt works",
    "memory limit enforced",
    "memory limit holds for several processes",
    "pids limit enforced",
    "orphan dies",
}


def doctor(*flags: str, path: Path | None = None, **environ: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "doctor", "--json", *flags],
        env={**os.environ, **({"PATH": str(path)} if path else {}), **environ},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def states(backend: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in backend["checks"]}


def said(backend: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["found"] for check in backend["checks"]}


def test_the_strongest_backend_holds_check_by_check() -> None:
    code, report = doctor("--sandbox", "bwrap")
    (backend,) = report["backends"]
    assert [check for check in backend["checks"] if check["state"] != "ok"] == []
    assert set(states(backend)) >= EVERYWHERE
    assert "variables back in" in said(backend)["forked: a kernel that died comes back"]
    assert (code, report["holds"], report["used"]) == (0, True, "bwrap")
    assert {"kernel-mcp", "linux", "bubblewrap", "ipykernel"} <= set(report["versions"])


@pytest.fixture
def project() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="doctor-"))
    folder.chmod(0o755)
    (folder / "out").mkdir()
    (folder / "requirements.txt").write_text("wcwidth\n")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.ways
def test_each_door_has_a_line_of_its_own_that_kernels_have_tried(project: Path) -> None:
    doors = ["--mount", str(project), "--mount", f"{project}/out:rw", "--device", "/dev/null"]
    doors += ["--env", "SERVICE", "--secret", "TOKEN@api.example.com", "--network", "example.org"]
    doors += ["--requirements", f"{project}/requirements.txt"]
    code, report = doctor("--sandbox", "bwrap", *doors, SERVICE="where", TOKEN="a-secret-of-mine")
    (backend,) = report["backends"]
    found = states(backend)
    assert [check for check in backend["checks"] if check["state"] != "ok"] == []
    for line in (
        f"folder {project}",
        f"folder {project}/out",
        "device /dev/null",
        "variable SERVICE",
        "secret TOKEN@api.example.com:Authorization",
        f"packages of --requirements {project}/requirements.txt",
    ):
        assert found[line] == found[f"forked: {line}"] == "ok"
    assert found["network"] == "ok"
    enforced = "; ".join(backend["enforced"])
    assert "the loopback, and a proxy that connects where `network` says" in enforced
    assert f"a private /tmp and {project}/out are writable" in enforced
    assert "and `mounts` without known secrets; Unix sockets only in pairs" in enforced
    assert "of the host's devices only /dev/null" in enforced
    assert "a-secret" not in json.dumps(report)
    assert code == 0


@pytest.mark.ways
def test_each_named_kernel_has_a_line_that_says_what_held(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Bad", "language": "bad"}
    (tmp_path / "bad" / "kernel.json").write_text(json.dumps(spec))
    kernels = ("--kernel", f"stock={STOCK}", "--kernel", f"bad={tmp_path}/bad")
    code, report = doctor("--sandbox", "bwrap", "--no-template", *kernels)
    stock, bad = report["kernels"]
    assert (stock["name"], stock["holds"]) == ("kernel stock", True)
    words = "runs cells, stops at an interrupt and keeps variables, ends when it is killed"
    assert words in stock["found"]
    assert (bad["name"], bad["holds"]) == ("kernel bad", False)
    assert "does not start" in bad["found"]
    assert (code, report["holds"]) == (1, False)


@pytest.mark.ways
@NEEDS_LANDLOCK
def test_what_landlock_lacks_with_mounts_is_told(project: Path) -> None:
    _, report = doctor("--sandbox", "landlock", "--no-template", "--mount", str(project))
    (backend,) = report["backends"]
    assert states(backend)[f"folder {project}"] == "ok"
    assert any(gap.startswith("mounts by Landlock: ") for gap in backend["gaps"])


def test_what_keeps_a_server_from_starting_is_told_with_the_next_step() -> None:
    code, report = doctor("--sandbox", "bwrap", "--no-template", "--device", "/dev/missing")
    (failed,) = [each for each in report["backends"][0]["checks"] if each["state"] == "fails"]
    assert (code, failed["found"]) == (
        1,
        "a server with these flags does not start in this sandbox",
    )
    assert failed["remedy"].startswith("--device /dev/missing: it cannot be had: No such file")


@pytest.mark.ways
@NEEDS_LANDLOCK
def test_landlock_holds_but_for_the_gaps_it_admits() -> None:
    code, report = doctor("--sandbox", "landlock")
    (backend,) = report["backends"]
    found = states(backend)
    assert {found[name] for name in EVERYWHERE} == {"ok"}
    assert found["own namespaces"] == "gap"
    assert said(backend)["a kernel that died comes back"].startswith("no: kernels are not forked")
    assert any("no process namespace" in gap for gap in backend["gaps"])
    assert (code, report["used"]) == (0, "landlock")


@pytest.mark.ways
def test_no_sandbox_is_told_to_be_none() -> None:
    code, report = doctor("--sandbox", "none")
    (backend,) = report["backends"]
    found = states(backend)
    assert (code, report["holds"]) == (1, False)
    assert found["network closed"] == found["system call filter"] == "fails"
    assert found["a cell is confined"] == found["in a cell: host files hidden"] == "fails"
    assert found["interrupt works"] == found["orphan dies"] == "ok"


def test_without_any_backend_it_says_why_and_what_to_do(tmp_path: Path) -> None:
    for program in ("setpriv",):
        if found := shutil.which(program):
            (tmp_path / program).symlink_to(found)
    code, report = doctor("--sandbox", "bwrap", path=tmp_path)
    assert (code, report["used"]) == (1, "")
    assert "bubblewrap is not installed" in report["refusal"]
    assert "Install" in report["backends"][0]["problem"]
