"""A kernel that swaps files for links while the server's file tools work on them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.linux.safe_tree import Opener, by_walking, with_openat2

ITERATIONS = 2000
SECRET = "the secret outside"


@pytest.fixture(
    params=[
        pytest.param(with_openat2, id="openat2"),
        pytest.param(by_walking, id="walk", marks=pytest.mark.ways),
    ]
)
def opener(request: pytest.FixtureRequest) -> Opener:
    chosen: Opener = request.param
    return chosen


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text(SECRET)
    (folder / "sub" / "file").write_text(SECRET)
    (folder / "only-outside").touch()
    return folder


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    """A workspace where `dir` and `file` are honest and `evil-…` are links that lead out."""
    folder = tmp_path / "ws"
    (folder / "dir" / "sub").mkdir(parents=True)
    for place in ("file", "dir/file", "dir/sub/file"):
        (folder / place).write_text("inside")
    (folder / "evil-dir").symlink_to(outside)
    (folder / "evil-file").symlink_to(outside / "file")
    return folder


def swap(root: Path, one: str, other: str) -> None:
    """Exchange two names by three renames."""
    (root / one).rename(root / "swapped")
    (root / other).rename(root / one)
    (root / "swapped").rename(root / other)


@contextlib.contextmanager
def attack(step: Callable[[], None]) -> Iterator[Callable[[], int]]:
    """Run `step` over and over in a thread; yields how often it ran."""
    stop = threading.Event()
    count = 0

    def loop() -> None:
        nonlocal count
        while not stop.is_set():
            with contextlib.suppress(OSError):
                step()
            count += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield lambda: count
    finally:
        stop.set()
        thread.join()


def outside_is_untouched(outside: Path) -> bool:
    names = sorted(str(path.relative_to(outside)) for path in outside.rglob("*"))
    contents = {(outside / "file").read_text(), (outside / "sub" / "file").read_text()}
    return names == ["file", "only-outside", "sub", "sub/file"] and contents == {SECRET}


def test_reading_while_folders_are_swapped_for_links_leaks_nothing(
    root: Path, outside: Path, opener: Opener
) -> None:
    workspace = Workspace(root, opener=opener)
    seen: set[str] = set()
    with attack(lambda: swap(root, "dir", "evil-dir")) as rounds:
        for number in range(ITERATIONS):
            path = ("dir/file", "dir/sub/file", "evil-dir/file")[number % 3]
            with contextlib.suppress(WorkspaceError):
                content, _ = workspace.read_resource(path)
                seen.add(str(content))
            with contextlib.suppress(WorkspaceError):
                page = workspace.read_file(path).page
                seen.add(page.text if page else "no page")
        assert rounds() > 10
    assert seen == {"inside"}
    assert outside_is_untouched(outside)


def test_reading_while_the_file_itself_is_swapped_for_a_link_leaks_nothing(
    root: Path, outside: Path, opener: Opener
) -> None:
    workspace = Workspace(root, opener=opener)
    seen: set[str] = set()
    with attack(lambda: swap(root, "file", "evil-file")) as rounds:
        for _ in range(ITERATIONS):
            with contextlib.suppress(WorkspaceError):
                seen.add(str(workspace.read_resource("file")[0]))
        assert rounds() > 10
    assert seen == {"inside"}


def test_writing_while_folders_are_swapped_for_links_stays_inside(
    root: Path, outside: Path, opener: Opener
) -> None:
    workspace = Workspace(root, opener=opener)
    written = 0
    with attack(lambda: swap(root, "dir", "evil-dir")) as rounds:
        for number in range(ITERATIONS):
            path = ("dir/new", "dir/file", "dir/sub/file", f"dir/deep/{number % 7}/x")[number % 4]
            with contextlib.suppress(WorkspaceError):
                workspace.write_file(path, "inside")
                written += 1
        assert rounds() > 10
    assert written
    assert outside_is_untouched(outside)


def test_writing_while_the_file_itself_is_swapped_for_a_link_stays_inside(
    root: Path, outside: Path, opener: Opener
) -> None:
    def plant() -> None:
        (root / "planted").symlink_to(outside / "file")
        (root / "planted").replace(root / "file")

    workspace = Workspace(root, opener=opener)
    with attack(plant) as rounds:
        for _ in range(ITERATIONS):
            with contextlib.suppress(WorkspaceError):
                workspace.write_file("file", "inside")
        assert rounds() > 10
    assert outside_is_untouched(outside)


def test_listing_while_folders_are_swapped_for_links_names_nothing_outside(
    root: Path, outside: Path, opener: Opener
) -> None:
    workspace = Workspace(root, opener=opener)
    names: set[str] = set()
    messages: list[str] = []
    with attack(lambda: swap(root, "dir", "evil-dir")) as rounds:
        for _ in range(ITERATIONS):
            try:
                names |= {entry.path for entry in workspace.list_files("dir").entries}
                workspace.read_file("dir/missing")
            except WorkspaceError as error:
                messages.append(str(error))
            workspace.usage()
        assert rounds() > 10
    assert names <= {"dir", "dir/file", "dir/sub"}
    assert not any("only-outside" in message for message in messages)


def test_clearing_while_folders_are_swapped_for_links_removes_nothing_outside(
    root: Path, outside: Path
) -> None:
    workspace = Workspace(root)
    turn = itertools.count()

    def build() -> None:
        number = next(turn)
        if number > 200:  # clearing ends when whoever fills the folder does
            return
        trap = root / f"trap-{number}"
        (trap / "inner").mkdir(parents=True)
        link = root / f"{trap.name}-link"
        link.symlink_to(outside)
        swap(root, trap.name, link.name)

    with attack(build) as rounds:
        cleared = 0
        while cleared < 100 or rounds() <= 10:
            with contextlib.suppress(WorkspaceError):
                workspace.clear()
            cleared += 1
    assert outside_is_untouched(outside)


def test_a_pipe_that_appears_in_place_of_a_file_does_not_hang_a_reader(
    root: Path, opener: Opener
) -> None:
    os.mkfifo(root / "pipe")
    workspace = Workspace(root, opener=opener)
    with attack(lambda: swap(root, "file", "pipe")) as rounds:
        for _ in range(ITERATIONS):
            with contextlib.suppress(WorkspaceError):
                assert workspace.read_resource("file")[0] == "inside"
        assert rounds() > 10
