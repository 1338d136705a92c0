from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp.linux import safe_tree
from kernel_mcp.linux.safe_tree import Opener, by_walking, open_beneath, with_openat2


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
