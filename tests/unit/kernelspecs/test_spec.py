"""Find and read kernel specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.errors import ConfigError
from kernel_mcp.kernelspecs.source import interpreter_of
from kernel_mcp.kernelspecs.spec import read_kernelspec

REACHED = "{connection_file}"


def write(folder: Path, **content: Any) -> Path:
    folder.mkdir(parents=True)
    made = {"argv": ["/bin/sh", "{connection_file}"], "display_name": "Shell", "language": "sh"}
    (folder / "kernel.json").write_text(json.dumps({**made, **content}))
    return folder


def test_a_kernel_spec_is_found_by_name_in_the_data_folders_of_jupyter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", f"{tmp_path / 'none'}:{tmp_path}")
    write(tmp_path / "kernels" / "shell", env={"A": "1"}, interrupt_mode="message")
    found = read_kernelspec(NamedKernelspec("sh", "shell"))
    assert (found.spec, found.language, found.display_name) == ("shell", "sh", "Shell")
    assert found.argv == ("/bin/sh", "{connection_file}")
    assert (("A", "1") in found.env, found.by_message) == (True, True)
    assert found.readonly[-1] == tmp_path / "kernels" / "shell"


@pytest.mark.parametrize(
    ("argv", "survives"),
    [
        (["/bin/sh", "deno"], False),
        (["/bin/sh", "/a/xpython_launcher"], False),
        (["/bin/sh"], True),
    ],
)
def test_kernels_that_an_interrupt_ends_are_known(
    tmp_path: Path, argv: list[str], survives: bool
) -> None:
    spec = read_kernelspec(NamedKernelspec("x", str(write(tmp_path / "x", argv=[*argv, REACHED]))))
    assert spec.survives == survives
    assert interpreter_of(spec).offers("interrupt") == survives


@pytest.mark.parametrize(
    ("argv", "closed"),
    [
        (["/bin/sh", "-m", "bash_kernel"], ["landlock"]),
        (["/bin/sh", "deno"], ["landlock", "none"]),
        (["/usr/bin/env"], ["container"]),
        (["/bin/sh"], []),
    ],
)
def test_sandboxes_in_which_a_kernel_cannot_start_are_known(
    tmp_path: Path, argv: list[str], closed: list[str]
) -> None:
    spec = read_kernelspec(NamedKernelspec("x", str(write(tmp_path / "x", argv=[*argv, REACHED]))))
    tried = ("bwrap", "container", "landlock", "none")
    assert [each for each in tried if spec.hindrance(each)] == closed


def test_the_program_of_an_environment_comes_before_that_of_the_path(tmp_path: Path) -> None:
    folder = write(tmp_path / "share/jupyter/kernels/own", argv=["sh", "{resource_dir}/a", REACHED])
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    program = tmp_path / "bin" / "sh"
    program.symlink_to("/bin/sh")
    found = read_kernelspec(NamedKernelspec("sh", str(folder)))
    assert found.argv == (str(program), f"{folder}/a", REACHED)
    assert tmp_path in found.readonly


def test_a_program_of_a_project_is_never_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "evil").symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"bin:{tmp_path / 'bin'}")
    folder = write(tmp_path / "a" / "spec", argv=["evil", REACHED])
    with pytest.raises(ConfigError, match="there is no program 'evil'"):
        read_kernelspec(NamedKernelspec("x", str(folder)))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"argv": "sh"}',
        '{"argv": []}',
        '{"argv": [1]}',
        '{"argv": ["/none/there", "{connection_file}"]}',
        '{"argv": ["/etc", "{connection_file}"]}',
        '{"argv": ["/bin/sh"]}',
        '{"argv": ["/bin/sh", "{connection_file}"], "env": {"A=B": "c"}}',
        '{"argv": ["/bin/sh", "{connection_file}"], "env": {"A": "\\u0000"}}',
    ],
)
def test_a_file_that_is_no_kernel_spec_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "kernel.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--kernel x="):
        read_kernelspec(NamedKernelspec("x", str(file)))


def test_a_folder_without_a_kernel_spec_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/kernel.json$"):
        read_kernelspec(NamedKernelspec("x", str(tmp_path)))


def test_an_unknown_name_is_answered_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    write(tmp_path / "kernels" / "shell")
    with pytest.raises(ConfigError, match=r"no kernel spec 'sh': there are .*shell"):
        read_kernelspec(NamedKernelspec("x", "sh"))


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "spec")
    with pytest.raises(ConfigError, match="there is no /none"):
        read_kernelspec(NamedKernelspec("x", str(folder), (Path("/none"),)))
