"""Exports of a session: what they say of its log, and what runs elsewhere."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import uv
from mcp_types import BlobResourceContents, TextContent

from kernel_mcp.verification.receipt import read_receipt
from tests.integration.agent import ANALYSIS, Agent, agent
from tests.integration.servers import Servers

pytestmark = pytest.mark.anyio


async def text_of(notebook: Agent, path: str) -> str:
    answer = await notebook.call("read_file", path=path, limit=100_000)
    first = answer.result.content[0]
    assert isinstance(first, TextContent), answer.text
    return first.text


async def cells_of(notebook: Agent, path: str) -> list[Any]:
    found = json.loads(await text_of(notebook, path))["cells"]
    assert isinstance(found, list)
    return found


async def test_the_places_where_variables_were_lost_are_in_every_export(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        await notebook.call("reset")
        await notebook.run("y = 2")
        await notebook.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        await notebook.run("z = 3")
        await notebook.call("export_notebook", path="a.ipynb")
        cells = await cells_of(notebook, "a.ipynb")
        lost = [each["source"] for each in cells if each["cell_type"] == "markdown"]
        assert [each["cell_type"] for each in cells].count("code") == 4
        assert len(lost) == 2
        assert lost[0].startswith("**Kernel boundary. The session was reset: ")
        assert lost[1].startswith("**Kernel boundary. Cell 3 was killed ")
        await notebook.call("export_notebook", path="a.py", format="script")
        script = (await text_of(notebook, "a.py")).splitlines()
        assert sum(row.startswith("# Kernel boundary. ") for row in script) == 2


async def test_cells_of_notebooks_name_their_records(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        first = await notebook.run("x = 1")
        place = {"session": first.cell["session"], "cell": 2}
        await notebook.call("open_notebook", path="b.ipynb")
        await notebook.run("x")
        (cell,) = await cells_of(notebook, "b.ipynb")
        assert cell["metadata"] == {"kernel-mcp": place}
        await notebook.call("run_cells", path="b.ipynb", cells=[cell["id"]])
        (cell,) = await cells_of(notebook, "b.ipynb")
        assert cell["metadata"] == {"kernel-mcp": {**place, "cell": 3}}
        await notebook.call("export_notebook", path="a.ipynb")
        own = [each["metadata"]["kernel-mcp"] for each in await cells_of(notebook, "a.ipynb")]
        assert own == [{**place, "cell": n, "status": "ok"} for n in (1, 2, 3)]


VALUES = (
    "import pandas as pd\n%matplotlib inline\nframe = pd.DataFrame({'a': [1, 2], 'b': [3.5, 4.5]})",
    "frame.sum()",
    "def scaled(value):\n    return value * 2\nprint('printed', scaled(21))",
    "scaled(frame['b'].iloc[0]), 'text'",
    "from pathlib import Path\nPath('out.txt').write_text('made');",
    "1 / 0",
)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def fetched(notebook: Agent, path: str) -> bytes:
    session = (await notebook.call("list_files")).data["session"]
    found = await notebook.client.read_resource(f"kernel://{session}/files/{path}")
    content = found.contents[0]
    if isinstance(content, BlobResourceContents):
        return base64.b64decode(content.blob)
    return content.text.encode()


def run_elsewhere(script: Path) -> list[str]:
    """Return the lines that an exported script prints in an environment of its own."""
    command = [uv.find_uv_bin(), "run", "--quiet", "--locked", script.name]
    here = {**os.environ, "UV_PYTHON": os.path.realpath(sys.executable)}  # uv would fetch another
    ran = subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, check=False, env=here
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


async def test_a_folder_runs_elsewhere_and_prints_the_values(
    servers: Servers, tmp_path: Path
) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        answers = [await notebook.run(code) for code in VALUES]
        answer = await notebook.call("export_notebook", path="study", format="folder")
        assert not answer.failed, answer.text
        assert "5 cells as script.py" in answer.text
        assert "uv run --locked script.py" in answer.text
        assert "not verified" in answer.text
        assert "Left out, as they did not end well or were undone: cell 6." in answer.text
        assert "IPython commands are comments in script.py: cell 1." in answer.text
        for name in ("script.py", "script.py.lock", "notebook.ipynb"):
            (tmp_path / name).write_bytes(await fetched(notebook, f"study/{name}"))
        head = (tmp_path / "script.py").read_text().partition("# ///\n")[0]
        assert head.count("pandas==") == 1
        assert head.index('"pandas==') < head.index("constraint-dependencies")
        assert head.index('"numpy==') > head.index("constraint-dependencies")
        assert len(json.loads((tmp_path / "notebook.ipynb").read_text())["cells"]) == 6
        printed = run_elsewhere(tmp_path / "script.py")
        expected = [answer.text.splitlines() for answer in answers[1:4]]
        assert printed == [line for lines in expected for line in lines]
        assert (tmp_path / "out.txt").read_text() == "made"


async def test_equal_zips_are_equal_files(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("import json; json.dumps([1])")
        answer = await notebook.call("export_notebook", path="a.zip", format="zip")
        assert not answer.failed, answer.text
        assert answer.links[0].mime_type == "application/zip"
        first = await fetched(notebook, "a.zip")
        with zipfile.ZipFile(io.BytesIO(first)) as archive:
            names = ["a/notebook.ipynb", "a/script.py", "a/script.py.lock"]
            assert archive.namelist() == names
            assert b"_show((json.dumps([1])))" in archive.read("a/script.py")
        await notebook.call("export_notebook", path="a.zip", format="zip")
        assert await fetched(notebook, "a.zip") == first


async def test_without_an_index_the_installed_versions_are_named(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        await notebook.run("import numpy; numpy.arange(3)")
    async with servers.agent(
        "--allow", ANALYSIS, "--offline", "--index-url", "http://127.0.0.1:9"
    ) as notebook:
        await notebook.run("import numpy; numpy.arange(3)")
        answer = await notebook.call("export_notebook", path="b", format="folder")
        assert "uv could not lock its packages" in answer.text
        rows = (await text_of(notebook, "b/requirements.txt")).splitlines()
        assert rows[0].startswith("# ")
        (numpy,) = [row for row in rows if row.startswith("numpy==")]
        assert len(numpy.partition(" # RECORD sha256:")[2]) == 64


async def test_a_verification_leaves_a_receipt_and_marks(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="in.txt", content="1 2")
        await notebook.call("open_notebook", path="dir/b.ipynb")
        codes = [
            "numbers = [int(n) for n in open('../in.txt').read().split()]",
            "open('out.txt', 'w').write(str(sum(numbers)));",
            "import os\nos.getpid() * 0 + len(os.urandom(2)) + id(object()) % 1",
        ]
        for code in codes:
            await notebook.run(code)
        answer = await notebook.call("verify", path="dir/b.ipynb", wait=120)
        assert "Reproduced: 3 of 3 cells" in answer.text
        assert "Receipt: 'dir/b.receipt.json'." in answer.text
        data = await fetched(notebook, "dir/b.receipt.json")
        receipt = read_receipt(data)
        assert len(data) < 2048
        assert receipt.result == "reproduced"
        assert [each.result for each in receipt.cells] == ["same"] * 3
        assert receipt.stale(codes) == []
        assert receipt.stale([*codes[:2], "5"]) == [3]
        (read,), (written,) = receipt.inputs, receipt.outputs
        assert (read.path, read.sha256, read.cells) == ("in.txt", digest(b"1 2"), (1,))
        assert (written.path, written.sha256, written.cells) == ("dir/out.txt", digest(b"3"), (2,))
        assert receipt.hash_seeds[0] != receipt.hash_seeds[1]
        assert receipt.python.count(".") == 2
        shown = await notebook.call("show", cell=2)
        assert "verified: reproduced" in shown.text
        await notebook.call("export_notebook", path="c", format="zip")
        with zipfile.ZipFile(io.BytesIO(await fetched(notebook, "c.zip"))) as archive:
            assert archive.read("c/receipt.json") == data
            assert archive.read("c/data.sha256").decode() == f"{digest(b'1 2')}  in.txt\n"


async def test_a_receipt_of_other_cells_is_in_no_folder(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("x = 1")
        await notebook.call("verify", wait=120)
        await notebook.run("x + 1")
        answer = await notebook.call("export_notebook", path="c", format="folder")
        assert "There is no receipt: the last verification was of other cells" in answer.text
        assert "receipt.json" not in (await notebook.call("list_files", path="c")).text
        await notebook.call("verify", wait=120)
        answer = await notebook.call("export_notebook", path="c", format="folder")
        assert "receipt.json is that of the last verification." in answer.text
        assert "c/receipt.json" in (await notebook.call("list_files", path="c")).text


async def test_a_receipt_of_cells_that_differ_says_which(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.run("import os")
        await notebook.run("os.urandom(8)")
        answer = await notebook.call("verify", wait=120)
        assert "Receipt" not in answer.text
        assert "verified: differs when run again" in (await notebook.call("show", cell=2)).text
        assert "verified: reproduced" in (await notebook.call("show", cell=1)).text
        await notebook.call("export_notebook", path="c", format="folder")
        receipt = read_receipt(await fetched(notebook, "c/receipt.json"))
        assert receipt.result == "differs"
        assert [each.result for each in receipt.cells] == ["same", "differs"]
        assert len(receipt.differences) == 1


@pytest.mark.ways
async def test_neither_receipts_nor_folders_replace_files_of_a_project(tmp_path: Path) -> None:
    (tmp_path / "a.receipt.json").write_text('{"of": "a shop"}')
    (tmp_path / "study").mkdir()
    (tmp_path / "b.zip").write_bytes(b"theirs")
    async with agent("--allow", "*", "--mount", f"{tmp_path}:rw") as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        await notebook.run("1 + 1")
        answer = await notebook.call("verify", path="a.ipynb", wait=120)
        assert "No receipt was written: 'a.receipt.json' is a file of another kind." in answer.text
        assert (tmp_path / "a.receipt.json").read_text() == '{"of": "a shop"}'
        for path, form in (("study", "folder"), ("b", "zip")):
            refused = await notebook.refused("export_notebook", path=path, format=form)
            assert "Nothing was done" in refused
        assert not [*(tmp_path / "study").iterdir()]
        await notebook.call("export_notebook", path="mine", format="folder")
        assert (tmp_path / "mine/script.py").exists()
        await notebook.call("open_notebook", path="c.ipynb")
        await notebook.run("1 + 2")
        for _ in range(2):
            assert "Receipt: " in (await notebook.call("verify", path="c.ipynb", wait=120)).text
