# ruff: noqa: RUF001

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.files.contents import binary_kind, mime_of, page_of
from kernel_mcp.files.encodings import foreign_encodings, is_text


@pytest.mark.parametrize(
    ("path", "head", "mime"),
    [
        ("a.csv", b"a,b\n", "text/csv"),
        ("a.csv", b"\x89PNG\r\n\x1a\n", "image/png"),
        ("a.png", b"just text", "text/plain"),
        ("a.png", b"\0\1\2", "application/octet-stream"),
        ("a.svg", b"<svg/>", "image/svg+xml"),
        ("a", b"text", "text/plain"),
        ("a.json", b"{}", "application/json"),
    ],
)
def test_bytes_decide_about_pictures_and_names_about_the_rest(
    path: str, head: bytes, mime: str
) -> None:
    assert mime_of(path, head) == mime


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("Straße, Köln".encode("latin-1"), "latin-1"),
        ("text".encode("utf-16"), "utf-16"),
        ("text".encode("utf-16-le"), "utf-16-le"),
        ("text".encode("utf-16-be"), "utf-16-be"),
        ("text".encode("utf-32"), "utf-32"),
        ("Zażółć gęślą jaźń".encode("cp1250"), "cp1250"),
        ("id;имя\n1;Иванов Пётр\n2;Анна".encode("cp1251"), "cp1251"),
        ("Привет, мир! Это тест.".encode("koi8-r"), "koi8-r"),
        ("МОСКВА;1\nКАЗАНЬ;2\n".encode("cp1251"), "cp1251"),
        ("МОСКВА;1\nКАЗАНЬ;2\n".encode("koi8-r"), "koi8-r"),
        ("Всі люди народжуються вільними".encode("cp1251"), "cp1251"),
        ("πόλη;πληθυσμός\nΑθήνα;664046\n".encode("cp1253"), "cp1253"),
        ("ΑΘΗΝΑ;1\nΠΑΤΡΑ;2\nΛΑΡΙΣΑ;3\n".encode("cp1253"), "cp1253"),
        ("şehir;nüfus\nİzmir;4394694\n".encode("cp1254"), "cp1254"),
        ("ad;soyad\nAyşe;Yılmaz\n".encode("cp1254"), "cp1254"),
        ("Þórður í Reykjavík".encode("latin-1"), "latin-1"),
        ("これは日本語のテストです。".encode("shift_jis"), "shift_jis"),
        ("これは日本語のテストです。".encode("euc_jp"), "euc_jp"),
        ("这是一个中文测试文件。".encode("gbk"), "gb18030"),
        ("한국어 테스트입니다.".encode("euc_kr"), "euc_kr"),
        ("ok é\n".encode() + b"caf\xe9\n", "utf-8"),
        ("é".encode() * 9 + b"\xc3\n", "utf-8"),
        ("Köln".encode(), ""),
        (bytes(range(256)), ""),
        (b"\0\1\0\2\0\3", ""),
        (b"", ""),
    ],
)
def test_text_in_other_encodings_is_recognised(head: bytes, encoding: str) -> None:
    assert [*foreign_encodings(head), ""][0] == encoding


@pytest.mark.parametrize(
    ("head", "encodings"),
    [
        ("date,τιμή\n2024-01-01,3\n".encode("cp1253"), ["koi8-r", "cp1253"]),
        ("Sigurður".encode("latin-1"), ["cp1254", "cp1252"]),
        ("Все люди рождаются свободными".encode("koi8-r"), ["koi8-r"]),
    ],
)
def test_encodings_between_which_the_text_does_not_decide_are_named(
    head: bytes, encodings: list[str]
) -> None:
    assert foreign_encodings(head) == encodings


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.integers(0, 100))
def test_utf8_cut_anywhere_is_text(text: str, end: int) -> None:
    assert is_text(text.encode()[:end])


def test_known_binary_formats_are_named() -> None:
    assert binary_kind(b"PAR1rest") == "a Parquet file"
    assert binary_kind(b"unknown") is None


CHUNKS = st.lists(st.text(alphabet="ab\n", max_size=12), max_size=10)


@given(CHUNKS, st.integers(0, 12), st.integers(0, 8), st.integers(1, 40))
def test_a_page_holds_exactly_the_lines_asked_for(
    chunks: list[str], offset: int, limit: int, characters: int
) -> None:
    whole = "".join(chunks)
    lines = whole.splitlines(keepends=True)
    page = page_of(chunks, offset=offset, limit=limit, characters=characters)
    assert page.total == len(lines)
    assert len(page.text) <= characters
    wanted = lines[offset : offset + limit] if limit else lines[offset:]
    shown = lines[offset : offset + page.lines]
    if page.cut:
        assert page.lines == 1
        assert len(page.text) == characters
        assert shown[0].rstrip("\n")[: len(page.text)] == page.text
        assert len(page.text) + page.cut == len(shown[0].rstrip("\n"))
    else:
        assert page.text in ("".join(shown), "".join(shown)[:-1])
        if page.lines < len(wanted):
            assert len("".join(lines[offset : offset + page.lines + 1])) > characters


@given(CHUNKS, st.integers(1, 20))
def test_pages_follow_each_other_to_the_end(chunks: list[str], characters: int) -> None:
    lines = "".join(chunks).splitlines()
    read, offset = 0, 0
    while True:
        page = page_of(chunks, offset=offset, limit=0, characters=characters)
        read += page.lines
        if page.next is None:
            break
        assert page.next > offset
        offset = page.next
    assert read == len(lines)


def test_an_offset_after_the_end_is_an_empty_page() -> None:
    page = page_of(["a\nb\n"], offset=9, limit=0, characters=10)
    assert (page.text, page.lines, page.total, page.next) == ("", 0, 2, None)
