from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp_types import ImageContent, ResourceLink, TextContent
from PIL import Image

from kernel_mcp.output import render as render_module
from kernel_mcp.output.items import Display, Failure, Stream
from kernel_mcp.output.layout import MAX_LINKS, MAX_PICTURES, Gap, Text, lay_out
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.render import Budget, Rendered, render

pytestmark = pytest.mark.anyio


def picture(width: int = 20, height: int = 10, *, noise: bool = False, kind: str = "PNG") -> str:
    size = (width, height)
    raw = os.urandom(width * height * 3)
    image = Image.frombytes("RGB", size, raw) if noise else Image.new("RGB", size, "red")
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def figure(data: str, mime: str = "image/png") -> Display:
    return Display({"text/plain": "<Figure size 640x480 with 1 Axes>", mime: data}, {})


def log_of(folder: Path, *events: Stream | Display | Failure) -> OutputLog:
    log = OutputLog(folder, 3)
    for event in events:
        log.add(event)
    log.close()
    return log


async def shown(log: OutputLog, **budget: int) -> Rendered:
    return await render(log.since(), session="abc", cell=3, budget=Budget(**budget))


def kinds(rendered: Rendered) -> list[str]:
    return [block.type for block in rendered.content]


def text_of(rendered: Rendered) -> str:
    return "\n".join(b.text for b in rendered.content if isinstance(b, TextContent))


def links_of(rendered: Rendered) -> dict[str, str | None]:
    return {b.uri: b.mime_type for b in rendered.content if isinstance(b, ResourceLink)}


def images_of(rendered: Rendered) -> list[ImageContent]:
    return [block for block in rendered.content if isinstance(block, ImageContent)]


async def test_text_results_and_errors_come_in_order_without_labels(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        Stream("stdout", "one\n"),
        Stream("stderr", "warning"),
        Display({"text/plain": "42"}, {}, result=True),
        Failure("ValueError", "bad", ("Cell In[1], line 1\n----> 1 f()\n", "ValueError: bad")),
    )
    rendered = await shown(log)
    assert kinds(rendered) == ["text"]
    assert text_of(rendered) == (
        "one\nwarning\n42\nTraceback (most recent call last):\nCell In[1], line 1\n    f()\n"
        "ValueError: bad"
    )
    assert rendered.omitted == 0
    assert rendered.mime_types == [
        "application/vnd.jupyter.stdout",
        "application/vnd.jupyter.stderr",
        "text/plain",
        "application/vnd.jupyter.error",
    ]


async def test_no_output_is_said(tmp_path: Path) -> None:
    assert text_of(await shown(log_of(tmp_path))) == "(no output)"


async def test_pictures_stand_between_the_texts_around_them(tmp_path: Path) -> None:
    data = picture()
    log = log_of(
        tmp_path,
        Stream("stdout", "before\n"),
        figure(data),
        Stream("stdout", "between\n"),
        figure(picture(kind="JPEG"), "image/jpeg"),
    )
    rendered = await shown(log)
    assert kinds(rendered) == ["text", "image", "text", "image"]
    assert [image.mime_type for image in images_of(rendered)] == ["image/png", "image/jpeg"]
    assert base64.b64decode(images_of(rendered)[0].data) == base64.b64decode(data)
    assert rendered.mime_types[1::2] == ["image/png", "image/jpeg"]


async def test_a_picture_that_is_too_large_is_shrunk_and_its_original_linked(
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path, figure(picture(700, 700, noise=True)))
    rendered = await shown(log, picture_bytes=100_000)
    (image,) = images_of(rendered)
    assert len(base64.b64decode(image.data)) <= 100_000
    assert "original: kernel://abc/cells/3/outputs/1]" in text_of(rendered)
    assert links_of(rendered) == {"kernel://abc/cells/3/outputs/1": "image/png"}
    original = log.output("1")
    assert original is not None
    assert len(original.data()) > 700 * 700 * 3


async def test_all_pictures_together_stay_within_the_budget(tmp_path: Path) -> None:
    small = picture()
    log = log_of(tmp_path, figure(small), *[figure(picture(300, 300, noise=True))] * 4)
    rendered = await shown(log, picture_bytes=200_000)
    images = images_of(rendered)
    assert len(images) == 5
    assert images[0].data == "".join(small.split())
    assert sum(len(base64.b64decode(image.data)) for image in images) <= 200_000


async def test_more_pictures_than_an_answer_holds_are_named(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[figure(picture())] * 20)
    rendered = await shown(log)
    assert len(images_of(rendered)) == MAX_PICTURES
    assert "[… 8 pictures left out: kernel://abc/cells/3/outputs/7 to" in text_of(rendered)


@pytest.mark.parametrize("data", ["", "!!", base64.b64encode(b"\x89PNG\r\n\x1a\nrest").decode()])
async def test_a_broken_picture_is_a_line_of_text(tmp_path: Path, data: str) -> None:
    rendered = await shown(log_of(tmp_path, figure(data)))
    assert images_of(rendered) == []
    assert "[image/png not shown:" in text_of(rendered)


async def test_a_smaller_copy_is_shown_where_the_picture_cannot_be_decoded(tmp_path: Path) -> None:
    whole = picture(9000, 9000)
    both = Display({"image/png": whole, "image/jpeg": picture(kind="JPEG")}, {})
    rendered = await shown(log_of(tmp_path, both))
    assert kinds(rendered) == ["image", "text", "resource_link"]
    assert "a smaller copy, as its 9,000x9,000 pixels are too many to decode" in text_of(rendered)
    assert links_of(rendered) == {"kernel://abc/cells/3/outputs/1": "image/png"}


async def test_the_bytes_decide_what_a_picture_is(tmp_path: Path) -> None:
    rendered = await shown(log_of(tmp_path, figure(picture(kind="JPEG"), "image/png")))
    assert [image.mime_type for image in images_of(rendered)] == ["image/jpeg"]


async def test_pictures_stop_when_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_module, "PICTURES_S", -1.0)
    rendered = await shown(log_of(tmp_path, figure(picture())))
    assert "no time left" in text_of(rendered)
    assert links_of(rendered)


@pytest.mark.parametrize(
    ("data", "text", "link"),
    [
        (
            {"text/plain": "a", "text/html": "<script>draw()</script>"},
            "a",
            "text/html",
        ),
        ({"text/plain": "a map", "text/html": "<iframe srcdoc='x'>"}, "a map", "text/html"),
        ({"text/html": "<p>Words <b>only</b></p>"}, "Words only", "text/html"),
        ({"image/svg+xml": "<svg/>", "text/plain": "<Figure>"}, "<Figure>", "image/svg+xml"),
        ({"text/latex": "$x$", "text/plain": "x"}, "x", "text/latex"),
        (
            {"application/vnd.plotly.v1+json": {"data": []}, "text/plain": "Figure({})"},
            "Figure({})",
            "application/vnd.plotly.v1+json",
        ),
        ({"application/x-own": "?"}, "[application/x-own, 1 characters]", "application/x-own"),
    ],
)
async def test_rich_output_has_a_readable_form_in_place_and_a_link(
    tmp_path: Path, data: dict[str, Any], text: str, link: str
) -> None:
    log = log_of(tmp_path, Display(data, {}))
    rendered = await shown(log)
    assert text_of(rendered) == text
    assert links_of(rendered) == {"kernel://abc/cells/3/outputs/1": link}
    assert rendered.mime_types == [link]


@pytest.mark.parametrize(
    "data",
    [
        {"text/plain": "   a\n0  1", "text/html": "<table/>"},
        {"application/json": {"a": 1}},
        {"text/latex": "$x$"},
        {"text/markdown": "**x**"},
        {"text/plain": "[1] 2", "text/html": "2", "text/markdown": "2", "text/latex": "2"},
    ],
)
async def test_what_the_answer_shows_in_full_has_no_link(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    rendered = await shown(log_of(tmp_path, Display(data, {})))
    assert text_of(rendered).strip()
    assert links_of(rendered) == {}


async def test_two_rich_forms_of_one_output_have_addresses_of_their_own(tmp_path: Path) -> None:
    log = log_of(tmp_path, Display({"text/html": "<b>", "application/vnd.a+json": {}}, {}))
    links = links_of(await shown(log))
    for uri, mime in links.items():
        part = log.output(uri.rpartition("/")[2])
        assert part is not None
        assert part.mime == mime
    assert len(links) == 2


async def test_an_answer_holds_a_bounded_number_of_links(tmp_path: Path) -> None:
    log = log_of(tmp_path, *[Display({"text/html": "<b>x</b>"}, {})] * 100)
    rendered = await shown(log)
    assert len(links_of(rendered)) == MAX_LINKS
    assert "76 more links left out" in text_of(rendered)


async def test_text_over_the_budget_keeps_both_ends_with_count_and_link(tmp_path: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(100_000))
    rendered = await shown(log_of(tmp_path, Stream("stdout", lines)))
    text = text_of(rendered)
    head, _, tail = text.partition("[… ")
    assert len(text) < 30_200
    assert head.startswith("line 0\n")
    assert head.endswith("\n")
    assert tail.endswith("line 99999")
    kept_tail = tail.partition("\n")[2] + "\n"
    assert len(head) + len(kept_tail) + rendered.omitted == len(lines)
    assert (
        f"[… {rendered.omitted:,} characters left out; the whole: kernel://abc/cells/3 …]" in text
    )
    assert links_of(rendered) == {"kernel://abc/cells/3": "text/plain"}


async def test_a_long_result_does_not_push_out_the_print_before_it(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        Stream("stdout", "important\n"),
        Display({"text/plain": "[begin " + "x, " * 50_000 + "end]"}, {}, result=True),
    )
    text = text_of(await shown(log, characters=3000))
    assert text.startswith("important\n[begin x")
    assert text.endswith("x, end]")
    assert len(text) < 3300


async def test_a_long_result_alone_gets_the_whole_budget(tmp_path: Path) -> None:
    log = log_of(tmp_path, Display({"text/plain": "x" * 100_000}, {}, result=True))
    rendered = await shown(log, characters=3000)
    assert rendered.omitted == 97_000


async def test_only_the_picture_that_is_shown_of_two_forms_is_offered(tmp_path: Path) -> None:
    data = {"image/png": picture(), "image/jpeg": picture(kind="JPEG"), "text/markdown": "# T"}
    rendered = await shown(log_of(tmp_path, Display(data, {})))
    assert kinds(rendered) == ["image", "text"]


async def test_the_exception_is_always_shown(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        Stream("stdout", "x" * 100_000),
        Failure(
            "ValueError",
            "y" * 100_000,
            ("Cell In[1], line 1\n----> 1 f()\n", "E: " + "y" * 100_000),
        ),
    )
    text = text_of(await shown(log, characters=1500))
    assert "Cell In[1], line 1" in text
    assert "ValueError: yyy" in text
    assert len(text) < 2000


async def test_an_update_of_an_earlier_cell_says_so(tmp_path: Path) -> None:
    first = log_of(tmp_path, Display({"text/plain": "old"}, {}, "id"))
    second = OutputLog(tmp_path, 4, index=first._index)
    second.add(Display({"text/plain": "new"}, {}, "id", update=True))
    rendered = await render(second.since(), session="abc", cell=4)
    assert text_of(rendered) == "[the display of cell 3 now shows:]\nnew"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["out", "err", "show", "fail"]), st.integers(0, 400)), max_size=12
    ),
    st.integers(50, 1200),
)
def test_what_is_shown_and_what_is_left_out_add_up(
    tmp_path: Path, outputs: list[tuple[str, int]], characters: int
) -> None:
    log = OutputLog(tmp_path, 3)
    for number, (kind, length) in enumerate(outputs):
        text = (f"{number}abcde\n" * 60)[:length]
        if kind == "show":
            log.add(Display({"text/plain": text}, {}))
        elif kind == "fail":
            log.add(Failure("E", text, ()))
        else:
            log.add(Stream("stdout" if kind == "out" else "stderr", text))
    items = log.since()
    layout = lay_out(items, cell=3, uri="u", characters=characters)
    everything = lay_out(items, cell=3, uri="u", characters=10**9)
    kept = sum(len(unit.text) for unit in layout.units if isinstance(unit, Text))
    total = sum(len(unit.text) for unit in everything.units if isinstance(unit, Text))
    assert kept + layout.omitted == total
    assert kept <= max(characters, 0) or total <= characters
    assert everything.omitted == 0
    assert not any(
        isinstance(one, Gap) and isinstance(two, Gap)
        for one, two in zip(layout.units, layout.units[1:], strict=False)
    )
    if total > characters:
        assert kept >= characters // 4
