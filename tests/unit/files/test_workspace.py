"""Reading and writing files of a workspace, and no others."""

import base64
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import folders
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.linux.safe_tree import Opener

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def text_of(workspace: Workspace, path: str, *, offset: int = 0, limit: int = 0) -> str:
    page = workspace.read_file(path, offset=offset, limit=limit).page
    assert page is not None
    return page.text


def names_in(workspace: Workspace, path: str = "") -> dict[str, str]:
    return {entry.path: entry.kind for entry in workspace.list_files(path).entries}


def test_what_is_written_is_read_back(workspace: Workspace) -> None:
    assert workspace.write_file("data/new/input.csv", "a,ä\n1,2\n") == 9
    assert text_of(workspace, "data/new/input.csv") == "a,ä\n1,2\n"
    assert names_in(workspace) == {"data": "folder"}
    assert names_in(workspace, "data/new") == {"data/new/input.csv": "file"}


@pytest.mark.parametrize(
    "path", ["a.txt", "./a.txt", "/workspace/a.txt", "x/../a.txt", ".//a.txt", "/workspace//a.txt"]
)
def test_a_path_may_be_written_in_several_ways(workspace: Workspace, path: str) -> None:
    workspace.write_file("a.txt", "here")
    assert text_of(workspace, path) == "here"


def test_the_real_path_of_the_folder_is_understood(workspace: Workspace, root: Path) -> None:
    workspace.write_file(f"{root}/a.txt", "here")
    assert text_of(workspace, f"{root}/a.txt") == "here"
    assert list(names_in(workspace, str(root))) == ["a.txt"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../secret.txt",
        "a/../../secret.txt",
        "~/x",
        "/workspace/../etc/passwd",
        "/workspaces/a",
        "/proc/self/environ",
        "..",
    ],
)
def test_paths_outside_are_refused_in_words(workspace: Workspace, path: str) -> None:
    for action in (
        lambda: workspace.read_file(path),
        lambda: workspace.write_file(path, "x"),
        lambda: workspace.list_files(path),
        lambda: workspace.read_resource(path),
    ):
        with pytest.raises(WorkspaceError, match="outside the workspace"):
            action()


def test_links_are_never_followed(workspace: Workspace, root: Path) -> None:
    (root / "file").symlink_to(root.parent / "secret.txt")
    (root / "up").symlink_to(root.parent)
    (root / "inner").mkdir()
    (root / "inner" / "real.txt").write_text("inside")
    (root / "alias").symlink_to("inner")
    for path in ("file", "up/secret.txt", "alias/real.txt"):
        with pytest.raises(WorkspaceError, match="link"):
            workspace.read_file(path)
    with pytest.raises(WorkspaceError, match="link"):
        workspace.list_files("up/ws")
    with pytest.raises(WorkspaceError, match="link"):
        workspace.write_file("up/new.txt", "x")
    assert names_in(workspace)["file"] == "link"
    assert names_in(workspace, "up") == {"up": "link"}


def test_writing_over_a_link_replaces_the_link(workspace: Workspace, root: Path) -> None:
    (root / "file").symlink_to(root.parent / "secret.txt")
    workspace.write_file("file", "mine")
    assert (root.parent / "secret.txt").read_text() == "outside"
    assert (root / "file").read_text() == "mine"
    assert not (root / "file").is_symlink()


def test_a_workspace_that_is_a_link_is_not_opened(root: Path, opener: Opener) -> None:
    (root.parent / "link").symlink_to(root.parent)
    with pytest.raises(WorkspaceError, match="cannot be opened"):
        Workspace(root.parent / "link", opener=opener).list_files()


def test_pipes_and_sockets_are_refused_at_once(workspace: Workspace, root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
        start = time.process_time()
        with pytest.raises(WorkspaceError, match="named pipe"):
            workspace.read_file("pipe")
        with pytest.raises(WorkspaceError, match="socket"):
            workspace.read_file("socket")
        workspace.write_file("pipe", "now a file")
    assert time.process_time() - start < 2
    assert text_of(workspace, "pipe") == "now a file"


def test_pages_of_lines(workspace: Workspace) -> None:
    workspace.write_file("long.txt", "".join(f"line {number}\n" for number in range(10_000)))
    assert text_of(workspace, "long.txt", offset=5000, limit=2) == "line 5000\nline 5001\n"
    page = workspace.read_file("long.txt", characters=100).page
    assert page is not None
    assert (page.first, page.total, page.next) == (0, 10_000, page.lines)
    with pytest.raises(WorkspaceError, match=r"has 10,000 lines"):
        workspace.read_file("long.txt", offset=10_000)


def test_an_empty_file_is_an_empty_text(workspace: Workspace) -> None:
    assert workspace.write_file("empty", "") == 0
    assert text_of(workspace, "empty") == ""


def test_a_byte_order_mark_is_not_part_of_the_text(workspace: Workspace, root: Path) -> None:
    (root / "bom.txt").write_bytes(b"\xef\xbb\xbfa\n")
    assert text_of(workspace, "bom.txt") == "a\n"


def test_pictures_come_as_bytes_and_svg_as_text(workspace: Workspace, root: Path) -> None:
    (root / "plot.dat").write_bytes(PNG)
    (root / "drawing.svg").write_text("<svg/>")
    found = workspace.read_file("plot.dat")
    assert (found.mime, found.data, found.page) == ("image/png", PNG, None)
    assert text_of(workspace, "drawing.svg") == "<svg/>"


def test_bytes_are_read_in_pages_that_can_be_joined_and_only_on_request(
    workspace: Workspace, root: Path
) -> None:
    data = b"PK\x03\x04" + os.urandom(100_000)
    (root / "large.zip").write_bytes(data)
    unread = workspace.read_file("large.zip")
    assert (unread.data, unread.size) == (b"", len(data))
    assert "ZIP archive" in unread.kind
    pages = b""
    while len(pages) < len(data):
        page = workspace.read_file(
            "large.zip", encoding="base64", offset=len(pages), characters=30_000
        ).data
        assert len(base64.b64encode(page)) <= 30_000
        pages += page
    assert pages == data
    few = workspace.read_file("large.zip", encoding="base64", offset=1, limit=2)
    assert few.data == data[1:3]
    with pytest.raises(WorkspaceError, match="ZIP archive"):
        workspace.read_file("large.zip", encoding="utf-8")


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("Köln\n".encode("latin-1"), "latin-1"),
        ("Köln\n".encode("utf-16"), "utf-16"),
        (b"plain\n" * 5000 + b"K\xf6ln\n", "latin-1"),
    ],
)
def test_text_in_another_encoding_is_refused_with_the_way_to_read_it(
    workspace: Workspace, root: Path, data: bytes, encoding: str
) -> None:
    (root / "old.csv").write_bytes(data)
    with pytest.raises(WorkspaceError, match=f"not UTF-8.*open.*encoding='{encoding}'"):
        workspace.read_file("old.csv")
    with pytest.raises(WorkspaceError, match="not UTF-8"):
        workspace.read_file("old.csv", encoding="utf-8")
    page = workspace.read_file("old.csv", encoding=encoding, characters=100_000).page
    assert page is not None
    assert page.text == data.decode(encoding)
    assert workspace.read_file("old.csv", encoding="base64", characters=100_000).data == data


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("prix : 5 €, l\u2019été", "cp1252"),
        ("“quoted” \u2013 dashes…", "cp1252"),
        ("Œuvre, cœur, naïve", "cp1252"),
        ("Übergröße, Straße", "latin-1"),
        ("garçon, élève, où", "latin-1"),
        ("São Paulo, ações", "latin-1"),
        ("Zażółć gęślą jaźń", "cp1250"),
        ("Łódź;Kraków;Gdańsk;Wałbrzych", "cp1250"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy", "cp1250"),
        ("Žilina, Košice, Nové Zámky, ľudia", "cp1250"),
        ("Győr, Székesfehérvár, fűtés", "cp1250"),
        ("Šibenik, Čačak, Žužemberk", "cp1250"),
    ],
)
def test_encodings_of_windows_are_told_apart(
    workspace: Workspace, root: Path, text: str, encoding: str
) -> None:
    (root / "old.csv").write_bytes(f"id;name\n1;{text}\n".encode(encoding))
    with pytest.raises(WorkspaceError, match=f"looks like {encoding}.*encoding='{encoding}'"):
        workspace.read_file("old.csv")


def test_damaged_utf8_is_called_so_wherever_the_damage_is(workspace: Workspace, root: Path) -> None:
    for text in ("é".encode()[:-1], b"caf\xe9", "é".encode() * 9000 + b"caf\xe9 x"):
        (root / "a.txt").write_bytes("é".encode() * 10 + b"\n" + text)
        with pytest.raises(WorkspaceError, match="is UTF-8 with bytes that are not"):
            workspace.read_file("a.txt")
    (root / "a.txt").write_bytes(b"a" * 9000 + "Straße, Köln".encode("latin-1"))
    with pytest.raises(WorkspaceError, match="looks like latin-1"):
        workspace.read_file("a.txt")


@pytest.mark.parametrize("encoding", ["rot13", "hex", "idna", "x", "unicode_escape", "\0"])
def test_other_encodings_are_refused_with_those_there_are(
    workspace: Workspace, encoding: str
) -> None:
    workspace.write_file("a", "a")
    with pytest.raises(WorkspaceError, match="use utf-8, base64, or big5, cp1250"):
        workspace.read_file("a", encoding=encoding)


def test_characters_outside_ascii_count_double_in_a_page(workspace: Workspace) -> None:
    workspace.write_file("a", "中文字符\n" * 1000)
    page = workspace.read_file("a", characters=900).page
    assert page is not None
    assert (page.lines, page.next) == (100, 100)
    workspace.write_file("a", "中" * 1000)
    page = workspace.read_file("a", characters=900).page
    assert page is not None
    assert (len(page.text), page.cut) == (450, 550)


def test_a_folder_is_listed_in_part_by_name_and_number(workspace: Workspace) -> None:
    for number in range(30):
        workspace.write_file(f"{number:02}.{'csv' if number % 3 else 'txt'}", "")
    listing = workspace.list_files("", lambda name: name.endswith(".txt"), 4)
    assert [each.path for each in listing.entries] == [
        f"{n:02}.txt" for n in (12, 15, 18, 21, 24, 27)
    ]
    assert listing.omitted == 0


def test_a_character_cut_by_the_probe_does_not_matter(workspace: Workspace) -> None:
    text = "x" * 8191 + "ä\n"
    workspace.write_file("edge.txt", text)
    assert text_of(workspace, "edge.txt") == text


def test_resources_are_text_or_bytes_with_their_type(workspace: Workspace, root: Path) -> None:
    workspace.write_file("a.csv", "a,b\n")
    (root / "x.png").write_bytes(PNG)
    assert workspace.read_resource("a.csv") == ("a,b\n", "text/csv")
    assert workspace.read_resource("x.png") == (PNG, "image/png")


def test_binary_content_is_written_from_base64(workspace: Workspace, root: Path) -> None:
    encoded = base64.encodebytes(PNG).decode()
    assert workspace.write_file("x.png", encoded, encoding="base64") == len(PNG)
    assert (root / "x.png").read_bytes() == PNG


@pytest.mark.parametrize(
    ("path", "content", "encoding", "message"),
    [
        ("x", "not base64!", "base64", "not valid base64"),
        ("x", "x", "latin-1", "not known"),
        ("x", "\ud800", "utf-8", "surrogate"),
        ("", "x", "utf-8", "folder"),
        ("folder/", "x", "utf-8", "folder"),
        ("folder", "x", "utf-8", "folder"),
        ("file/inside", "x", "utf-8", "no folder"),
        ("x" * 300, "x", "utf-8", "too long"),
        ("x" * 5000, "x", "utf-8", "too long"),
        ("a\0b", "x", "utf-8", "NUL"),
        ("\ud800", "x", "utf-8", "no usable path"),
        ("big", "x" * 2_000_000, "utf-8", "one file may have"),
    ],
)
def test_writes_that_cannot_be_done_are_refused_and_leave_nothing(
    root: Path, opener: Opener, path: str, content: str, encoding: str, message: str
) -> None:
    (root / "folder").mkdir()
    (root / "file").write_text("old")
    with pytest.raises(WorkspaceError, match=message):
        Workspace(root, opener=opener, file_bytes=1_000_000).write_file(
            path, content, encoding=encoding
        )
    assert sorted(entry.name for entry in root.iterdir()) == ["file", "folder"]
    assert (root / "file").read_text() == "old"


def test_a_full_workspace_takes_no_more(root: Path, opener: Opener) -> None:
    workspace = Workspace(root, opener=opener, disk_bytes=100_000)
    workspace.write_file("a", "x" * 60_000)
    with pytest.raises(WorkspaceError, match="full"):
        workspace.write_file("b", "x" * 60_000)


def test_replacing_a_file_keeps_its_mode(workspace: Workspace, root: Path) -> None:
    workspace.write_file("run.sh", "a")
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o644
    (root / "run.sh").chmod(0o4755)
    workspace.write_file("run.sh", "b")
    assert stat.S_IMODE((root / "run.sh").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_made_belongs_to_the_owner_of_the_folder(root: Path, opener: Opener) -> None:
    os.chown(root, 12345, 12346)
    Workspace(root, opener=opener).write_file("new/file", "x")
    for path in (root / "new", root / "new" / "file"):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
    Workspace(root, (23456, 23457), opener=opener).write_file("other/file", "x")
    assert (root / "other").stat().st_uid == 23456
    assert (root / "new").stat().st_uid == 12345


def test_a_missing_file_is_answered_with_what_is_there(workspace: Workspace) -> None:
    workspace.write_file("data/sales.csv", "x")
    with pytest.raises(WorkspaceError) as caught:
        workspace.read_file("data/slaes.csv")
    text = str(caught.value)
    assert "Did you mean 'sales.csv'?" in text
    assert "The folder 'data' holds 'sales.csv'." in text
    with pytest.raises(WorkspaceError, match=r"The workspace holds 'data'\."):
        workspace.read_file("nowhere/x.csv")


def test_a_folder_is_not_a_file(workspace: Workspace, root: Path) -> None:
    (root / "folder").mkdir()
    with pytest.raises(WorkspaceError, match="list_files"):
        workspace.read_file("folder")
    with pytest.raises(WorkspaceError, match="list_files"):
        workspace.read_resource("")


def test_long_folders_are_listed_in_part_with_the_rest_counted(
    workspace: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_LISTED", 5)
    for number in range(12):
        (root / f"{number:02d}").write_text("x" * number)
    listing = workspace.list_files()
    assert [entry.path for entry in listing.entries] == ["00", "01", "02", "03", "04"]
    assert [entry.size for entry in listing.entries] == [0, 1, 2, 3, 4]
    assert listing.omitted == 7


@pytest.mark.parametrize(
    "name", [b"caf\xe9.csv", b"a\nb.csv", b"a\x1b[31m.csv", "a\u202eb.csv".encode(), b"a\\b.csv"]
)
def test_names_are_read_back_as_listings_show_them(
    workspace: Workspace, root: Path, name: bytes
) -> None:
    for folder in (b"", b"in \xe9/"):
        place = os.path.join(os.fsencode(root), folder)  # noqa: PTH118  # of bytes
        os.makedirs(place, exist_ok=True)  # noqa: PTH103  # of bytes
        Path(os.fsdecode(place + name)).write_text("here")
    (shown,) = [each for each, kind in names_in(workspace).items() if kind == "file"]
    assert text_of(workspace, shown) == "here"
    (folder_shown,) = [each for each, kind in names_in(workspace).items() if kind == "folder"]
    (inside,) = names_in(workspace, folder_shown)
    assert text_of(workspace, inside) == "here"
    workspace.write_file(shown, "changed")
    assert Path(os.fsdecode(os.fsencode(root) + b"/" + name)).read_text() == "changed"
    assert len(names_in(workspace)) == 2


def test_a_name_that_two_files_are_shown_by_is_neither(workspace: Workspace, root: Path) -> None:
    (root / "a\x1bb").write_text("control")
    assert text_of(workspace, r"a\x1bb") == "control"
    (root / r"a\x1bb").write_text("literal")
    assert text_of(workspace, r"a\x1bb") == "literal"
    with pytest.raises(WorkspaceError, match="no file"):
        workspace.read_file(r"a\x1bc")


def test_names_that_would_deceive_are_shown_as_escapes(workspace: Workspace, root: Path) -> None:
    (root / "a\u202eb\n").write_text("x")
    (root / os.fsdecode(b"\xff")).write_text("x")
    assert list(names_in(workspace)) == ["a\\u202eb\\x0a", "\\udcff"]
