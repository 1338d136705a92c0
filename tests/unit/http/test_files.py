"""Files by HTTP: whole or in part, put there at once or not at all, and no others."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from pathlib import Path

import anyio
import pytest

from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import WorkspaceError
from kernel_mcp.files import streams
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.http.files import links_of
from kernel_mcp.http.transfers import PIECE_BYTES, Transfers
from kernel_mcp.linux.safe_tree import Opener, by_walking, with_openat2
from kernel_mcp.sessions.directory import Caller
from tests.unit.http.asking import GONE, SILENT, asking

pytestmark = pytest.mark.anyio

LONG = bytes(range(256)) * (PIECE_BYTES // 64)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def test_what_is_put_is_there_and_can_be_got(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        put = await client.put("data/new/in.bin", LONG)
        assert put.status == 201
        assert put.json == {"size": len(LONG), "sha256": hashlib.sha256(LONG).hexdigest()}
        got = await client.get("data/new/in.bin")
        assert (got.status, got.body, got.whole) == (200, LONG, True)
        assert got.headers["content-length"] == str(len(LONG))
        assert got.headers["etag"] == put.headers["etag"]
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["content-disposition"] == 'attachment; filename="in.bin"'
        assert got.headers["content-security-policy"].startswith("sandbox")
        assert (await client.put("data/new/in.bin", b"")).status == 204
        assert (await client.get("data/new/in.bin")).body == b""
        assert names(client.workspace / "data/new") == ["in.bin"]


async def test_a_head_has_the_headers_of_a_get(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("a.txt", b"12345")
        head = await client.ask("HEAD", client.of("a.txt"))
        got = await client.get("a.txt")
        assert (head.status, head.body, head.headers) == (200, b"", got.headers)


@pytest.mark.parametrize(
    ("asked", "status", "part", "content_range"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=-0", 416, None, "bytes */10"),
        ("bytes=5-4", 200, b"0123456789", None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
        ("bytes=", 200, b"0123456789", None),
        ("bytes=-", 200, b"0123456789", None),
        ("lines=0-1", 200, b"0123456789", None),
        ("bytes=" + "9" * 30 + "-", 200, b"0123456789", None),
        ("bytes=" + " " * 20_000 + "x", 200, b"0123456789", None),
        ("Bytes = 0 - 3 ", 206, b"0123", "bytes 0-3/10"),
    ],
)
async def test_one_range_is_answered(
    tmp_path: Path, asked: str, status: int, part: bytes | None, content_range: str | None
) -> None:
    async with asking(tmp_path) as client:
        await client.put("a", b"0123456789")
        got = await client.get("a", {"range": asked})
        assert got.status == status
        assert got.headers.get("content-range") == content_range
        if part is not None:
            assert got.body == part


async def test_a_range_of_another_state_of_the_file_is_the_whole(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        tag = (await client.put("a", b"0123456789")).headers["etag"]
        rest = {"range": "bytes=5-"}
        assert (await client.get("a", rest | {"if-range": tag})).body == b"56789"
        for other in ('"old"', f"W/{tag}", formatdate(usegmt=True)):
            assert (await client.get("a", rest | {"if-range": other})).body == b"0123456789"


async def test_conditions_of_a_get(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        tag = (await client.put("a", b"1")).headers["etag"]
        modified = (await client.get("a")).headers["last-modified"]
        for same in ({"if-none-match": tag}, {"if-none-match": f'"x", W/{tag}'},
                     {"if-none-match": "*"}, {"if-modified-since": modified}):  # fmt: skip
            got = await client.get("a", same)
            assert (got.status, got.body, got.headers["etag"]) == (304, b"", tag)
        for other in ({"if-none-match": '"x"'}, {"if-modified-since": formatdate(0, usegmt=True)},
                      {"if-modified-since": "soon"}, {"if-match": tag}):  # fmt: skip
            assert (await client.get("a", other)).status == 200
        assert (await client.get("a", {"if-match": '"x"'})).status == 412


async def test_conditions_of_a_change(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        tag = (await client.put("a", b"1", {"if-none-match": "*"})).headers["etag"]
        for wrong in ({"if-none-match": "*"}, {"if-match": '"x"'}, {"if-match": f"W/{tag}"}):
            assert (await client.put("a", b"2", wrong)).status == 412
            assert (await client.delete("a", wrong)).status == 412
        assert (await client.put("new/b", b"2", {"if-match": "*"})).status == 412
        assert names(client.workspace) == ["a"]
        new = (await client.put("a", b"2", {"if-match": tag})).headers["etag"]
        assert (await client.put("a", b"3", {"if-match": tag})).status == 412
        assert (await client.delete("a", {"if-match": new})).status == 204
        assert (await client.delete("a")).status == 404


async def test_a_file_that_changes_while_its_successor_comes_is_kept(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        tag = (await client.put("a", b"old")).headers["etag"]
        path = client.workspace / "a"

        def body() -> list[bytes]:
            return [b"new", b""]

        upload = client.mine.workspace.begin_upload("a", 3, lambda found: f'"{found}"' == tag)
        path.write_bytes(b"changed by code")
        with pytest.raises(streams.Changed):
            client.mine.workspace.finish_upload(upload, lambda found: f'"{found}"' == tag)
        upload.close()
        assert path.read_bytes() == b"changed by code"
        assert (await client.ask("PUT", client.of("a"), {}, body())).status == 204


@pytest.mark.parametrize("nameless", [True, False], ids=["nameless", "named"])
async def test_a_body_that_breaks_off_changes_nothing(
    tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        refuse_nameless(monkeypatch)
    async with asking(tmp_path, disk_bytes=100_000, idle_s=0.01) as client:
        await client.put("a", b"old")
        length = {"content-length": "20"}
        for body in ([b"new", GONE], [b"new", SILENT], [b"new", b""], [b"x" * 21]):
            for path in ("a", "folder/b"):
                failed = await client.ask("PUT", client.of(path), length, body)
                assert failed.status in (400, 408)
        assert names(client.workspace) == ["a"]
        assert (client.workspace / "a").read_bytes() == b"old"
        assert client.mine.workspace.quota.reserved_bytes == 0
        assert (await client.put("folder/b", b"whole")).status == 201
        assert (client.workspace / "folder/b").read_bytes() == b"whole"
        assert names(client.workspace / "folder") == ["b"]


def refuse_nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such files here")
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)


async def test_the_quota_holds_for_uploads_of_any_length(tmp_path: Path) -> None:
    async with asking(tmp_path, disk_bytes=1_000_000) as client:
        too_large = await client.put("a", b"", {"content-length": "1000001"})
        assert (too_large.status, too_large.headers["connection"]) == (413, "close")
        assert (await client.put("a", bytes(600_000))).status == 201
        assert (await client.put("b", b"", {"content-length": "600000"})).status == 507
        endless = await client.ask("PUT", client.of("b"), {}, [bytes(50_000)] * 100)
        assert endless.status == 507
        assert "full" in endless.json["error"]
        assert (await client.put("b", bytes(300_000))).status == 201
        assert names(client.workspace) == ["a", "b"]


async def test_uploads_are_bounded_together(tmp_path: Path) -> None:
    async with asking(tmp_path, disk_bytes=1_000_000) as client:
        workspace = client.mine.workspace
        first = workspace.begin_upload("a", 700_000, lambda _: True)
        assert (await client.put("b", bytes(400_000))).status == 507
        with pytest.raises(WorkspaceError, match="being uploaded"):
            workspace.write_file("c", bytes(400_000))
        first.close()
        assert (await client.put("b", bytes(400_000))).status == 201


async def test_the_sessions_of_a_principal_have_one_quota(tmp_path: Path) -> None:
    async with asking(tmp_path, disk_bytes=5_000_000, quotas=Quotas(disk=1_000_000)) as client:
        assert (await client.put("a", b"", {"content-length": "1000001"})).status == 507
        assert (await client.put("a", os.urandom(500_000))).status == 201
        other = await client.manager.create(Caller(principal="ann"), name="other")
        target = f"/sessions/{other.handle}/files/b"
        full = await client.ask("PUT", target, {"content-length": "600000"}, [bytes(600_000)])
        assert (full.status, "quota `disk`" in full.json["error"]) == (507, True)
        endless = await client.ask("PUT", target, {}, [bytes(50_000)] * 50)
        assert endless.status == 507
        assert other.workspace.quota.reserved_bytes == 0
        assert (await client.ask("PUT", target, {}, [bytes(300_000)])).status == 201
        theirs = await client.manager.create(Caller(principal="bob"), name="own")
        target = f"/sessions/{theirs.handle}/files/b"
        assert (await client.ask("PUT", target, {}, [bytes(900_000)], who="bob")).status == 201


async def test_what_code_wrote_meanwhile_counts(tmp_path: Path) -> None:
    async with asking(tmp_path, disk_bytes=1_000_000) as client:
        upload = client.mine.workspace.begin_upload("a", 700_000, lambda _: True)
        upload.write(bytes(700_000))
        (client.workspace / "b").write_bytes(os.urandom(600_000))
        with pytest.raises(WorkspaceError, match="full"):
            client.mine.workspace.finish_upload(upload, lambda _: True)
        upload.close()
        assert names(client.workspace) == ["b"]


async def test_a_full_disk_is_told_before_the_body_comes(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        full = await client.put("a", b"", {"content-length": str(2**60)})
        assert (full.status, "disk is full" in full.json["error"]) == (507, True)


async def test_folders_are_listed_and_removed_when_empty(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("d/a", b"12")
        for path in ("d", "d/"):
            found = (await client.get(path)).json
            assert [(e["path"], e["kind"], e["size"]) for e in found["entries"]] == [
                ("d/a", "file", 2)
            ]
        top = await client.ask("GET", f"/sessions/{client.mine.handle}/files")
        assert [each["path"] for each in top.json["entries"]] == ["d"]
        for path in ("d", "d/"):
            refused = await client.delete(path)
            assert (refused.status, "not empty" in refused.json["error"]) == (409, True)
        assert (await client.put("d", b"")).status == 409
        assert (await client.put("d/", b"")).status == 409
        assert (await client.put("d/a/b", b"")).status == 409
        assert (await client.delete("d/a")).status == 204
        assert (await client.delete("d")).status == 204
        assert (await client.delete("")).status == 403
        assert names(client.workspace) == []


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "..%2fsecret.txt",
        "%2e%2e/secret.txt",
        "a/../../secret.txt",
        "/etc/passwd",
        "%2Fetc/passwd",
        "~/secret.txt",
        "link",
        "out/secret.txt",
        "inner",
    ],
)
async def test_nothing_outside_is_reached(tmp_path: Path, path: str) -> None:
    async with asking(tmp_path) as client:
        (client.workspace.parent / "secret.txt").write_text("outside")
        (client.workspace / "link").symlink_to("../secret.txt")
        (client.workspace / "out").symlink_to("..")
        (client.workspace / "own").write_text("own")
        (client.workspace / "inner").symlink_to("own")
        assert (await client.get(path)).status in (403, 409)
        if path not in ("link", "inner"):
            assert (await client.put(path, b"changed")).status in (403, 409)
            assert (await client.delete(path)).status in (403, 409)
        assert (client.workspace.parent / "secret.txt").read_text() == "outside"
        assert (client.workspace / "own").read_text() == "own"


@pytest.mark.parametrize("opener", [with_openat2, by_walking], ids=["openat2", "walk"])
async def test_a_way_that_code_changes_meanwhile_leads_nowhere(
    tmp_path: Path, opener: Opener
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("outside")
    async with asking(tmp_path, opener=opener) as client:
        await client.put("d/a", b"1")
        here = client.workspace
        changes: list[Callable[[], None]]
        changes = [partial((here / "d").symlink_to, outside), (here / "d").touch]
        for change in changes:
            upload = client.mine.workspace.begin_upload("d/a", 3, lambda _: True)
            upload.write(b"new")
            (here / "d").rename(here / "former")
            change()
            with pytest.raises(WorkspaceError, match="cannot be used"):
                client.mine.workspace.finish_upload(upload, lambda _: True)
            upload.close()
            assert (await client.delete("d/a")).status in (403, 409)
            assert (await client.get("d/a")).status in (403, 409)
            (here / "d").unlink()
            (here / "former").rename(here / "d")
        upload = client.mine.workspace.begin_upload("d/a", 3, lambda _: True)
        upload.write(b"new")
        shutil.rmtree(here / "d")
        assert client.mine.workspace.finish_upload(upload, lambda _: True)
        upload.close()
        assert (here / "d/a").read_bytes() == b"new"
        upload = client.mine.workspace.begin_upload("d/a", 3, lambda _: True)
        await client.manager.close(client.mine)
        with pytest.raises(WorkspaceError, match="removed"):
            client.mine.workspace.finish_upload(upload, lambda _: True)
        upload.close()
    assert (outside / "a").read_text() == "outside"
    assert names(outside) == ["a"]


async def test_mounted_folders_are_read_and_written_as_the_operator_says(tmp_path: Path) -> None:
    read_only, writable = tmp_path / "ro", tmp_path / "rw"
    shown = []
    for folder, mode in ((read_only, "ro"), (writable, "rw")):
        folder.mkdir()
        (folder / "a").write_text("host")
        (folder / ".env").write_text("secret")
        shown.append(ExposedMount(Mount(folder, f"/{mode}", mode)))
        shown[-1].covers[(".env",)] = "file"
    async with asking(tmp_path / "sessions", mounts=shown) as client:
        assert (await client.get("/ro/a")).body == b"host"
        for answer in (
            await client.put("/ro/a", b"new"),
            await client.put("/ro/b", b"new"),
            await client.delete("/ro/a"),
            await client.delete("/ro"),
            await client.get("/ro/.env"),
            await client.get("/rw/.env"),
            await client.put("/rw/.env", b"new"),
            await client.delete("/rw/.env"),
            await client.delete("/rw"),
        ):
            assert answer.status == 403
        assert (await client.put("/rw/d/b", b"new")).status == 201
        assert (await client.delete("/rw/a")).status == 204
        assert names(read_only) == [".env", "a"]
        assert names(writable) == [".env", "d"]
        assert (writable / "d/b").read_bytes() == b"new"


async def test_a_link_is_replaced_or_removed_itself(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        outside = tmp_path / "secret.txt"
        outside.write_text("outside")
        link = client.workspace / "link"
        link.symlink_to(outside)
        assert (await client.delete("link")).status == 204
        link.symlink_to(outside)
        assert (await client.put("link", b"new")).status == 204
        assert (link.read_bytes(), link.is_symlink()) == (b"new", False)
        assert outside.read_text() == "outside"


async def test_paths_are_what_was_sent(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        given = ["a b", "ä", "%25", "a\nb", 'q"', "b\\c", "-", "x" * 255]
        for name in given:
            escaped = "".join(f"%{byte:02x}" for byte in name.encode())
            assert (await client.put(escaped, name.encode())).status == 201
            assert (client.workspace / name).read_bytes() == name.encode()
            assert (await client.get(escaped)).body == name.encode()
        assert (await client.put("%ff%fe", b"raw")).status == 201
        assert os.fsdecode(b"\xff\xfe") in names(client.workspace)
        assert (await client.get("%ff%fe")).body == b"raw"
        assert (await client.get("a%2F..%2F%FF%fe")).body == b"raw"
        assert (await client.get("%00")).status == 400
        assert (await client.get("x" * 256)).status == 400
        assert (await client.put("y" * 5000, b"")).status == 400
        assert (await client.get("none")).status == 404
        assert "none" in (await client.get("none")).json["error"]
        listed = await client.get("")
        assert listed.status == 200
        assert len(listed.json["entries"]) == len(given) + 1


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("a.csv", 'attachment; filename="a.csv"'),
        ("a b", 'attachment; filename="a b"'),
        ("ä.csv", "attachment; filename=\"_.csv\"; filename*=UTF-8''%C3%A4.csv"),
        ('q".csv', "attachment; filename=\"q_.csv\"; filename*=UTF-8''q%22.csv"),
        ("a\r\nx: y", "attachment; filename=\"a__x: y\"; filename*=UTF-8''a__x%3A%20y"),
        ("100%", "attachment; filename=\"100_\"; filename*=UTF-8''100%25"),
    ],
)
async def test_any_name_is_safe_in_a_header(tmp_path: Path, name: str, header: str) -> None:
    async with asking(tmp_path) as client:
        (client.workspace / name).write_text("x")
        escaped = "".join(f"%{byte:02x}" for byte in name.encode())
        assert (await client.get(escaped)).headers["content-disposition"] == header


async def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        os.mkfifo(client.workspace / "fifo")
        listening = socket.socket(socket.AF_UNIX)
        there = os.open(client.workspace, os.O_PATH)
        listening.bind(f"/proc/self/fd/{there}/socket")
        for name in ("fifo", "socket"):
            got = await client.get(name)
            assert (got.status, name in got.json["error"]) == (403, True)
            assert (await client.put(name, b"file now")).status == 204
            assert (await client.get(name)).body == b"file now"
        listening.close()
        os.close(there)


async def test_a_sparse_file_is_sent_with_its_holes(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        with (client.workspace / "sparse").open("wb") as file:
            file.truncate(2**40)
        last = await client.get("sparse", {"range": "bytes=-5"})
        assert (last.body, last.headers["content-range"].split("/")[1]) == (bytes(5), str(2**40))


async def test_a_file_that_shrinks_is_cut_off_and_one_that_grows_is_not_longer(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path) as client:
        path = client.workspace / "a"
        path.write_bytes(LONG)

        async def grow(sent: int) -> None:
            with path.open("ab") as file:
                file.write(b"more")

        assert (await client.taking(grow).get("a")).body == LONG

        async def shrink(sent: int) -> None:
            os.truncate(path, PIECE_BYTES + 10)

        with pytest.raises(ConnectionAbortedError):
            await client.taking(shrink).get("a")


async def test_a_reader_that_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    async with asking(tmp_path, idle_s=0.01) as client:
        (client.workspace / "a").write_bytes(LONG)

        async def never(sent: int) -> None:
            if sent:
                await anyio.sleep_forever()

        before = len(names(Path("/proc/self/fd")))
        with pytest.raises(ConnectionAbortedError):
            await client.taking(never).get("a")
        assert len(names(Path("/proc/self/fd"))) == before


async def test_transfers_are_bounded(tmp_path: Path) -> None:
    transfers = Transfers(most=3, most_of_one=2)
    async with asking(tmp_path, transfers=transfers) as client:
        (client.workspace / "a").write_bytes(b"1")
        with transfers.one("ann"), transfers.one("ann"):
            refused = await client.get("a")
            assert (refused.status, "retry-after" in refused.headers) == (429, True)
            assert (await client.get("a", who="bob")).status == 404
            with transfers.one("bob"):
                assert (await client.get("a", who="eve")).status == 503
        assert (await client.get("a")).body == b"1"


async def test_foreign_and_unknown_sessions_are_one(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("a", b"1")
        handle = client.mine.handle
        for rest in ("files/a", "files/", "cells/1", "cells/1/outputs/1", "notebook"):
            foreign = await client.ask("GET", f"/sessions/{handle}/{rest}", who="bob")
            unknown = await client.ask("GET", f"/sessions/s-unknown12345/{rest}")
            assert foreign.status == unknown.status == 404
            assert "no session of yours at this address: /sessions/NAME" in str(unknown.body)
            text = foreign.json["error"].replace(handle, "s-unknown12345")
            assert text == unknown.json["error"]
        length = {"content-length": "1"}
        for method in ("PUT", "DELETE"):
            foreign = await client.ask(method, client.of("a"), length, [b"2"], who="bob")
            assert foreign.status == 404
        assert (await client.ask("GET", "/sessions/desk/files/a")).body == b"1"
        assert (await client.ask("GET", "/sessions/desk/files/a", who="bob")).status == 404


async def test_an_escaped_slash_makes_no_other_address(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("a", b"1")
        target = client.of("a").replace("/files", "%2Ffiles")
        assert (await client.ask("GET", target)).status == 404


async def test_values_that_are_hidden_stay_so_in_texts(tmp_path: Path) -> None:
    secret = "kmtest-value-that-is-hidden"
    async with asking(tmp_path, hidden=[("KEY", secret)]) as client:
        text = ("x" * (PIECE_BYTES - 7) + secret + "\nend ä").encode() + b"\xff"
        await client.put("a.txt", text)
        got = await client.get("a.txt", {"range": "bytes=5-"})
        assert got.status == 200
        assert got.body == text.replace(secret.encode(), b"[KEY masked]")
        assert (got.headers["accept-ranges"], "content-length" in got.headers) == ("none", False)
        await client.put("a.bin", b"\0" + text)
        assert (await client.get("a.bin", {"range": "bytes=0-1"})).body == b"\0x"


async def test_a_part_of_a_file_is_not_put(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("a", b"old")
        assert (await client.put("a", b"x", {"content-range": "bytes 0-0/3"})).status == 400
        assert (await client.get("a")).body == b"old"


async def test_a_cell_a_notebook_and_an_output(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        cell = client.mine.submit("print(1)", timeout_s=60)
        await cell.finished.wait()
        got = await client.ask("GET", f"/sessions/{client.mine.handle}/cells/1")
        assert (got.status, got.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        record = await client.ask("GET", "/sessions/desk/cells/1.json")
        assert record.json["cell"] == 1
        book = await client.ask("GET", "/sessions/desk/notebook")
        assert book.json["cells"][0]["source"] == "print(1)"
        assert book.headers["content-disposition"].endswith('.ipynb"')
        for rest in ("cells/2", "cells/x", "cells/1/outputs/9", "cells/"):
            missing = await client.ask("GET", f"/sessions/desk/{rest}")
            assert missing.status == 404


@pytest.mark.parametrize(
    ("address", "public", "link"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:1/sessions/s-1"),
        ("0.0.0.0", "", None),
        ("10.0.0.1", "", None),
        ("0.0.0.0", "https://pub.example", "https://pub.example/sessions/s-1"),
    ],
)
def test_links_are_those_that_clients_reach(address: str, public: str, link: str | None) -> None:
    settings = Settings(http=(address, 1), public_url=public)
    links = links_of(settings, public or "http://127.0.0.1:1")
    assert (links and links("s-1")) == link


async def test_the_owner_of_a_file_is_that_of_the_folder(tmp_path: Path) -> None:
    async with asking(tmp_path) as client:
        await client.put("d/a", b"1")
        await client.put("d/script.sh", b"1")
        (client.workspace / "d/script.sh").chmod(0o755)
        await client.put("d/script.sh", b"2")
        for name in ("d", "d/a"):
            info = (client.workspace / name).stat()
            assert (info.st_uid, info.st_gid) == (
                client.workspace.stat().st_uid,
                client.workspace.stat().st_gid,
            )
        assert (client.workspace / "d/a").stat().st_mode & 0o777 == 0o644
        assert (client.workspace / "d/script.sh").stat().st_mode & 0o777 == 0o755
