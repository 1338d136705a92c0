"""Notebooks as text: what is read of them, and what a change leaves as it was."""

from __future__ import annotations

import json
import time
from typing import Any

import nbformat
import pytest

from kernel_mcp.errors import NotebookError
from kernel_mcp.notebooks.document import NotebookDocument, code_cell, text_cell

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
    for place in (0, 2, 4):
        document.insert(place, code_cell(f"new{place}", "a = 1\na", [], None))
    document.insert(0, text_cell("first", "markdown", "# é"))
    assert [cell.id for cell in document.cells if cell.id.startswith(("new", "first"))] == [
        "first",
        "new0",
        "new2",
        "new4",
    ]
    valid(document.bytes())
    for name in ("new0", "first", "new4", "new2"):
        document.remove([cell.id for cell in document.cells].index(name))
    valid(document.bytes())
    if text != OLD:  # which has ids now
        assert document.bytes() == text.encode()


def test_a_notebook_without_cells_gets_some_and_loses_them() -> None:
    document = NotebookDocument.new()
    before = document.bytes()
    document.insert(0, code_cell("a", "1", [], 1))
    assert valid(document.bytes()).cells[0].source == "1"
    document.remove(0)
    assert document.bytes() == before


def test_cells_of_old_notebooks_get_ids_that_stay() -> None:
    document = read(OLD)
    names = [cell.id for cell in document.cells]
    assert names == [cell.id for cell in read(OLD).cells]
    document.insert(2, text_cell("new", "markdown", "x"))
    found = valid(document.bytes())
    assert [cell.id for cell in found.cells] == [*names, "new"]
    assert found.nbformat_minor == 5


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
        ("", "'{' is missing"),
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
