"""Notebooks as documents: what is executed is added, cells are read, edited and run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp_types import TextContent

from tests.integration.agent import Agent, agent
from tests.integration.lives import Place
from tests.integration.servers import Servers
from tests.unit.notebooks.test_document import FOREIGN, valid

pytestmark = pytest.mark.anyio


async def content(notebook: Agent, path: str = "a.ipynb") -> Any:
    """The notebook as nbformat reads it."""
    answer = await notebook.call("read_file", path=path, limit=100_000)
    first = answer.result.content[0]
    assert isinstance(first, TextContent)
    return valid(first.text.encode())


async def test_what_is_executed_is_in_the_notebook_when_it_is_answered(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        opened = await notebook.call("open_notebook", path="a.ipynb")
        assert "'a.ipynb' was made and is open" in opened.text
        await notebook.run("x = 1\nprint('text')\nx")
        await notebook.run("1/0")
        found = await content(notebook)
        assert [cell.source for cell in found.cells] == ["x = 1\nprint('text')\nx", "1/0"]
        stream, result = found.cells[0].outputs
        assert (stream.text, result.data["text/plain"]) == ("text\n", "1")
        assert found.cells[1].outputs[0].ename == "ZeroDivisionError"
        assert [cell.execution_count for cell in found.cells] == [1, 2]


async def test_a_cell_that_nobody_waits_for_is_added_when_it_ends(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        await notebook.run("import time; time.sleep(0.5); 'slow'", wait=0)
        await notebook.run("'fast'", wait=0)
        with anyio.fail_after(60):
            while len((await content(notebook)).cells) < 2:
                pass
        assert [cell.source[-6:] for cell in (await content(notebook)).cells] == [
            "'slow'",
            "'fast'",
        ]


async def test_changes_of_other_programs_stay(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=FOREIGN)
        opened = await notebook.call("open_notebook", path="a.ipynb")
        assert "intro markdown: # Title (+1 lines)" in opened.text
        assert "load [3] code: x = 1 → text" in opened.text
        await notebook.run("first = 1")
        change = (
            "import json, pathlib\n"
            "p = pathlib.Path('a.ipynb'); d = json.loads(p.read_text())\n"
            "d['cells'][1]['source'] = 'x = 2  # by a person'\n"
            "d['cells'].insert(0, {'cell_type': 'raw', 'id': 'p', 'metadata': {}, 'source': ''})\n"
            "p.write_text(json.dumps(d))"
        )
        await notebook.run(change)
        await notebook.run("last = 1")
        cells = (await content(notebook)).cells
        assert [cell.id for cell in cells[:3]] == ["p", "intro", "load"]
        assert [cell.source for cell in cells[2:]] == [
            "x = 2  # by a person",
            "first = 1",
            change,
            "last = 1",
        ]


async def test_an_open_notebook_that_cannot_be_written_is_told_with_each_cell(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        answer = await notebook.run("open('a.ipynb', 'w').write('{'); 'value'")
        assert "'value'" in answer.text
        assert (
            "Cell 1 is not in 'a.ipynb': 'a.ipynb' is no notebook that can be read" in answer.text
        )
        await notebook.run("import os; os.remove('a.ipynb')")
        closed = await notebook.call("open_notebook", path="")
        assert closed.text == "[kernel-mcp] 'a.ipynb' is closed."
        assert "a.ipynb" not in (await notebook.run("2")).text


async def names(notebook: Agent) -> list[str]:
    outline = await notebook.call("read_notebook", path="a.ipynb")
    return [line.split()[0] for line in outline.text.splitlines() if not line.startswith("[")]


async def test_cells_are_read_edited_and_refused_when_they_were_changed(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=FOREIGN)
        unread = await notebook.call(
            "edit_notebook", path="a.ipynb", op="replace", cell="load", source="x = 3"
        )
        assert unread.failed
        assert "was not read in this session" in unread.text
        shown = await notebook.call("read_notebook", path="a.ipynb", ids=["load", "intro"])
        assert "x = 1" in shown.text
        assert "one" in shown.text
        edited = await notebook.call(
            "edit_notebook", path="a.ipynb", op="replace", cell="load", source="x = 3"
        )
        assert not edited.failed, edited.text
        inserted = await notebook.call(
            "edit_notebook",
            path="a.ipynb",
            op="insert",
            cell="load",
            source="## b",
            kind="markdown",
        )
        assert "It is number 3" in inserted.text
        cells = (await content(notebook)).cells
        assert [cell.source for cell in cells] == ["# Title\ncafé", "x = 3", "## b"]
        assert (cells[1].outputs, cells[1].metadata.unknown) == ([], [1, 2, 3])
        foreign = FOREIGN.replace("x = 1", "x = 'theirs'")
        await notebook.call("write_file", path="a.ipynb", content=foreign)
        await notebook.call("read_notebook", path="a.ipynb")
        other = {"op": "replace", "cell": "load", "kind": "markdown", "source": "# a"}
        refusal = await notebook.refused("edit_notebook", path="a.ipynb", **other)
        assert "cell 'load' is of kind 'code' and stays that" in refusal
        foreign = foreign.replace("theirs", "theirs again")
        await notebook.call("write_file", path="a.ipynb", content=foreign)
        for op in ("replace", "delete"):
            refused = await notebook.call("edit_notebook", path="a.ipynb", op=op, cell="load")
            assert refused.failed
            assert "was changed since it was read" in refused.text
        assert (await notebook.call("read_file", path="a.ipynb", limit=1000)).text == foreign
        await notebook.call("read_notebook", path="a.ipynb")
        assert not (
            await notebook.call("edit_notebook", path="a.ipynb", op="delete", cell="load")
        ).failed
        assert await names(notebook) == ["intro"]


BOOK = {
    "cells": [
        {"cell_type": "code", "id": name, "source": source, "metadata": {}, "outputs": []}
        | {"execution_count": None}
        for name, source in (
            ("one", "a = 1\nprint('a is', a)"),
            ("two", "a + 1"),
            ("three", "a / 0"),
            ("four", "a = 4"),
        )
    ],
    "metadata": {},
    "nbformat": 4,
    "nbformat_minor": 5,
}


async def test_cells_are_run_in_order_up_to_the_first_error(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(BOOK))
        ran = await notebook.call("run_cells", path="a.ipynb", cells="all")
        assert ran.failed
        order = [ran.text.index(each) for each in ("a is 1", "Cell two", "2", "ZeroDivisionError")]
        assert order[0] < order[1] < order[3]
        assert "Not run: four" in ran.text
        one, two, three, four = (await content(notebook)).cells
        assert one.outputs[0].text == "a is 1\n"
        assert two.outputs[0].data["text/plain"] == "2"
        assert three.outputs[0].ename == "ZeroDivisionError"
        assert [each.execution_count for each in (one, two, three, four)] == [1, 2, 3, None]
        assert not (await notebook.call("run_cells", path="a.ipynb", cells="to two")).failed
        assert not (await notebook.call("run_cells", path="a.ipynb", cells=["four"])).failed
        assert (await notebook.run("a")).text == "4"
        assert len((await content(notebook)).cells) == 4


async def test_an_error_that_a_notebook_expects_stops_nothing(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        book = json.loads(json.dumps(BOOK))
        book["cells"][2]["metadata"] = {"tags": ["raises-exception"]}
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(book))
        ran = await notebook.call("run_cells", path="a.ipynb", cells="all")
        assert not ran.failed
        assert "ZeroDivisionError" in ran.text
        assert "Not run" not in ran.text
        assert (await notebook.run("a")).text == "4"


def code(*sources: str, tags: tuple[str, ...] = (), **metadata: Any) -> str:
    """The text of a notebook with these cells, of which the last has the `tags`."""
    cells: list[dict[str, Any]] = [
        {"cell_type": "code", "id": f"c{number}", "source": source, "metadata": {}, "outputs": []}
        | {"execution_count": None}
        for number, source in enumerate(sources)
    ]
    cells[-1]["metadata"] = {"tags": list(tags)}
    return json.dumps({**BOOK, "cells": cells, "metadata": metadata})


async def test_a_notebook_of_another_language_is_neither_run_nor_written(servers: Servers) -> None:
    text = code("x <- 5; x", kernelspec={"name": "ir", "display_name": "R", "language": "R"})
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="r.ipynb", content=text)
        for tool, arguments in (("run_cells", {"cells": "all"}), ("open_notebook", {})):
            refused = await notebook.refused(tool, path="r.ipynb", **arguments)
            assert "'r.ipynb' is a notebook of R, and cells run as Python here" in refused
        outline = await notebook.call("read_notebook", path="r.ipynb")
        assert "1 cell of R." in outline.text
        assert (await notebook.call("read_file", path="r.ipynb", limit=1000)).text == text


async def test_cells_run_in_the_folder_of_their_notebook(servers: Servers) -> None:
    moved = code("open('a.txt').read()", "import os; os.mkdir('in'); os.chdir('in')", "os.getcwd()")
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="sub/a.ipynb", content=moved)
        await notebook.call("write_file", path="sub/a.txt", content="theirs")
        await notebook.call("write_file", path="sub/besides.py", content="v = 7")
        home = (await notebook.run("import os; os.getcwd()")).text
        ran = await notebook.call("run_cells", path="sub/a.ipynb", cells=["c0", "c1"])
        assert "theirs" in ran.text
        assert (await notebook.run("os.getcwd()")).text == home
        again = await notebook.call("run_cells", path="sub/a.ipynb", cells=["c2"])
        assert "/sub/in'" in again.text
        opened = await notebook.call("open_notebook", path="sub/b.ipynb")
        assert "and runs in 'sub', its folder" in opened.text
        assert (await notebook.run("import besides; open('a.txt').read(), besides.v")).text == (
            "('theirs', 7)"
        )
        await notebook.call("open_notebook", path="")
        assert (await notebook.run("os.getcwd()")).text == home


async def test_cells_that_are_tagged_or_empty_are_not_run(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        text = code("a = 1", "a = 2", tags=("skip-execution",))
        await notebook.call("write_file", path="a.ipynb", content=text)
        ran = await notebook.call("run_cells", path="a.ipynb", cells="all")
        assert "Skipped, as tagged `skip-execution`: c1" in ran.text
        assert (await notebook.run("a")).text == "1"
        only = await notebook.call("run_cells", path="a.ipynb", cells=["c1"])
        assert "Nothing was run" in only.text
        await notebook.call("write_file", path="b.ipynb", content=code("", "  \n"))
        empty = await notebook.call("run_cells", path="b.ipynb", cells="all")
        assert not empty.failed
        assert "Nothing was run: none of these cells has code" in empty.text


async def test_cells_are_moved(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(BOOK))
        await notebook.call("read_notebook", path="a.ipynb")
        moved = await notebook.call(
            "edit_notebook", path="a.ipynb", op="move", cell="one", after="three"
        )
        assert "is moved behind cell three. It is number 3." in moved.text
        assert await names(notebook) == ["two", "three", "one", "four"]
        await notebook.call("edit_notebook", path="a.ipynb", op="move", cell="four")
        assert await names(notebook) == ["four", "two", "three", "one"]
        for wrong in ({"cell": ""}, {"cell": "one", "after": "one"}, {"cell": "one", "after": "x"}):
            await notebook.refused("edit_notebook", path="a.ipynb", op="move", **wrong)


async def test_a_cell_that_goes_on_is_written_when_it_ends(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        slow = json.loads(json.dumps(BOOK))
        slow["cells"][0]["source"] = "import time; time.sleep(1); print('late')"
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(slow))
        ran = await notebook.call("run_cells", path="a.ipynb", cells=["one", "four"], wait=0.1)
        assert ran.status == "running"
        assert "Not run: four" in ran.text
        assert "late" in (await notebook.call("wait")).text
        assert (await content(notebook)).cells[0].outputs[0].text == "late\n"


async def test_outputs_of_a_cell_that_was_changed_meanwhile_are_not_written(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        changing = json.loads(json.dumps(BOOK))
        changing["cells"][0]["source"] = (
            "import pathlib; p = pathlib.Path('a.ipynb')\n"
            "p.write_text(p.read_text().replace('a + 1', 'a + 2').replace('pathlib', 'os'))"
        )
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(changing))
        ran = await notebook.call("run_cells", path="a.ipynb", cells=["one"])
        assert "cell 'one' was changed while it ran" in ran.text
        assert not (await content(notebook)).cells[0].outputs


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("open_notebook", {"path": "a.txt"}, "no name for a notebook"),
        ("open_notebook", {"path": "/etc/a.ipynb"}, "outside the workspace"),
        ("read_notebook", {"path": "none.ipynb"}, "There is no file"),
        ("read_notebook", {"path": "a.ipynb", "ids": ["none"]}, "has no cell 'none'"),
        ("read_notebook", {"path": "a.ipynb", "first": 9}, "has 4 cells"),
        ("edit_notebook", {"path": "a.ipynb", "op": "delete"}, "cell is missing"),
        ("edit_notebook", {"path": "a.ipynb", "op": "replace", "cell": "none"}, "has no cell"),
        ("run_cells", {"path": "a.ipynb", "cells": "to none"}, "has no cell 'none'"),
        ("run_cells", {"path": "a.ipynb", "cells": ["one", "none"]}, "nothing was done"),
        ("edit_notebook", {"path": "a.ipynb", "op": "delete", "after": "one"}, "for move"),
        ("run_cells", {"path": "a.ipynb", "cells": []}, "nothing to run"),
    ],
)
async def test_bad_input_is_refused_and_loses_nothing(
    tool: str, arguments: dict[str, Any], reason: str, servers: Servers
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(BOOK))
        answer = await notebook.call(tool, **arguments)
        assert answer.failed
        assert reason in answer.text
        assert len((await content(notebook)).cells) == 4


@pytest.mark.ways
async def test_a_session_that_comes_back_goes_on_with_its_notebook(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.life("--allow", "*") as first:
        await first.call("open_notebook", path="a.ipynb")
        await first.run("x = 1")
    async with place.life("--allow", "*") as second:
        back = await second.run("x + 1")
        assert "'a.ipynb' is still open: what is executed is appended to it" in back.text
        assert "still open" not in (await second.call("list_variables")).text
        cells = (await content(second)).cells
        assert [cell.source for cell in cells] == ["x = 1", "x + 1"]
        await second.call("open_notebook", path="")
    async with place.life("--allow", "*") as third:
        await third.run("x + 2")
        assert len((await content(third)).cells) == 2


async def test_two_sessions_and_a_person_write_to_one_notebook(
    tmp_path: Path, servers: Servers
) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    path = str(shown / "a.ipynb")
    async with servers.agent("--allow", "*", "--mount", f"{shown}:rw") as notebook:
        other = (await notebook.call("create_session")).data["session"]
        await notebook.call("open_notebook", path=path)
        await notebook.call("open_notebook", path=path, session=other)

        async def run(session: str) -> None:
            for number in range(5):
                await notebook.run(f"{number}", session=session)

        def add(number: int) -> None:
            """As an editor saves: read, then replaced."""
            found = json.loads(Path(path).read_text())
            cell = {"cell_type": "raw", "id": f"p{number}", "metadata": {}, "source": "by hand"}
            found["cells"].insert(0, cell)
            (shown / "new").write_text(json.dumps(found))
            (shown / "new").rename(path)

        add(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "")
            tasks.start_soon(run, other)
        add(1)
        await notebook.run("'last'")
        cells = valid(Path(path).read_bytes()).cells
        assert [cell.id for cell in cells[:2]] == ["p1", "p0"]
        assert sorted(cell.source for cell in cells[2:-1]) == sorted(2 * [f"{n}" for n in range(5)])
        assert cells[-1].source == "'last'"


async def test_each_version_that_is_saved_is_in_the_audit_trail(
    tmp_path: Path, servers: Servers
) -> None:
    log = tmp_path / "audit.jsonl"
    async with servers.agent("--allow", "*", "--audit-log", str(log)) as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        await notebook.run("1")
        data = (await notebook.call("read_file", path="a.ipynb", limit=100_000)).result.content[0]
        assert isinstance(data, TextContent)
    written = [json.loads(line) for line in log.read_text().splitlines()]
    files = [each for each in written if each["event"] == "file"]
    assert [each["path"] for each in files] == ["a.ipynb", "a.ipynb"]
    assert files[1]["sha256"] == hashlib.sha256(data.text.encode()).hexdigest()


async def test_a_notebook_that_cannot_be_written_is_told_and_is_no_failure_of_the_server(
    capfd: pytest.CaptureFixture[str], servers: Servers
) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        answer = await notebook.run("open('a.ipynb', 'w').write('rubbish')")
        assert "Cell 1 is not in 'a.ipynb': 'a.ipynb' is no notebook" in answer.text
    assert "the server failed" not in capfd.readouterr().err


async def test_a_notebook_that_nobody_may_write_stays_as_it_is(servers: Servers) -> None:
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=FOREIGN)
        await notebook.call("read_notebook", path="a.ipynb")
        await notebook.call("open_notebook", path="a.ipynb")
        locked = await notebook.run("import os; os.chmod('a.ipynb', 0o444)")
        assert "Cell 1 is not in 'a.ipynb': 'a.ipynb' is read-only" in locked.text
        for tool, arguments in (
            ("open_notebook", {}),
            ("edit_notebook", {"op": "delete", "cell": "load"}),
            ("run_cells", {"cells": "all"}),
        ):
            assert "is read-only" in await notebook.refused(tool, path="a.ipynb", **arguments)
        assert (await notebook.run("open('a.ipynb').read()")).text
        text = await notebook.call("read_file", path="a.ipynb", limit=1000)
        assert text.text == FOREIGN


def of_cells(**sources: str) -> str:
    """A notebook with code cells of these ids."""
    cells = [
        {"cell_type": "code", "id": name, "source": source, "metadata": {}, "outputs": []}
        | {"execution_count": None}
        for name, source in sources.items()
    ]
    return json.dumps({**BOOK, "cells": cells})


NOISE = "from PIL import Image\nimport os\nImage.frombytes('RGB', (300, 300), os.urandom(270_000))"


@pytest.mark.ways
async def test_answers_about_many_outputs_are_bounded_and_say_what_they_leave_out(
    servers: Servers,
) -> None:
    async with servers.agent("--allow", "numpy,pandas,matplotlib") as notebook:
        talk = {f"t{number}": "for i in range(2000): print('line', i)" for number in range(20)}
        await notebook.call("write_file", path="a.ipynb", content=of_cells(**talk, end="1/0"))
        ran = await notebook.call("run_cells", path="a.ipynb", cells="all", wait=120)
        assert len(ran.text) < 35_000
        assert "ZeroDivisionError" in ran.text
        assert "Not shown, as an answer holds no more: outputs of " in ran.text
        assert "t19. They are in the notebook" in ran.text
        pictures = {f"p{number}": NOISE for number in range(6)}
        await notebook.call("write_file", path="b.ipynb", content=of_cells(**pictures))
        ran = await notebook.call("run_cells", path="b.ipynb", cells="all", wait=120)
        seen = await notebook.call("read_notebook", path="b.ipynb", ids=list(pictures))
        for answer in (ran, seen):
            assert 0 < sum(len(each.data) for each in answer.images) < 1_000_000
        assert "outputs of p" in ran.text
        assert "that cannot be shown" in seen.text


async def test_outputs_of_strangers_are_read_within_one_answer(servers: Servers) -> None:
    many = [{"output_type": "stream", "name": "stdout", "text": "x" * 150}] * 20_000
    broken = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "\u00e9"}}
    cells = json.loads(of_cells(many="1", broken="2"))
    cells["cells"][0]["outputs"], cells["cells"][1]["outputs"] = many, [broken]
    async with servers.agent("--allow", "*") as notebook:
        await notebook.call("write_file", path="a.ipynb", content=json.dumps(cells))
        seen = await notebook.call("read_notebook", path="a.ipynb", ids=["broken", "many"])
        assert not seen.failed, seen.text
        assert "image/png that cannot be shown: not valid base64" in seen.text
        assert "more outputs are not shown]" in seen.text
        assert len(seen.result.content) < 2000
        assert len(seen.text) < 35_000


async def test_cells_that_are_taken_back_are_tagged_until_they_run_again() -> None:
    async with agent("--allow", "*", "--warm", "1", pauses=False) as notebook:
        await notebook.call("open_notebook", path="a.ipynb")
        await notebook.run("x = 1")
        await notebook.run("x = 2", checkpoint=True)
        back = await notebook.call("undo")
        assert "In 'a.ipynb' they are tagged `undone`." in back.data["note"]
        cells = (await content(notebook)).cells
        assert [cell.metadata.get("tags") for cell in cells] == [None, ["undone"]]
        await notebook.call("run_cells", path="a.ipynb", cells=[cells[1].id])
        assert (await content(notebook)).cells[1].metadata.tags == []
