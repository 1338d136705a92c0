from __future__ import annotations

import base64
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import nbformat
import pytest

from kernel_mcp.output import bundles
from kernel_mcp.output.items import Display, Event, Failure, Stream
from kernel_mcp.output.markup import JSON_DEPTH, Shape
from kernel_mcp.output.outputs import LogCaps, OutputLog
from kernel_mcp.sessions import notebook_export
from kernel_mcp.sessions.cell import Cell, CellOutcome, Status
from kernel_mcp.sessions.notebook_export import JSON_VALUES
from kernel_mcp.sessions.notebook_export import notebook as notebook_file

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20_000)).decode()


def cell(folder: Path, number: int, code: str, *events: Event, caps: LogCaps | None = None) -> Cell:
    log = OutputLog(folder, number, caps=caps)
    for event in events:
        log.add(event)
    log.close()
    return ended(number, code, log)


def ended(number: int, code: str, log: OutputLog) -> Cell:
    made = Cell.ended(number, code, log, CellOutcome(Status.OK), 0.0)
    made.numbered = True
    return made


def written(*cells: Cell, most: int = 48_000_000) -> dict[str, Any]:
    data = notebook_file(cells, most)
    assert len(data) <= most
    text = data.decode("utf-8")
    untyped: Any = nbformat
    untyped.validate(untyped.reads(text, as_version=4))
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_all_outputs_of_all_cells_are_in_the_notebook(tmp_path: Path) -> None:
    document = written(
        cell(
            tmp_path,
            1,
            "print('a')\nplot()",
            Stream("stdout", "a\n"),
            Stream("stderr", "w\n"),
            Display({"text/plain": "<Figure>", "image/png": PNG}, {"image/png": {"width": 3}}),
            Display({"text/plain": "42", "application/json": {"a": [1]}}, {}, result=True),
        ),
        cell(tmp_path, 2, "1/0", Failure("ZeroDivisionError", "division", ("\x1b[31mtb\x1b[0m",))),
    )
    first, second = document["cells"]
    assert "".join(first["source"]) == "print('a')\nplot()"
    stdout, stderr, figure, result = first["outputs"]
    assert (stdout["name"], "".join(stdout["text"])) == ("stdout", "a\n")
    assert stderr["name"] == "stderr"
    assert "".join(figure["data"]["image/png"]) == PNG
    assert figure["metadata"] == {"image/png": {"width": 3}}
    assert result["output_type"] == "execute_result"
    assert result["execution_count"] == 1
    assert result["data"]["application/json"] == {"a": [1]}
    assert second["outputs"][0] == {
        "output_type": "error",
        "ename": "ZeroDivisionError",
        "evalue": "division",
        "traceback": ["\x1b[31mtb\x1b[0m"],
    }
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)


def test_a_session_without_cells_is_a_valid_notebook() -> None:
    assert written()["cells"] == []


def test_how_a_cell_ended_is_kept_in_its_metadata(tmp_path: Path) -> None:
    killed = cell(tmp_path, 1, "boom()")
    killed.outcome = CellOutcome(Status.KILLED, False, "killed by SIGSEGV")
    running = Cell(2, "loop()", 0.0, OutputLog(tmp_path, 2))
    running.started = 0.0
    first, second = written(killed, running)["cells"]
    assert first["metadata"]["kernel-mcp"] == {"status": "killed", "cause": "killed by SIGSEGV"}
    assert second["metadata"]["kernel-mcp"] == {"status": "running"}
    assert (first["execution_count"], second["execution_count"]) == (1, None)


def test_half_a_surrogate_pair_anywhere_leaves_a_valid_file(tmp_path: Path) -> None:
    document = written(
        cell(
            tmp_path,
            1,
            "x = '\ud800'",
            Stream("stdout", "\ud800"),
            Display({"text/plain": "\udfff", "application/json": {"\ud800": "\ud800"}}, {}),
            Failure("E", "\ud800", ("\ud800",)),
        )
    )
    assert "".join(document["cells"][0]["source"]) == "x = '\ud800'"


def test_structured_values_of_types_that_must_be_text_are_text(tmp_path: Path) -> None:
    document = written(
        cell(tmp_path, 1, "x", Display({"text/x-own": {"a": 1}, "model/x+json": [1]}, {}))
    )
    data = document["cells"][0]["outputs"][0]["data"]
    assert "".join(data["text/x-own"]) == '{"a": 1}'
    assert "".join(data["model/x+json"]) == "[1]"


def test_a_long_stream_keeps_both_ends(tmp_path: Path) -> None:
    document = written(cell(tmp_path, 1, "x", Stream("stdout", "line\n" * 400_000)))
    texts = ["".join(output["text"]) for output in document["cells"][0]["outputs"]]
    assert "characters left out" in texts[1]
    assert sum(map(len, texts)) < 1_100_000


def test_displays_beyond_the_size_of_a_notebook_are_named(tmp_path: Path) -> None:
    figure = Display({"image/png": PNG}, {"kept": 1})
    outputs = written(cell(tmp_path, 1, "x", figure, figure), most=100_000)["cells"][0]["outputs"]
    assert "image/png" in outputs[0]["data"]
    words = "[image/png left out: the notebook is full]"
    assert outputs[1]["data"] == {"text/plain": words}
    assert outputs[1]["metadata"] == {"kept": 1, "kernel-mcp": {"left_out": [words]}}


def test_outputs_and_cells_that_find_no_room_are_counted(tmp_path: Path) -> None:
    cells = [
        cell(tmp_path, number, "x = '" + "y" * 200 + "'", *[Stream("stdout", "z" * 300)] * 2)
        for number in range(1, 400)
    ]
    document = written(*cells, most=60_000)
    *whole, last = document["cells"]
    assert last["source"] == f"[cells {len(whole) + 1} to 399 left out: the notebook is full]"
    assert len(whole) > 50
    assert "".join(whole[0]["outputs"][0]["text"]) == "z" * 600
    assert "1 more outputs of this cell left out" in whole[-1]["outputs"][0]["text"]


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (deep(JSON_DEPTH), f"it is nested more than {JSON_DEPTH} levels deep"),
        (deep(700), f"it is nested more than {JSON_DEPTH} levels deep"),
        ([0] * (JSON_VALUES + 1), "the notebook has too many values"),
        ({"a": float("inf")}, "it holds a number that JSON cannot carry"),
    ],
)
def test_json_that_no_reader_could_take_is_named(tmp_path: Path, value: Any, why: str) -> None:
    document = written(cell(tmp_path, 1, "x", Display({"application/json": value}, {})))
    data = document["cells"][0]["outputs"][0]["data"]
    assert data == {"text/plain": f"[application/json left out: {why}]"}


def test_strings_in_json_are_not_taken_for_values(tmp_path: Path) -> None:
    value = {"text": '[1,2,"' * JSON_VALUES, "\\": ["\\", '"', "]"]}
    document = written(cell(tmp_path, 1, "x", Display({"application/json": value}, {})))
    assert document["cells"][0]["outputs"][0]["data"] == {"application/json": value}


def test_metadata_that_no_reader_could_take_is_left_out(tmp_path: Path) -> None:
    shown = Display({"text/plain": "x"}, {"deep": deep(600)})
    nan = Display({"text/plain": "x"}, {"nan": float("nan")})
    document = written(cell(tmp_path, 1, "x", shown, nan))
    assert [output["metadata"] for output in document["cells"][0]["outputs"]] == [{}, {}]


def test_types_that_differ_only_in_case_are_one(tmp_path: Path) -> None:
    document = written(cell(tmp_path, 1, "x", Display({"text/plain": "a", "Text/Plain": "b"}, {})))
    assert document["cells"][0]["outputs"][0]["data"] == {"text/plain": "a"}


def test_a_display_whose_file_has_gone_is_named(tmp_path: Path) -> None:
    shown = Display({"image/png": PNG, "application/json": {"a": ["b"] * 9_000}}, {})
    made = cell(tmp_path, 1, "x", shown)
    (tmp_path / "1-1.png").unlink()
    whole = (tmp_path / "1-1.json").read_bytes()
    (tmp_path / "1-1.json").write_bytes(whole[:9_000])
    assert sorted(written(made)["cells"][0]["outputs"][0]["data"]["text/plain"].splitlines()) == [
        "[application/json left out: its end is missing]",
        "[image/png left out: the server could not read it (No such file or directory)]",
    ]


def test_memory_for_a_notebook_does_not_grow_with_the_values_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's objects these two million values would take a hundred megabytes."""
    monkeypatch.setattr(notebook_export, "JSON_VALUES", 200_000)
    crowd = Display({"application/json": [{"a": 1}] * 20_000}, {})
    made = cell(tmp_path, 1, "x", *[crowd] * 100)
    tracemalloc.start()
    try:
        notebook_file([made])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


def test_json_that_comes_in_pieces_has_the_same_shape() -> None:
    whole = Shape()
    text = '{"a\\\\\\"[": [1, "]\\"", {"b": []}]}'
    whole.feed(text)
    pieces = Shape()
    for character in text:
        assert not pieces.complete or character == "{"
        pieces.feed(character)
    assert pieces.complete
    assert (pieces.values, pieces.deepest) == (whole.values, whole.deepest) == (7, 4)


def test_an_update_of_another_cell_is_shown_in_that_cell_only(tmp_path: Path) -> None:
    first = cell(tmp_path, 1, "a", Display({"text/plain": "old"}, {}, "id"))
    log = OutputLog(tmp_path, 2, index=first.log._index)
    log.add(Display({"text/plain": "new"}, {}, "id", update=True))
    document = written(first, ended(2, "b", log))
    assert document["cells"][0]["outputs"][0]["data"] == {"text/plain": "new"}
    assert document["cells"][1]["outputs"] == []


def test_nbformat_and_pillow_are_not_loaded_before_they_are_needed() -> None:
    code = (
        "import sys, kernel_mcp.sessions.notebook_export, kernel_mcp.output.render\n"
        "print({'nbformat', 'PIL'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_the_numbers_of_a_figure_are_not_in_a_notebook(tmp_path: Path) -> None:
    numbers = {"type": "line", "elements": [{"points": [[1, 2]] * 1000}]}
    figure = {"text/plain": "line chart", "image/png": PNG, bundles.CHART: numbers}
    document = written(cell(tmp_path, 1, "plot()", Display(figure, {})))
    (output,) = document["cells"][0]["outputs"]
    assert output["data"].keys() == {"text/plain", "image/png"}
    assert output["data"]["text/plain"] == "line chart"


@pytest.mark.parametrize("text", ["<Figure size 640x480 with 1 Axes>", "", 7, "x" * 5000])
def test_a_figure_has_its_own_text_in_a_notebook(tmp_path: Path, text: object) -> None:
    figure = {"text/plain": "line chart", "image/png": PNG}
    metadata = {"kernel-mcp": {"text": text}, "image/png": {"width": 3}}
    document = written(cell(tmp_path, 1, "plot()", Display(figure, metadata)))
    (output,) = document["cells"][0]["outputs"]
    own = isinstance(text, str) and text.startswith("<Figure")
    assert output["data"]["text/plain"] == (text if own else "line chart")
    assert not own or output["metadata"] == {"image/png": {"width": 3}}
