"""Whatever goes wrong in showing one output costs that output alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from mcp_types import TextContent

from kernel_mcp.endpoints.plain import plain, plain_cell
from kernel_mcp.notebooks.views import AnswerBudget, full_cell
from kernel_mcp.output import bundles, layout, render, tags
from kernel_mcp.output.items import Display, Event, Failure, Redactor, Stream
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.notebook_export import _Writer
from kernel_mcp.tools.views import _view

pytestmark = pytest.mark.anyio

WHY = "[this output could not be shown: "
PAGE = Display({"text/html": "<p>page"}, {})
EVENTS: list[Event] = [Stream("stdout", "before\n"), PAGE, Stream("stdout", "after\n")]


def fails(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("planted")


def log_of(folder: Path, *events: Event) -> OutputLog:
    log = OutputLog(folder, 1)
    for event in events:
        log.add(event)
    return log


async def answer(log: OutputLog) -> str:
    found = await render.render(log.since(), session="s", cell=1)
    return "\n".join(each.text for each in found.content if isinstance(each, TextContent))


def in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)


@pytest.mark.parametrize("reference", ["&#", "&#x", "&#X"])
async def test_a_reference_to_no_character_is_shown_as_one(tmp_path: Path, reference: str) -> None:
    for end in (";", "", "<p>"):
        page = Display({"text/html": f"<p>a{reference}{'9' * 5000}{end}"}, {})
        text = await answer(log_of(tmp_path, EVENTS[0], page))
        assert in_order(text, "before", "a\N{REPLACEMENT CHARACTER}")
    assert tags.unescaped("&#65;&#x41;&amp;&#0000065;") == "AA&A"


async def test_a_display_that_cannot_be_read_leaves_the_others_in_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(tmp_path, *EVENTS)
    monkeypatch.setattr(bundles, "html_to_text", fails)
    assert in_order(await answer(log), "before", WHY, "planted", "after")
    assert in_order("".join(log.text()), "before", WHY, "after")
    assert "showing an output" in caplog.text


async def test_a_traceback_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, *EVENTS, Failure("E", "e", ("frame",)))
    monkeypatch.setattr(layout, "shortened", fails)
    monkeypatch.setattr(render, "shortened", fails)
    assert in_order(await answer(log), "before", "after", WHY)
    streams, _ = render.text_by_stream(log)
    assert WHY in streams["stderr"]
    assert in_order(streams["stdout"], "before", "after")


@pytest.mark.parametrize(("place", "name"), [(render, "fit"), (bundles.Representation, "data")])
async def test_a_picture_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    log = log_of(tmp_path, EVENTS[0], Display({"image/png": "AAAA"}, {}), EVENTS[2])
    monkeypatch.setattr(place, name, fails)
    assert in_order(await answer(log), "before", "image/png not shown", "planted", "after")


async def test_an_event_that_cannot_be_kept_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, EVENTS[0])
    with monkeypatch.context() as patched:
        patched.setattr(bundles.BundleStore, "put", fails)
        log.add(PAGE)
    log.add(EVENTS[2])
    assert in_order(await answer(log), "before", WHY, "after")


def test_an_event_that_cannot_be_masked_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Event] = []
    veil = Redactor(Masks([("KEY", "secret-value")]), found.append)
    monkeypatch.setattr(Masks, "anywhere", fails)
    for event in (PAGE, Stream("stdout", "after")):
        veil(event)
    veil.flush()
    assert WHY in str(found[0])
    assert "page" not in str(found)
    assert "after" in str(found[1:])


def test_a_page_for_the_lab_that_cannot_be_read_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.endpoints.plain.bare_html", fails)
    event = plain(PAGE)
    assert isinstance(event, Display)
    assert event.data["text/plain"].startswith(WHY)
    text = {"output_type": "stream", "name": "stdout", "text": "after"}
    page = {"output_type": "display_data", "data": dict(PAGE.data), "metadata": {}}
    first, second = plain_cell({"outputs": [page, text]})["outputs"]
    assert first["data"]["text/plain"].startswith(WHY)
    assert second == text


def test_an_output_of_a_notebook_that_cannot_be_read_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernel_mcp.output.bundles.html_to_text", fails)
    page = {"output_type": "display_data", "data": {"text/html": "<p>page"}}
    text = {"output_type": "stream", "text": "after"}
    cell: Any = SimpleNamespace(source="source", outputs=[page, text])
    found = list(full_cell(cell, AnswerBudget(1000)))
    assert [found[0], found[2]] == ["source", "after"]
    assert str(found[1]).startswith(WHY)


def test_an_output_that_cannot_be_written_into_a_notebook_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell: Any = SimpleNamespace(number=1, log=log_of(tmp_path, *EVENTS))
    monkeypatch.setattr(_Writer, "_display", fails)
    found = [json.loads(b"".join(each)) for each in _Writer(10_000, ())._outputs(cell, 1)]
    assert [each["text"][:30] for each in found] == ["before\n", WHY[:30], "after\n"]


def test_an_output_that_cannot_be_drawn_leaves_the_others_in_a_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, *EVENTS)
    monkeypatch.setattr("kernel_mcp.tools.views._display", fails)
    cell: Any = None
    before, failed, after = _view(cell, log.since())
    assert (before["text"], after["text"]) == ("before\n", "after\n")
    assert failed["text"].startswith(WHY)
