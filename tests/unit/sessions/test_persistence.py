"""The parts of an earlier session that are restored, and the words for it."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.secrets import HeaderSecret
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import HibernationError, InstallError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.sessions.cell_journal import DAMAGED, CellJournal, read_journal
from kernel_mcp.sessions.compatibility import other_python
from kernel_mcp.sessions.grants import grants_of
from kernel_mcp.sessions.manifest import Saved, SessionKey
from kernel_mcp.sessions.persistence import Persistence, lost_with
from kernel_mcp.sessions.store import SessionStore
from tests.unit.sessions.test_store import save

DATA = Path("/data")


def persistence(
    folder: Path, *, bare: bool = False, sandbox: str = "bwrap", **given: Any
) -> Persistence:
    settings = Settings(**given)
    store = SessionStore(folder / "kept", most_bytes=0, most_s=1e9)
    store.make()
    return Persistence(
        store,
        folder="/project",
        bare=bare,
        grants=grants_of(settings, sandbox),
        settings=settings,
        permits=lambda packages: (),
    )


def kept(folder: Path, machine: str = platform.machine(), **given: Any) -> None:
    """Leave a session with a variable in a server with these settings, of a machine."""
    before = persistence(folder, **given)
    found = before.look_up(SessionKey("/project", "default"), fresh=False, resume=False)
    assert found.entry is not None
    save(found.entry, b"data")
    saved = found.entry.saved
    assert saved is not None
    doors, python = before.grants(None), ("3.11.1", "cpython", machine)
    found.entry.commit(replace(saved, doors=doors, python=python))
    found.entry.close()


OPEN: list[dict[str, Any]] = [
    {"network": ("pypi.org",)},
    {"mounts": (Mount(DATA, "/data"),)},
    {"devices": (Path("/dev/x"),)},
    {"secrets": (HeaderSecret("TOKEN", "api.example.com", value="0123456789"),)},
    {"sandbox": "none"},
    {"sandbox": "landlock"},
]


@pytest.mark.parametrize("door", OPEN, ids=lambda door: next(iter(door)))
def test_a_door_that_was_closed_at_the_save_holds_a_session_back(
    tmp_path: Path, door: dict[str, Any]
) -> None:
    kept(tmp_path)
    key = SessionKey("/project", "default")
    later = persistence(tmp_path, **door)
    found = later.look_up(key, fresh=False, resume=False)
    assert (found.entry, found.previous) == (None, None)
    assert "resume=true" in found.note
    found = later.look_up(key, fresh=False, resume=True)
    assert found.previous is not None
    assert found.previous.dump is not None


@pytest.mark.parametrize("door", OPEN[:4], ids=lambda door: next(iter(door)))
def test_a_door_that_was_open_then_and_is_closed_now_holds_nothing_back(
    tmp_path: Path, door: dict[str, Any]
) -> None:
    kept(tmp_path, **door)
    for now in (door, {}):
        found = persistence(tmp_path, **now).look_up(
            SessionKey("/project", "default"), fresh=False, resume=False
        )
        assert found.entry is not None
        found.entry.close()


def test_a_mount_that_was_read_only_is_wider_when_it_can_be_written_to(tmp_path: Path) -> None:
    kept(tmp_path, mounts=(Mount(DATA, "/data"),))
    later = persistence(tmp_path, mounts=(Mount(DATA, "/data", "rw"),))
    found = later.look_up(SessionKey("/project", "default"), fresh=False, resume=False)
    assert "/data to write" in found.note


def test_a_fresh_session_has_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    kept(tmp_path)
    found = persistence(tmp_path).look_up(
        SessionKey("/project", "default"), fresh=True, resume=False
    )
    assert found.entry is not None
    assert (found.previous, found.entry.saved, found.note) == (None, None, "")


def test_the_default_session_has_no_key_where_everything_is_below(tmp_path: Path) -> None:
    assert persistence(tmp_path).key("local", "", default=True) == SessionKey("/project", "default")
    assert persistence(tmp_path).key("local", "", default=False) is None
    assert persistence(tmp_path, bare=True).key("local", "", default=True) is None
    assert persistence(tmp_path, bare=True).key("local", "named", default=False) == SessionKey(
        "/project", "named"
    )


def test_a_request_has_what_the_session_had_asked_for_as_far_as_it_may(tmp_path: Path) -> None:
    plain = KernelRequest("s", Path("/w"))
    asked = {"python": "3.12", "packages": [], "network": ["a.org", "b.org"], "limits": None}
    saved = Saved("/project", "default", asked=asked)
    request = persistence(tmp_path, python="3.11", network=("a.org",)).request(plain, saved)
    assert (request.python, request.network) == ("3.12", ("a.org",))


def test_a_session_comes_back_in_the_python_that_saved_it(tmp_path: Path) -> None:
    saved = Saved("/p", "default", dump="x", python=("3.10.2", "cpython", "x86_64"))
    request = persistence(tmp_path, python="3.12").request(KernelRequest("s", Path("/w")), saved)
    assert request.python == "3.10"
    assert other_python("3.10.9", saved) == ""
    assert "Python 3.10" in other_python("3.12.1", saved)


def environment(folder: Path, version: str) -> str:
    """An environment by its files, as `python -m venv` leaves it."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / f"lib/python{version}/site-packages").mkdir(parents=True, exist_ok=True)
    base = folder.with_name(f"base-{version}")
    (base / "bin").mkdir(parents=True, exist_ok=True)
    (base / f"lib/python{version}/lib-dynload").mkdir(parents=True, exist_ok=True)
    (base / f"lib/python{version}/os.py").touch()
    program = base / f"bin/python{version}"
    program.write_bytes(Path(sys.executable).resolve().read_bytes())
    program.chmod(0o755)
    link = folder / "bin/python"
    link.unlink(missing_ok=True)
    link.symlink_to(program)
    (folder / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\nversion = {version}.5\n")
    return str(folder)


SAVED_BY_311 = Saved("/p", "default", dump="x", python=("3.11.2", "cpython", "x86_64"))


@pytest.mark.parametrize("asked", ["", "3.11"])
def test_a_session_comes_back_in_the_environment_that_python_names(
    tmp_path: Path, asked: str
) -> None:
    made = persistence(tmp_path, python=environment(tmp_path / ".venv", "3.11"))
    saved = replace(SAVED_BY_311, asked={"python": asked})
    assert made.request(KernelRequest("s", Path("/w")), saved).python == ""


def test_an_interpreter_in_no_environment_is_no_other_python(tmp_path: Path) -> None:
    program = tmp_path / "elsewhere/python3.11"
    program.parent.mkdir()
    program.touch()
    (tmp_path / "python").symlink_to(program)
    made = persistence(tmp_path, python=str(tmp_path / "python"))
    assert made.request(KernelRequest("s", Path("/w")), SAVED_BY_311).python == ""
    unknown = persistence(tmp_path, python=str(tmp_path / "shim"))
    (tmp_path / "shim").touch()
    assert unknown.request(KernelRequest("s", Path("/w")), SAVED_BY_311).python == ""


def test_an_environment_of_another_python_by_now_holds_a_session_back(tmp_path: Path) -> None:
    venv = environment(tmp_path / ".venv", "3.11")
    kept(tmp_path, python=venv)
    environment(tmp_path / ".venv", "3.12")
    made = persistence(tmp_path, python=venv)
    key = SessionKey("/project", "default")
    found = made.look_up(key, fresh=False, resume=False)
    assert (found.entry, found.held_back) == (None, True)
    assert f"the environment {venv} has Python 3.12.5 now" in found.note
    taken = made.look_up(key, fresh=False, resume=True)
    assert taken.previous is not None
    assert made.request(KernelRequest("s", Path("/w")), taken.previous.saved).python == "3.11"


def test_packages_that_are_not_permitted_any_more_are_an_error(tmp_path: Path) -> None:
    def refuse(packages: object) -> Any:
        raise InstallError("no")

    made = persistence(tmp_path)
    made._permits = refuse
    saved = Saved("/p", "default", asked={"packages": ["rich"]})
    with pytest.raises(InstallError):
        made.request(KernelRequest("s", Path("/w")), saved)


def test_cells_after_the_save_are_named() -> None:
    saved = Saved("/p", "default", cell=10, through=12)
    assert lost_with(saved, [11, 12]) == ""
    assert lost_with(saved, [12, 13]).startswith("Cell 13 ran after that was saved")
    assert lost_with(saved, [13, 14]).startswith("Cells 13–14 ran")  # noqa: RUF001


def test_a_trace_names_the_cells_that_were_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "cells"
    trace = CellJournal(path)
    for number in (1, 2, 3):
        trace.add(number, f"cell {number} \ud800")
    trace.forget(2)
    trace.add(4, "x" * 10_000_000)
    assert list(read_journal(path)) == [3, 4]
    assert read_journal(path)[3] == "cell 3 \ud800"
    for number in range(5, 200):
        trace.add(number, "y" * 5000)  # as many as fit
    assert list(read_journal(path)) == list(range(3, 200))
    assert read_journal(path)[6] == "y" * 5000
    assert read_journal(path)[199] == "# not kept"
    trace.forget(1000)
    assert read_journal(path) == {}
    trace.close()
    assert read_journal(tmp_path / "none") == {}
    path.write_bytes(b'[1, "a"]\n[2, "half of\0\0')
    assert read_journal(path) == {1: "a", 2: DAMAGED}


def test_what_another_machine_or_python_saved_stays_for_it(tmp_path: Path) -> None:
    saved = Saved("/p", "default", dump="x", python=("3.10.2", "cpython", "x86_64"))
    with pytest.raises(HibernationError, match=r"those of Python 3.10, and .* have 3.12"):
        persistence(tmp_path).request(KernelRequest("s", Path("/w"), "3.12"), saved)
    kept(tmp_path, machine="vax")
    found = persistence(tmp_path).look_up(
        SessionKey("/project", "default"), fresh=False, resume=False
    )
    assert found.entry is None
    assert "stays as it is" in found.note
    assert "cpython on vax" in found.note
