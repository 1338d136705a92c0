"""Opening beneath a folder; removing, handing over and exchanging what hostile code has built."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp.linux import safe_tree
from kernel_mcp.linux.safe_tree import (
    Opener,
    by_walking,
    give_tree,
    make_private,
    open_beneath,
    remove_tree,
    take_place,
    with_openat2,
)
from kernel_specs import linux

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to change owners")


def build_deep(top: Path, depth: int) -> None:
    """A chain of folders, made the way an attacker does: path lengths do not matter."""
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open("deeper", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_tree_3000_deep_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    build_deep(top, 3000)
    before = open_descriptors()
    remove_tree(top)
    assert not top.exists()
    assert open_descriptors() == before


def test_a_wide_tree_is_removed_in_batches(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "sub").mkdir(parents=True)
    for number in range(9000):
        (top / "sub" / str(number)).touch()
        if number % 90 == 0:
            (top / f"folder-{number}" / "in").mkdir(parents=True)
    remove_tree(top)
    assert not top.exists()


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    top = tmp_path / "top"
    (top / "sub").mkdir(parents=True)
    (top / "link").symlink_to(outside)
    (top / "sub" / "link").symlink_to(outside / "precious")
    (top / "dangling").symlink_to("nowhere")
    os.mkfifo(top / "fifo")
    remove_tree(top)
    assert not top.exists()
    assert (outside / "precious").read_text() == "kept"


def test_a_link_in_the_place_of_the_tree_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "link"
    link.symlink_to(outside)
    with pytest.raises(OSError, match="link"):
        remove_tree(link)
    assert outside.exists()


def test_folders_without_rights_are_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a" / "b" / "c").mkdir(parents=True)
    for folder in (top / "a" / "b" / "c", top / "a" / "b", top / "a"):
        folder.chmod(0)
    remove_tree(top)
    assert not top.exists()


def test_a_tree_that_is_not_there_is_nothing_to_remove(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")


@AS_ROOT
def test_a_deep_tree_changes_its_owner_to_the_last_file(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    build_deep(top, 1500)
    (top / "wide").mkdir()
    (top / "wide" / "file").touch()
    before = open_descriptors()
    give_tree(top, uid=4321, gid=4321)
    assert open_descriptors() == before
    assert top.stat().st_uid == top.stat().st_gid == 4321
    assert (top / "wide" / "file").stat().st_uid == 4321
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1500):
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        assert os.fstat(fd).st_uid == 4321
    os.close(fd)
    remove_tree(top)


@AS_ROOT
def test_links_change_owner_and_their_targets_do_not(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    top = tmp_path / "top"
    top.mkdir()
    (top / "folder").symlink_to(outside)
    (top / "file").symlink_to(outside / "file")
    give_tree(top, uid=4321, gid=4321)
    assert (top / "file").lstat().st_uid == 4321
    assert outside.stat().st_uid == (outside / "file").stat().st_uid == os.geteuid()


@AS_ROOT
def test_set_user_id_bits_do_not_survive_a_change_of_owner(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    program = top / "program"
    program.touch()
    program.chmod(0o4755)
    give_tree(top, uid=4321, gid=4321)
    assert not program.stat().st_mode & stat.S_ISUID


def test_a_private_folder_does_not_take_over_the_group_of_a_shared_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    make_private(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    newcomer, place = tmp_path / "newcomer", tmp_path / "place"
    newcomer.mkdir()
    place.mkdir()
    (newcomer / "own").touch()
    return newcomer, place


def test_the_folder_that_was_there_is_found_under_the_other_name(
    folders: tuple[Path, Path],
) -> None:
    newcomer, place = folders
    (place / "before").touch()
    assert take_place(newcomer, place) == newcomer
    assert (place / "own").exists()
    assert (newcomer / "before").exists()


def no_exchange(*_: object) -> None:
    """An old C library, or a file system that cannot."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_without_exchange_an_empty_folder_is_replaced(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, place = folders
    monkeypatch.setattr(linux, "exchange", no_exchange)
    assert take_place(newcomer, place) is None
    assert (place / "own").exists()
    assert not newcomer.exists()


def test_without_exchange_a_full_folder_stays(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer, place = folders
    (place / "before").touch()
    monkeypatch.setattr(linux, "exchange", no_exchange)
    with pytest.raises(OSError, match="not empty"):
        take_place(newcomer, place)
    assert (place / "before").exists()


def test_a_place_that_does_not_exist_is_named(folders: tuple[Path, Path]) -> None:
    newcomer, place = folders
    place.rmdir()
    with pytest.raises(FileNotFoundError, match="place"):
        take_place(newcomer, place)
    assert (newcomer / "own").exists()


@pytest.fixture(params=[with_openat2, by_walking], ids=["openat2", "walk"])
def opener(request: pytest.FixtureRequest) -> Opener:
    chosen: Opener = request.param
    return chosen


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    (tmp_path / "link").symlink_to("a")
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def code_of(folder: int, parts: tuple[str, ...], flags: int, opener: Opener) -> int:
    with pytest.raises(OSError, match=r".") as caught:
        open_beneath(folder, parts, flags, opener=opener)
    return caught.value.errno or 0


def test_a_file_is_opened_through_honest_folders(folder: int, opener: Opener) -> None:
    fd = open_beneath(folder, ("a", "b", "file"), os.O_RDONLY, opener=opener)
    assert os.read(fd, 10) == b"x"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_no_components_mean_the_folder_itself(folder: int, opener: Opener) -> None:
    fd = open_beneath(folder, (), os.O_RDONLY | os.O_DIRECTORY, opener=opener)
    assert sorted(os.listdir(fd)) == ["a", "link"]  # noqa: PTH208
    os.close(fd)


def test_links_are_refused_wherever_they_stand(folder: int, opener: Opener) -> None:
    link = (errno.ELOOP, errno.ENOTDIR)
    assert code_of(folder, ("link",), os.O_RDONLY, opener) in link
    assert code_of(folder, ("link", "b", "file"), os.O_RDONLY, opener) in link


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b"])
def test_only_plain_names_are_components(folder: int, opener: Opener, name: str) -> None:
    assert code_of(folder, (name,), os.O_RDONLY, opener) == errno.EINVAL


def test_another_file_system_is_not_entered(opener: Opener) -> None:
    root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        assert code_of(root, ("proc", "version"), os.O_RDONLY, opener) == errno.EXDEV
    finally:
        os.close(root)


def test_links_of_the_proc_file_system_lead_nowhere(opener: Opener) -> None:
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    try:
        code_of(proc, (str(os.getpid()), "root", "etc", "passwd"), os.O_RDONLY, opener)
        code_of(proc, (str(os.getpid()), "cwd"), os.O_RDONLY, opener)
    finally:
        os.close(proc)


def test_no_descriptor_is_left_open(folder: int, opener: Opener) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for parts in (("a", "b", "file"), ("a", "missing", "x"), ("link", "x"), ("x" * 300,)):
        for _ in range(5):
            with contextlib.suppress(OSError):
                os.close(open_beneath(folder, parts, os.O_RDONLY, opener=opener))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_without_openat2_the_walk_is_used(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    safe_tree._default_opener.cache_clear()
    monkeypatch.setattr(safe_tree, "with_openat2", refused)
    try:
        assert safe_tree._default_opener() is by_walking
    finally:
        safe_tree._default_opener.cache_clear()
