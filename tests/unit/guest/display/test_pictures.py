"""Sizes of pictures and drawings."""

from __future__ import annotations

import base64
import io
import os

import pytest
from PIL import Image

from kernel_specs.restricted.display import pictures


def png(width: int, height: int, *, noise: bool = False) -> bytes:
    written = io.BytesIO()
    if noise:
        image = Image.frombytes("RGB", (width, height), os.urandom(3 * width * height))
    else:
        image = Image.new("L", (width, height), 200)
    image.save(written, "PNG")
    return written.getvalue()


def size(value: object) -> tuple[int, int]:
    data = base64.b64decode(value) if isinstance(value, str) else value
    assert isinstance(data, bytes)
    return Image.open(io.BytesIO(data)).size


@pytest.mark.parametrize("text", [False, True])
def test_what_fits_stays_as_it_is(text: bool) -> None:
    data: object = png(30, 20)
    if text:
        data = base64.b64encode(png(30, 20)).decode()
    assert pictures.fitted({"image/png": data, "text/plain": "x"}, 10_000) == (
        {"image/png": data},
        "",
    )


def test_a_picture_larger_than_a_message_is_scaled_and_that_is_said() -> None:
    found, remark = pictures.fitted({"image/png": png(900, 600, noise=True)}, 300_000)
    assert len(found["image/png"]) <= 300_000
    width, height = size(found["image/png"])
    assert abs(width / height - 1.5) < 0.01
    assert remark.startswith(
        f"[scaled from 900x600 to {width}x{height} pixels: the whole of 1.6 MB"
    )


def test_of_two_that_say_the_same_the_one_that_fits_stays() -> None:
    large, small = png(900, 600, noise=True), png(30, 20)
    assert pictures.fitted({"image/png": large, "image/jpeg": small}, 300_000) == (
        {"image/jpeg": small},
        "",
    )


def test_beside_one_with_too_many_pixels_stands_a_smaller_one() -> None:
    whole = png(9000, 9000)
    found, remark = pictures.fitted({"image/png": whole}, 12_000_000)
    assert found["image/png"] is whole
    assert max(size(found["image/jpeg"])) == pictures.MOST_SIDE
    assert remark == ""


def test_what_is_no_picture_stays_as_it_is() -> None:
    damaged = {"image/png": "no base64 at all" * 1000}
    assert pictures.fitted(damaged, 100) == (damaged, "")


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ('<svg width="300" height="100">', (300, 100)),
        ("<svg viewBox='0 0 40 30'>", (40, 30)),
        ('<?xml version="1.0"?><svg height="3in" width="72pt">', (96, 288)),
        ('<svg width="100%" height="100%" viewBox="0,0,8,6">', (8, 6)),
        ('<svg width="1e9" height="1e9">', (0, 0)),
        ("no drawing", (0, 0)),
    ],
)
def test_the_size_of_a_drawing_is_read_from_its_root(
    root: str, expected: tuple[float, float]
) -> None:
    assert pictures.size_of_svg(root) == expected


def test_a_page_gives_its_first_picture_and_its_first_drawing() -> None:
    page = '<p>a</p><img alt="" src="data:image/png;base64,QUJD"><img src="x.png">'
    assert pictures.embedded(page) == {"image/png": "QUJD"}
    assert pictures.embedded("<img src='x.png'>") == {}
    frames = 'frames[0] = "data:image/png;base64,QU\\\nJD";'
    assert pictures.embedded(frames) == {"image/png": "QUJD"}
    assert pictures.drawing_in("<p><svg width='1'><a/></svg><svg>") == (
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width='1'><a/></svg>"
    )
    assert pictures.drawing_in("<p><svg>") == ""


@pytest.mark.parametrize("page", ["<svg" * 100_000, "src='data:image/png;base64," * 50_000])
def test_pages_without_an_end_take_little_time(page: str) -> None:
    assert pictures.drawing_in(page) == ""
    pictures.embedded(page)
    pictures.size_of_svg(page)
