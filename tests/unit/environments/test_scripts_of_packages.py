"""First lines of programs, which uv writes for the base interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_mcp.environments.layer import retarget

BASE, PYTHON = Path("/base/bin/python3"), Path("/env/bin/python")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "head",
    [b"#!/base/bin/python3\n", b"#!/bin/sh\n'''exec' /base/bin/python3 \"$0\" \"$@\"\n' '''\n"],
)
def test_a_script_of_the_base_starts_the_environments_python(programs: Path, head: bytes) -> None:
    script = programs / "tool"
    script.write_bytes(head + b"import x\n")
    script.chmod(0o755)
    retarget(programs, base=BASE, python=PYTHON)
    assert script.read_bytes() == b"#!/env/bin/python\nimport x\n"
    assert script.stat().st_mode & 0o777 == 0o755


def test_options_of_another_python_and_programs_stay(programs: Path) -> None:
    contents = [b"#!/base/bin/python3.9\nx\n", b"#!/bin/sh\necho\n", b"\x7fELF", b""]
    for number, content in enumerate(contents):
        (programs / str(number)).write_bytes(content)
    retarget(programs, base=BASE, python=PYTHON)
    assert [(programs / str(number)).read_bytes() for number in range(4)] == contents


def test_links_and_pipes_are_left_alone(programs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"#!/base/bin/python3\n")
    (programs / "link").symlink_to(outside)
    os.mkfifo(programs / "pipe")
    retarget(programs, base=BASE, python=PYTHON)
    assert outside.read_bytes() == b"#!/base/bin/python3\n"
    (tmp_path / "linked").symlink_to(programs)
    retarget(tmp_path / "linked", base=BASE, python=PYTHON)
    retarget(tmp_path / "missing", base=BASE, python=PYTHON)


def test_a_long_path_is_started_by_a_shell(programs: Path) -> None:
    (programs / "tool").write_bytes(b"#!/base/bin/python3\nx\n")
    long = Path("/", *["folder"] * 30, "it's python")
    retarget(programs, base=BASE, python=long)
    first, second, third, rest = (programs / "tool").read_text().splitlines()
    assert (first, third, rest) == ("#!/bin/sh", "' '''", "x")
    assert second.startswith("'''exec' '/folder/")
    assert compile((programs / "tool").read_text(), "tool", "exec")
