"""Ways to end times contents: every variable is kept as it was, or reported. See `state`.

A row is one test. It runs on the server's own Python; `test_every_python` has a session on another
with every change. `--full` adds every other Python of the machine, in an environment of the
operator's with a package of its own, a machine that is busy and a disk that is slow.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest

from kernel_mcp.sessions import manifest
from kernel_mcp.units import MIB
from tests.integration.processes import named
from tests.integration.state import (
    ALL,
    FAST,
    SAVABLE,
    Content,
    Held,
    Table,
    Verdict,
    environment,
    interpreters,
    table,
)

ONLY_OWN = ("disk", "other_python")
"""Rows that say on which Python they run."""
NOT_SAVABLE = {"conn", "lines", "lock"}
LAST = {"count"}
"""Variables changed by cells after the last save."""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
CELL_S, CELLS = 0.8, 45
"""Cells that together last longer than the bound of what is not saved."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rows" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    own = sys.executable if "environment" in name else ""
    params = [pytest.param((own, ""), id="own")]
    if not any(word in name for word in ONLY_OWN):
        params += [
            pytest.param((str(path), ""), id=path.name, marks=pytest.mark.full)
            for path in interpreters()
        ]
        params += [
            pytest.param((own, condition), id=condition, marks=pytest.mark.full)
            for condition in ("busy", "slow disk")
        ]
    metafunc.parametrize("rows", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Table]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="state-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # kernels of any user reach it
        with table(root, *request.param) as made:
            yield made


def whole(verdict: Verdict, held: Held, *, but: Set[str] = frozenset()) -> None:
    """Nothing is gone in silence, and nothing is gone but this."""
    assert not verdict.silent(held), verdict
    assert not verdict.gone.keys() - but, verdict


def test_the_kernel_is_killed(rows: Table) -> None:
    held = rows.saved_session("kernel")
    killed = rows.server().run(KILL, "kernel")
    whole(rows.judge(held, killed), held, but=NOT_SAVABLE | LAST)


def test_the_template_is_killed(rows: Table) -> None:
    held = rows.saved_session("template")
    for pid in named("kernel-template", below=rows.server().pid):
        os.kill(pid, signal.SIGKILL)
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


def test_undo_goes_back_by_one_cell(rows: Table) -> None:
    held = rows.session("undo")
    rows.server().run("small = None; del twice", "undo", checkpoint=True)
    undone = rows.server().call("undo", session="undo")
    assert not undone.failed, undone.text
    whole(rows.judge(held, undone), held)


def test_a_branch_and_what_it_came_of_have_all(rows: Table) -> None:
    held = rows.session("branch")
    made = rows.server().call("branch", session="branch", n=1)
    (handle,) = [each["session"] for each in made.data["branches"]]
    branch = Held(handle, held.cells)
    whole(rows.judge(branch, made), held)
    rows.server().run("listed.append(2)", handle)
    whole(rows.judge(held), held)
    rows.server().call("close_session", session=handle)


def test_an_adopted_branch_has_all(rows: Table) -> None:
    held = rows.session("adopt")
    made = rows.server().call("branch", session="adopt", n=1)
    (handle,) = [each["session"] for each in made.data["branches"]]
    answer = rows.server().run("extra = 1", handle)
    held.cells[answer.cell["cell"]] = Content("extra = 1", {"extra": "extra == 1"})
    adopted = rows.server().call("adopt", branch=handle)
    assert not adopted.failed, adopted.text
    whole(rows.judge(held, adopted), held)


def test_a_closed_session_is_told_to_be_gone(rows: Table) -> None:
    held = rows.saved_session("closed")
    closed = rows.server().call("close_session", session="closed")
    assert "gone" in closed.text
    rows.server().call("create_session", name="closed")
    assert not rows.judge(held).kept


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, id="EOF", marks=pytest.mark.ways),
        pytest.param(signal.SIGTERM, id="TERM"),
        pytest.param(signal.SIGKILL, id="KILL", marks=pytest.mark.ways),
    ],
)
def test_the_server_ends(rows: Table, number: int) -> None:
    held = rows.saved_session(f"server-{number}")
    rows.end(number)
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


@pytest.mark.ways
def test_the_server_is_killed_while_cells_follow_each_other_without_a_rest(rows: Table) -> None:
    held = rows.session("fast")
    code = f"import time; time.sleep({CELL_S}); {FAST}"
    for _ in range(CELLS):
        held.last = rows.server().run(code, "fast").cell["cell"]
    held.cells[held.last] = Content(code, {"count": f"count == {CELLS}"})
    rows.end(signal.SIGKILL)
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


@pytest.mark.ways
def test_the_idle_timer_puts_to_sleep_what_loses_nothing(rows: Table) -> None:
    flags = ("--idle-timeout", "2s")
    held = rows.session("idle", *flags, contents=SAVABLE)
    rows.hurry(held)
    rows.sleeps(held)
    whole(rows.judge(held, flags=flags), held)


@pytest.mark.ways
def test_another_session_needs_room(rows: Table) -> None:
    flags = ("--max-sessions", "2")
    held = rows.session("room", *flags)
    rows.hurry(held)
    for name in ("other", "third"):
        rows.server(*flags).call("create_session", name=name)
        rows.server(*flags).run("1", name)
    rows.sleeps(held)
    whole(rows.judge(held, flags=flags), held, but=NOT_SAVABLE)


@pytest.mark.ways
def test_wider_doors_hold_back_and_lose_nothing(rows: Table) -> None:
    held = rows.saved_session("doors")
    rows.end(signal.SIGTERM)
    wider = rows.server("--network", "example.org").run("small = 0", "doors")
    assert "It was not brought back" in wider.text
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


@pytest.mark.ways
def test_other_python_holds_back_or_brings_back(rows: Table) -> None:
    another = next(interpreters(), None)
    if another is None:
        pytest.skip("requires a second Python that this user may read")
    held = rows.saved_session("python")
    rows.end(signal.SIGTERM)
    flags = ("--python", str(another))
    other = rows.server(*flags).run("'small' in globals()", "python")
    assert "It was not brought back" in other.text
    assert "Python" in other.text
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


@pytest.mark.ways
def test_saves_of_other_formats_are_told_and_left_alone(rows: Table) -> None:
    saved = {version: rows.saved_session(f"format-{version}") for version in (0, 99)}
    rows.end(signal.SIGTERM)
    folders = {version: rows.entry(held) for version, held in saved.items()}
    for version, folder in folders.items():
        _rewrite(folder, version)
    for held in saved.values():
        anew = rows.server().call("create_session", name=held.name)
        verdict = rows.judge(held, anew)
        assert "format" in verdict.told, verdict
        assert verdict.silent(held).keys() <= NOT_SAVABLE, verdict
    rows.end(signal.SIGTERM)
    for folder in folders.values():
        _rewrite(folder, manifest.FORMAT)
    for held in saved.values():
        whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)


def _rewrite(folder: Path, version: int) -> None:
    """Change the format that a save states."""
    data = json.loads((folder / manifest.MANIFEST).read_text())
    kept = {key: value for key, value in data.items() if not key.endswith("digest")}
    manifest.write(folder, {**kept, "format": version})


def _flip(folder: Path) -> None:
    (dump,) = folder.glob("variables-*")
    data = bytearray(dump.read_bytes())
    at = data.index(random.Random(7).randbytes(64)) + 3 * MIB
    data[at] ^= 1
    dump.write_bytes(data)


def _cut(folder: Path) -> None:
    (dump,) = folder.glob("variables-*")
    os.truncate(dump, dump.stat().st_size // 2)


def _remove(folder: Path) -> None:
    (dump,) = folder.glob("variables-*")
    dump.unlink()


def _forget(folder: Path) -> None:
    for name in (manifest.MANIFEST, manifest.COPY):
        (folder / name).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {"flip": _flip, "cut": _cut, "remove": _remove}


@pytest.mark.ways
def test_damage_on_the_disk_is_told_by_name(rows: Table) -> None:
    damaged = {name: rows.session(f"damage-{name}") for name in DAMAGES}
    for held in damaged.values():
        rows.saved(held)
    folders = {name: rows.entry(held) for name, held in damaged.items()}
    rows.end(signal.SIGTERM)
    for name, damage in DAMAGES.items():
        damage(folders[name])
    for held in damaged.values():
        verdict = rows.judge(held)
        assert not verdict.silent(held), verdict
        assert verdict.gone.keys() >= {"large"}


@pytest.mark.ways
def test_a_manifest_that_is_gone_is_told_unless_its_copy_is_there(rows: Table) -> None:
    copied, lost = rows.session("copied"), rows.session("forgotten")
    folders = []
    for held in (copied, lost):
        rows.saved(held)
        folders.append(rows.entry(held))
    rows.end(signal.SIGTERM)
    (folders[0] / manifest.MANIFEST).unlink()
    _forget(folders[1])
    whole(rows.judge(copied), copied, but=NOT_SAVABLE)
    anew = rows.server().call("create_session", name=lost.name)
    assert "cannot be read" in rows.judge(lost, anew).told


@pytest.mark.ways
def test_the_environment_is_made_anew(rows: Table) -> None:
    held = rows.saved_session("anew")
    rows.end(signal.SIGTERM)
    environment(rows.venv, rows.python, "2.0")
    verdict = rows.judge(held)
    whole(verdict, held, but=NOT_SAVABLE | LAST)
    assert "greeting 1.0 is 2.0 now" in verdict.told


@pytest.mark.ways
def test_the_environment_lacks_a_package_now(rows: Table) -> None:
    held = rows.saved_session("lacks")
    rows.end(signal.SIGTERM)
    environment(rows.venv, rows.python, "")
    whole(rows.judge(held), held, but=NOT_SAVABLE | LAST | {"words"})
    rows.end(signal.SIGTERM)
    environment(rows.venv, rows.python)


if os.geteuid() == 0:  # who may mount

    @pytest.mark.ways
    def test_a_disk_that_is_full_keeps_the_last_save(rows: Table) -> None:
        rows.end()
        state = rows.place.root / "s"
        aside = state.rename(state.with_name("aside"))
        state.mkdir(mode=0o700)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=96m,mode=0700", "none", str(state)], check=True
        )
        try:
            held = rows.session("full", contents=ALL)
            rows.saved(held)
            ballast = state / "ballast"
            with pytest.raises(OSError, match="space"):
                ballast.write_bytes(bytes(96 * MIB))
            rows.hurry(held)
            rows.end(signal.SIGKILL)
            ballast.unlink()
            whole(rows.judge(held), held, but=NOT_SAVABLE | LAST)
            rows.end()
        finally:
            subprocess.run(["umount", "--lazy", str(state)], check=True)
            state.rmdir()
            aside.rename(state)
