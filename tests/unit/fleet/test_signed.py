"""Values of which one node alone makes the next version, and that nobody else can write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_mcp.errors import ConfigError
from kernel_mcp.fleet.signed import (
    NOTHING,
    NotOurs,
    Overtaken,
    Signed,
    StoredVersion,
    key_of,
    keys_of,
)
from kernel_mcp.fleet.storage import FolderStorage

KEY = key_of("t" * 40)


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(FolderStorage(tmp_path / "store"), KEY)


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())


def test_versions_follow_each_other(signed: Signed) -> None:
    assert signed.latest("x") == NOTHING
    one = signed.advance("x", NOTHING, {"a": 1})
    assert signed.latest("x") == one
    two = signed.advance("x", one, {"a": 2})
    assert signed.latest("x").value == {"a": 2}
    ended = signed.advance("x", two, None)
    assert signed.latest("x") == ended
    assert ended.value is None


def test_who_has_read_an_older_version_is_overtaken(signed: Signed) -> None:
    one = signed.advance("x", NOTHING, {"a": 1})
    signed.advance("x", one, {"a": 2})
    with pytest.raises(Overtaken):
        signed.advance("x", one, {"a": 3})
    assert signed.latest("x").value == {"a": 2}


def test_who_has_slept_while_versions_were_made_and_removed_is_overtaken_too(
    signed: Signed,
) -> None:
    one = now = signed.advance("x", NOTHING, {"a": 1})
    for number in range(10):
        now = signed.advance("x", now, {"a": number})
    with pytest.raises(Overtaken):
        signed.advance("x", one, {"a": "late"})
    assert signed.latest("x") == now


def test_of_many_who_advance_at_once_one_succeeds(signed: Signed) -> None:
    before = NOTHING
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):

            def advance(number: int) -> bool:
                try:
                    signed.advance("x", before, {"by": number})  # noqa: B023
                except Overtaken:
                    return False
                return True

            assert sum(threads.map(advance, range(8))) == 1
            before = signed.latest("x")


def test_a_value_that_was_changed_moved_or_made_with_another_key_is_not_ours(
    signed: Signed, tmp_path: Path
) -> None:
    signed.advance("x", NOTHING, {"node": "one"})
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"one", b"two"))
    with pytest.raises(NotOurs):
        signed.latest("x")
    for other in ("y", "x"):
        moved = path.parents[1] / other / f"{2 if other == 'x' else 1:010d}"
        moved.parent.mkdir(exist_ok=True)
        moved.write_bytes(whole)
        with pytest.raises(NotOurs):
            signed.latest(other)
    strange = Signed(signed.place, key_of("another token of the same length"))
    strange.advance("z", NOTHING, {"a": 1})
    with pytest.raises(NotOurs):
        signed.latest("z")


def test_any_key_of_the_list_is_read_and_the_first_one_signs(signed: Signed) -> None:
    old = signed.advance("x", NOTHING, {"a": 1})
    rotated = Signed(signed.place, key_of("n" * 40), KEY)
    found = rotated.latest("x")
    assert (found.value, found.old) == (old.value, True)
    rotated.advance("x", found, found.value)
    assert rotated.latest("x") == Signed(signed.place, key_of("n" * 40)).latest("x")
    with pytest.raises(NotOurs, match="removed too early"):
        signed.latest("x")
    assert signed.latest("x", foreign=True) == StoredVersion(2)


def test_keys_are_the_lines_of_a_private_file_or_come_from_the_token(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert keys_of(None, "t" * 40) == [KEY]
    for text, mode, why in (
        ("n" * 40, 0o604, "others may read"),
        ("short", 0o600, "32 random characters"),
        ("\n", 0o600, "32 random characters"),
    ):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=why):
            keys_of(file, "unused")
    with pytest.raises(ConfigError, match="No such file"):
        keys_of(tmp_path / "gone", "unused")
    file.write_text(f"{'n' * 40}\n\n  {'t' * 40}\n")
    assert keys_of(file, "unused") == [key_of("n" * 40), KEY]


def test_of_two_who_begin_again_what_was_removed_one_alone_does(signed: Signed) -> None:
    ended = signed.advance("x", signed.advance("x", NOTHING, {"a": 1}), None)
    signed.remove("x", ended)
    with pytest.raises(Overtaken):  # who had read it before
        signed.advance("x", ended, {"a": 2})
    assert signed.latest("x") == NOTHING
    another = signed.advance("x", NOTHING, {"a": 3})
    with pytest.raises(Overtaken):
        signed.advance("x", ended, {"a": 4})
    assert signed.latest("x") == another
