"""One contract for every place that a fleet can keep things in."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet.storage import FolderStorage, ObjectStorage, Storage, read, storage_of


def folder(tmp_path: Path) -> Storage:
    return FolderStorage(tmp_path / "store")


def objects(tmp_path: Path) -> Storage:
    fsspec = pytest.importorskip("fsspec")
    return ObjectStorage(fsspec.filesystem("memory"), f"/{tmp_path.name}")


@pytest.fixture(params=[folder, objects], ids=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    make: Callable[[Path], Storage] = request.param
    return make(tmp_path)


def test_a_name_is_created_once_and_keeps_what_it_got_first(place: Storage) -> None:
    assert place.create("a/b/1", b"first")
    assert not place.create("a/b/1", b"second")
    assert read(place, "a/b/1", 100) == b"first"
    assert read(place, "a/b/1", 2) == b"fi"


def test_of_many_who_create_a_name_at_once_one_succeeds(tmp_path: Path) -> None:
    place = folder(tmp_path)
    with ThreadPoolExecutor(16) as threads:
        for number in range(20):
            made = list(threads.map(lambda _: place.create(f"x/{number}", b"1"), range(16)))  # noqa: B023
            assert sum(made) == 1


def test_what_is_put_is_there_whole_and_again(place: Storage) -> None:
    data = bytes(range(256)) * 10_000
    for _ in range(2):
        place.put("data/x", io.BytesIO(data))
    with place.open("data/x") as file:
        assert file.read() == data


def test_names_of_a_folder_are_listed_and_removed(place: Storage) -> None:
    assert place.names("a") == []
    for name in ("a/2", "a/1", "b/3"):
        assert place.create(name, b"")
    assert place.names("a") == ["1", "2"]
    place.remove("a/1")
    place.remove("a/1")
    assert place.names("a") == ["2"]
    place.remove("a/2")
    assert place.names("a") == []
    assert place.create("a/2", b"again")


def test_what_is_not_there_is_told_so(place: Storage) -> None:
    assert read(place, "no/such", 10) is None
    with pytest.raises(FileNotFoundError):
        place.open("no/such")


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError):
        FolderStorage(shared)


@pytest.mark.parametrize("address", ["relative/path", "nothing-like-it://bucket"])
def test_an_address_that_leads_nowhere_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--fleet-store"):
        storage_of(address)
