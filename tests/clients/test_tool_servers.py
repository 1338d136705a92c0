"""Code in cells calls the tools of servers from public registries."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.node import installed
from tests.conftest import lacking
from tests.integration.agent import agent as serving
from tests.unit.guest.importable.gateway import PIXEL

pytestmark = [pytest.mark.full, pytest.mark.anyio]

FILES = "@modelcontextprotocol/server-filesystem@2026.8.31"
GIT = ("mcp-server-git==2026.10.19",)
SQLITE = ("mcp-server-sqlite==2025.4.25", "mcp<2")


def python_server(folder: Path, packages: tuple[str, ...]) -> Path:
    """The folder of programs of a new environment with these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
    made = subprocess.run(pip, capture_output=True, text=True, check=False)
    if made.returncode:
        lacking("node", f"{packages[0]} cannot be installed: {made.stderr[-500:]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository and a picture, and `mcp.json` of three servers on it."""
    folder = tmp_path_factory.mktemp("tools")
    work = folder / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    (work / "p.png").write_bytes(PIXEL)
    as_us = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "a.txt"), (*as_us, "commit", "-qm", "first")):
        subprocess.run(["git", *words], cwd=work, check=True)
    (folder / "node").mkdir()
    programs = installed(folder / "node", FILES)
    git, sqlite = (
        python_server(folder / packages[0].partition("=")[0], packages)
        for packages in (GIT, SQLITE)
    )
    file_server = [str(programs / "mcp-server-filesystem"), str(work)]
    rows = {
        "files": {"command": str(programs / "node"), "args": file_server},
        "git": {"command": str(git / "mcp-server-git"), "args": ["--repository", str(work)]},
        "sqlite-db": {
            "command": str(sqlite / "mcp-server-sqlite"),
            "args": ["--db-path", str(work / "x.db")],
        },
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": rows}))
    return folder


async def test_code_calls_servers_of_files_git_and_sqlite(place: Path) -> None:
    work = place / "work"
    flags = ("--tool-servers", str(place / "mcp.json"), "--allow-tool", "files.*,git.*,sqlite-db.*")
    async with serving(*flags) as agent:
        await agent.run(f"work = {str(work)!r}\nfrom tools import files, git, sqlite_db as db")
        answer = await agent.run(
            "text = files.read_text_file(f'{work}/a.txt')\n"
            "print(repr(text), '[FILE] p.png' in files.list_directory(work))\n"
            "print(files.write_file(f'{work}/b.txt', text * 2), files.list_allowed_directories())\n"
        )
        assert answer.text.startswith("'one\\n' True\nSuccessfully wrote"), answer.text
        assert (work / "b.txt").read_text() == "one\none\n"
        answer = await agent.run("files.read_media_file(f'{work}/p.png')")
        assert [base64.b64decode(each.data) for each in answer.images] == [PIXEL]
        answer = await agent.run("files.read_text_file('/etc/passwd')")
        assert "ToolError: Access denied" in answer.text
        answer = await agent.run("print('b.txt' in git.git_status(work), git.git_log(work))")
        assert answer.text.startswith("True Commit history:")
        answer = await agent.run(
            "db.create_table('create table t (a int)')\n"
            "db.write_query('insert into t values (7)')\n"
            "print(db.read_query('select * from t'), db.list_tables())\n"
            "db.read_query()"
        )
        assert answer.text.startswith("[{'a': 7}] [{'name': 't'}]\n"), answer.text
        assert (
            "TypeError: sqlite_db.read_query: missing a required argument: 'query'" in answer.text
        )
        answer = await agent.run(
            "import asyncio\n"
            "each = (files.read_text_file.aio(f'{work}/a.txt', head=1) for _ in range(50))\n"
            "print({*await asyncio.gather(*each)})"
        )
        assert answer.text.startswith("{'one'}")
