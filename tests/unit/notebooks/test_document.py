"""Notebooks as text: what is read of them, and what a change leaves as it was."""

from __future__ import annotations

import json
import time
from typing import Any

import nbformat
import pytest

from kernel_mcp.errors import NotebookError
from kernel_mcp.notebooks.document import NotebookDocument, code_cell, text_cell
from kernel_mcp.notebooks.metadata import notebook_of

FOREIGN = """{
    "cells": [
        {
            "attachments": {"a.png": {"image/png": "AAAA"}},
            "cell_type": "markdown",
            "id": "intro",
            "metadata": {"slideshow": {"slide_type": "slide"}, "float": 1.50e3},
            "source": ["# Title\\n", "caf\\u00e9"]
        },
        {
            "cell_type": "code",
            "execution_count": 3,
            "id": "load",
            "metadata": {"unknown": [1,2 ,3]},
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": "one\\n"}
            ],
            "source": "x = 1"
        }
    ],
    "metadata": {
        "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}},
        "of_another_tool": {"z": 0.10}
    },
    "nbformat": 4,
    "nbformat_minor": 5
}
"""
OLD = (
    '{"cells":[{"cell_type":"code","execution_count":null,"metadata":{},"outputs":[],"source":"1"},\
{"cell_type":"raw","metadata":{},"source":[]}],"metadata":{},"nbformat":4,"nbformat_minor":2}'
)


def read(text: str) -> NotebookDocument:
    return NotebookDocument.read("a.ipynb", text.encode())


def valid(content: bytes) -> Any:
    """The notebook as nbformat reads it, which checks it against the schema."""
    found = nbformat.reads(content.decode(), as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(found)
    return found


@pytest.mark.parametrize("text", [FOREIGN, OLD, FOREIGN.replace("    ", "\t")])
def test_what_is_not_changed_stays_byte_for_byte(text: str) -> None:
    assert read(text).bytes() == text.encode()


def test_cells_are_what_nbformat_reads() -> None:
    document = read(FOREIGN)
    for cell, wanted in zip(document.cells, valid(FOREIGN.encode()).cells, strict=True):
        assert (cell.id, cell.kind, cell.source) == (wanted.id, wanted.cell_type, wanted.source)
    assert (document.cells[1].count, len(document.cells[1].outputs)) == (3, 1)


def test_a_change_of_one_cell_touches_nothing_else() -> None:
    document = read(FOREIGN)
    document.change(1, {"execution_count": 4, "outputs": []})
    lines = FOREIGN.splitlines()
    kept = [line for line in document.bytes().decode().splitlines() if line in lines]
    assert len(kept) == len(lines) - 4  # the count, and the list of three lines
    found = valid(document.bytes())
    assert (found.cells[1].execution_count, found.cells[1].metadata.unknown) == (4, [1, 2, 3])


@pytest.mark.parametrize("text", [FOREIGN, OLD, FOREIGN.replace("    ", "\t")])
def test_cells_are_put_in_anywhere_and_taken_out_again(text: str) -> None:
    document = read(text)
    added = [
        document.insert(place, code_cell(f"new{place}", "a = 1\na", [], None))
        for place in (0, 2, 4)
    ]
    added.insert(0, document.insert(0, text_cell("first", "markdown", "# é")))
    assert [cell.id for cell in document.cells if cell.id in added] == added
    assert len(set(added)) == 4
    if text != OLD:
        assert added == ["first", "new0", "new2", "new4"]
    valid(document.bytes())
    for name in added:
        document.remove([cell.id for cell in document.cells].index(name))
    valid(document.bytes())
    assert document.bytes() == text.encode()


def test_a_notebook_without_cells_gets_some_and_loses_them() -> None:
    document = NotebookDocument.new()
    before = document.bytes()
    document.insert(0, code_cell("a", "1", [], 1))
    assert valid(document.bytes()).cells[0].source == "1"
    document.remove(0)
    assert document.bytes() == before


def test_cells_of_old_notebooks_have_ids_that_their_file_does_not_store() -> None:
    document = read(OLD)
    names = [cell.id for cell in document.cells]
    assert names == [cell.id for cell in read(OLD).cells]
    new = document.insert(0, text_cell("new", "markdown", "x"))
    assert document.change(1, {"outputs": [], "execution_count": 7}) == names[0]
    document.move(2, 0)
    text = document.bytes().decode()
    assert [cell.id for cell in read(text).cells] == [names[1], new, names[0]]
    replaced = document.change(2, {"source": ["2"]})
    assert replaced != names[0]
    assert read(document.bytes().decode()).cells[2].id == replaced
    assert valid(document.bytes()).nbformat_minor == 2
    assert b'"id"' not in document.bytes()


def test_equal_cells_of_old_notebooks_have_different_ids() -> None:
    cell = '{"cell_type":"raw","metadata":{},"source":[]}'
    cells = read(OLD.replace(cell, ",".join([cell] * 50))).cells
    assert len({each.id for each in cells}) == 51


@pytest.mark.parametrize(("place", "to", "order"), [(0, 2, "bca"), (2, 0, "cab"), (1, 1, "abc")])
def test_cells_are_moved_with_all_their_bytes(place: int, to: int, order: str) -> None:
    document = NotebookDocument.new()
    for at, name in enumerate("abc"):
        document.insert(at, code_cell(name, name, [], None))
    texts = {cell.id: cell.text for cell in document.cells}
    document.move(place, to)
    assert "".join(cell.source for cell in document.cells) == order
    assert {cell.id: cell.text for cell in document.cells} == texts
    assert "".join(cell.source for cell in valid(document.bytes()).cells) == order


@pytest.mark.parametrize(
    ("metadata", "language"),
    [
        ({}, ""),
        ({"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}}, "R"),
        ({"kernelspec": {"name": "ir", "display_name": "R"}}, "R"),
        ({"kernelspec": {"display_name": "Julia 1.10.4"}}, "Julia"),
        ({"kernelspec": {"name": "julia-1.10", "language": "julia"}}, "Julia"),
        ({"language_info": {"name": "bash"}}, "Bash"),
        ({"kernelspec": {"name": "bash"}, "language_info": {"name": "bash"}}, "Bash"),
        ({"language_info": {"name": "R"}, "kernelspec": {"name": "ir"}}, "R"),
        ({"kernelspec": {"name": "xcpp17", "language": "C++17"}}, "C++17"),
        ({"kernelspec": {"name": "xcpp17"}}, "C++"),
        ({"kernelspec": {"name": ".net-csharp"}}, "C#"),
        ({"kernelspec": {"name": "python3"}}, "Python"),
        ({"kernelspec": {"name": "conda-env-x", "language": "python"}}, "Python"),
        ({"language_info": {"name": "ipython", "version": "3"}}, "Python"),
        ({"kernelspec": {"name": "research-env", "display_name": "Mine"}}, ""),
        ({"kernelspec": 7, "language_info": []}, ""),
        ({"kernelspec": {"name": [], "language": 3}, "language_info": {"name": None}}, ""),
    ],
)
def test_the_language_of_a_notebook(metadata: dict[str, Any], language: str) -> None:
    document = read(
        OLD.replace('"metadata":{},"nbformat"', f'"metadata":{json.dumps(metadata)},"nbformat"')
    )
    assert document.language == language
    assert document.is_of(notebook_of("Python")) == (language in ("", "Python"))
    assert document.is_of(notebook_of("R")) == (language in ("", "R"))


def test_what_is_broken_is_told_by_its_line() -> None:
    broken = FOREIGN.replace('"id": "load",', '"id": "load"')
    with pytest.raises(NotebookError, match=r"line 14 \(.metadata"):
        read(broken)
    sides = '<<<<<<< HEAD\n    "a": 1\n=======\n    "a": 2\n>>>>>>> feature/x\n'
    conflict = FOREIGN.replace('    "metadata": {\n', f'{sides}    "metadata": {{\n')
    with pytest.raises(NotebookError) as told:
        read(conflict)
    assert "merge conflict that is not resolved, which begins in line" in str(told.value)
    assert "'<<<<<<< HEAD' and '>>>>>>> feature/x'" in str(told.value)


def test_ids_that_two_cells_have_become_different() -> None:
    document = read(FOREIGN.replace('"load"', '"intro"'))
    assert document.cells[0].id == "intro" != document.cells[1].id
    document.name_all()
    assert len({cell.id for cell in valid(document.bytes()).cells}) == 2


def test_half_a_surrogate_pair_stays() -> None:
    text = FOREIGN.replace("# Title", "\\ud83d")
    document = read(text)
    document.change(1, {"source": ["'\ud83d'"]})
    assert json.loads(document.bytes())["cells"][1]["source"] == ["'\ud83d'"]
    assert b'"\\ud83d\\n"' in document.bytes()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("[]", "'{' is missing"),
        (FOREIGN[:-3], "is missing"),
        (FOREIGN[:60], "is no JSON"),
        (FOREIGN + "x", "something follows"),
        (FOREIGN.replace('"nbformat": 4', '"nbformat": 3'), "format 3"),
        (FOREIGN.replace('"nbformat": 4,', ""), "format None"),
        (OLD.replace('"cells"', '"cels"'), "no list `cells`"),
        (OLD.replace('"metadata":{},"nbformat"', '"nbformat":4,"nbformat"'), "twice"),
        ('{"cells":[1],"nbformat":4,"nbformat_minor":5}', "cell 1 is no object"),
        ("[" * 100_000, "levels deep"),
    ],
)
def test_what_is_no_notebook_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(NotebookError, match=reason):
        read(text)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(NotebookError, match="not UTF-8 at byte 0"):
        NotebookDocument.read("a.ipynb", b"\xff\xfe{")


def test_a_byte_order_mark_stays() -> None:
    data = b"\xef\xbb\xbf" + FOREIGN.encode()
    document = NotebookDocument.read("a.ipynb", data)
    assert document.bytes() == data
    document.insert(0, code_cell("new", "1", [], None))
    assert document.bytes().startswith(b"\xef\xbb\xbf{")


def test_cells_of_one_id_do_not_take_the_square_of_their_number() -> None:
    cell = '{"cell_type":"raw","id":"same","metadata":{},"source":""}'
    text = '{"cells":[%s],"metadata":{},"nbformat":4,"nbformat_minor":5}'
    began = time.process_time()
    NotebookDocument(text % ",".join([cell] * 500))
    few = time.process_time() - began
    began = time.process_time()
    assert (
        len({each.id for each in NotebookDocument(text % ",".join([cell] * 20_000)).cells})
        == 20_000
    )
    assert time.process_time() - began < 40 * max(few, 0.02) * 4


@pytest.mark.parametrize("text", [FOREIGN, FOREIGN.replace("    ", "\t"), OLD])
def test_lines_end_as_those_of_the_file_do(text: str) -> None:
    document = read(text.replace("\n", "\r\n"))
    document.insert(0, code_cell("new", "a = 1\na", [], None))
    document.change(1, {"source": ["a\n", "b"]})
    document.insert(3, text_cell("last", "raw", "x"))
    assert document.bytes().count(b"\n") == document.bytes().count(b"\r\n")
    assert len(valid(document.bytes()).cells) == 4


def test_nothing_is_written_that_could_not_be_read_again() -> None:
    document = read(FOREIGN)
    before = document.bytes()
    many = {"output_type": "display_data", "metadata": {}, "data": {"a/json": [1] * 600_000}}
    document.insert(0, code_cell("new", "1", [many], None))
    with pytest.raises(NotebookError, match="more than 1,000,000 values"):
        document.insert(0, code_cell("next", "1", [many], None))
    with pytest.raises(NotebookError, match="more than 1,000,000 values"):
        document.change(1, {"outputs": [many]})
    document.change(0, {"outputs": [many]})
    document.remove(0)
    assert document.bytes() == before
    document.insert(0, code_cell("new", "1", [many], None))
    read(document.bytes().decode())


def test_long_texts_are_one_value() -> None:
    text = "x\n" * 20_000
    assert code_cell("a", text, [], None)["source"] == text
    assert code_cell("a", "x\ny", [], None)["source"] == ["x\n", "y"]
