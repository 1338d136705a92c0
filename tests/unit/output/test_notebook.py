from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import nbformat

from kernel_mcp.output import notebook
from kernel_mcp.output.events import Display, Event, Failure, Stream
from kernel_mcp.output.notebook import notebook_json
from kernel_mcp.output.outputs import OutputLog

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20_000)).decode()


class Word(Enum):
    OK = "ok"
    KILLED = "killed"
    RUNNING = "running"


@dataclass
class Ended:
    execution_count: int | None = 1
    cause: str | None = None


@dataclass
class FakeCell:
    number: int
    code: str
    log: OutputLog
    status: Word = Word.OK
    outcome: Ended | None = field(default_factory=Ended)


@dataclass
class FakeSession:
    cells: list[FakeCell]


def cell(folder: Path, number: int, code: str, *events: Event) -> FakeCell:
    log = OutputLog(folder, number)
    for event in events:
        log.add(event)
    log.close()
    return FakeCell(number, code, log)


def written(*cells: FakeCell) -> dict[str, Any]:
    text = notebook_json(FakeSession(list(cells)))
    text.encode("utf-8")
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
    killed.status, killed.outcome = Word.KILLED, Ended(None, "killed by SIGSEGV")
    running = FakeCell(2, "loop()", OutputLog(tmp_path, 2), Word.RUNNING, None)
    first, second = written(killed, running)["cells"]
    assert first["metadata"]["kernel-mcp"] == {"status": "killed", "cause": "killed by SIGSEGV"}
    assert second["metadata"]["kernel-mcp"] == {"status": "running"}
    assert first["execution_count"] is None


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


def test_displays_beyond_the_size_of_a_notebook_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(notebook, "DATA_CHARS", 30_000)
    figure = Display({"image/png": PNG}, {})
    outputs = written(cell(tmp_path, 1, "x", figure, figure))["cells"][0]["outputs"]
    assert "image/png" in outputs[0]["data"]
    assert outputs[1]["data"] == {"text/plain": ["[image/png left out: the notebook is full]"]}


def test_an_update_of_another_cell_is_shown_in_that_cell_only(tmp_path: Path) -> None:
    first = cell(tmp_path, 1, "a", Display({"text/plain": "old"}, {}, "id"))
    log = OutputLog(tmp_path, 2, index=first.log._index)
    log.add(Display({"text/plain": "new"}, {}, "id", update=True))
    document = written(first, FakeCell(2, "b", log))
    assert document["cells"][0]["outputs"][0]["data"] == {"text/plain": ["new"]}
    assert document["cells"][1]["outputs"] == []


def test_nbformat_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, kernel_mcp.output.notebook, kernel_mcp.output.render\n"
        "print({'nbformat', 'PIL'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
