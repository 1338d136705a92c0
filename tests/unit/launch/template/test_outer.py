"""The command line of a template's outer sandbox and what the template is told first."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel_mcp.errors import LaunchError, SandboxUnavailable
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.template.outer import TemplateSettings, outer_command, start_message
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.users import IdMap

ENVIRONMENT = KernelEnvironment(python=Path("/usr/bin/python3"), readonly=())
NOBODY = Identity(uid=1_900_000_005, gid=1_900_000_005)


@pytest.fixture(autouse=True)
def bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name, path="": "/usr/bin/bwrap")


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which all ids exist."""
    everything = IdMap(spans=(range(2**32 - 1),), maps_root_to_root=True)
    monkeypatch.setattr(IdMap, "read", lambda _path: everything)


def argv(identity: Identity | None, shared: Sequence[Path] = ()) -> list[str]:
    command = outer_command(ENVIRONMENT, 9, TemplateSettings(tuple(shared)), identity)
    for fd in command.pass_fds:
        if fd != 9:
            os.close(fd)
    return list(command.argv)


def capabilities(arguments: list[str]) -> set[str]:
    return {arguments[i + 1] for i, word in enumerate(arguments) if word == "--cap-add"}


def test_a_root_servers_template_may_only_make_a_user_namespace(mapped: None) -> None:
    arguments = argv(NOBODY)
    assert capabilities(arguments) == {"CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID"}
    assert "--unshare-user" not in arguments


def test_the_root_of_a_templates_namespace_is_nobody_on_the_host(mapped: None) -> None:
    rows = [tuple(map(int, row.split(":"))) for row in argv(NOBODY)[-1].split(",")]
    assert rows[0] == (0, NOBODY.uid, 1)
    outside = [number for _, first, count in rows for number in (first, first + count - 1)]
    assert 0 not in outside
    assert sum(count for _, _, count in rows) == 65_536
    for inside, first, _count in rows[1:]:
        assert inside == first


@pytest.mark.parametrize("uid", [1_900_000_000, 1_900_065_535], ids=["first", "last"])
def test_an_id_at_the_end_of_its_block_leaves_one_row_less(mapped: None, uid: int) -> None:
    assert len(argv(Identity(uid, uid))[-1].split(",")) == 2


def test_an_id_that_cannot_be_mapped_is_refused(mapped: None) -> None:
    with pytest.raises(SandboxUnavailable, match="mapped"):
        argv(Identity(4711, 4711))


def test_an_ordinary_users_template_gets_a_user_namespace_from_bubblewrap(tmp_path: Path) -> None:
    arguments = argv(None, [tmp_path / "k", tmp_path / "w"])
    assert "--unshare-user" in arguments
    assert arguments[-2:] == ["init", "9"]
    where = arguments.index(str(tmp_path / "w"))
    assert arguments[where - 1 : where + 2] == ["--bind", str(tmp_path / "w"), "/sessions/1"]
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700


def test_a_root_servers_template_does_not_see_the_sessions(mapped: None, tmp_path: Path) -> None:
    assert not any(str(tmp_path) in word for word in argv(NOBODY, [tmp_path / "w"]))


@pytest.mark.parametrize("identity", [NOBODY, None], ids=["root", "user"])
def test_the_way_out_is_closed_for_both(mapped: None, identity: Identity | None) -> None:
    arguments = argv(identity)
    assert {"--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent"} <= set(
        arguments
    )
    assert arguments[arguments.index("--cap-drop") + 1] == "ALL"
    where = arguments.index("--remount-ro")
    assert "/" in arguments[where:]


def test_without_bubblewrap_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name, path="": None)
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        argv(None)


def test_folders_are_found_below_the_shared_ones() -> None:
    shared = TemplateSettings((Path("/run/k"), Path("/srv/w")))
    assert shared.inside(Path("/run/k/abcd")) == "/sessions/0/abcd"
    assert shared.inside(Path("/srv/w/a/b")) == "/sessions/1/a/b"


@pytest.mark.parametrize("path", ["/srv/w", "/srv/other", "/srv/w/../other", "/"])
def test_what_is_not_below_a_shared_folder_is_refused(path: str) -> None:
    with pytest.raises(LaunchError, match="not below"):
        TemplateSettings((Path("/srv/w"),)).inside(Path(path))


def test_the_start_message_names_the_runtime_below_tmp(tmp_path: Path) -> None:
    environment = KernelEnvironment(python=Path(sys.executable), readonly=(tmp_path, Path("/usr")))
    message = start_message(environment, ["numpy"], TemplateSettings(()))
    assert message["preload"] == ["numpy"]
    assert message["python"] == sys.executable
    kept = [str(tmp_path)] if str(tmp_path).startswith("/tmp/") else []
    assert message["kept"] == kept


def test_the_start_message_holds_the_system_call_filter() -> None:
    program = base64.b64decode(start_message(ENVIRONMENT, [], TemplateSettings(()))["filter"])
    assert program
    assert len(program) % 8 == 0


def test_the_start_message_masks_only_files_of_proc() -> None:
    masks = start_message(ENVIRONMENT, [], TemplateSettings(()))["masks"]
    assert masks
    assert all(mask.startswith("/proc/") for mask in masks)
