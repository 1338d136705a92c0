from __future__ import annotations

import contextlib
import io
import os
import struct
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kernel_mcp.output import images
from kernel_mcp.output.images import MAX_SIDE, ImageError, fit, shares, sniff


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), os.urandom(width * height * 3))


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_a_sound_png_passes_unchanged_and_undecoded(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(Image.new(mode, (33, 17)))
    monkeypatch.setattr(images, "_fit_decoded", None)
    picture = fit(data, 10_000)
    assert (picture.data, picture.mime, picture.width, picture.height, picture.change) == (
        data,
        "image/png",
        33,
        17,
        "",
    )


def test_a_jpeg_within_the_limits_passes_unchanged() -> None:
    data = encoded(noise(50, 50), "JPEG")
    picture = fit(data, 100_000)
    assert (picture.data, picture.mime, picture.change) == (data, "image/jpeg", "")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_pictures_over_the_limit_are_made_to_fit(kind: str) -> None:
    data = encoded(noise(900, 700), kind)
    picture = fit(data, 60_000)
    assert len(picture.data) <= 60_000
    assert opened(picture.data).size == (picture.width, picture.height)
    assert picture.change


def test_pixels_over_the_limit_are_scaled_down_and_said() -> None:
    picture = fit(encoded(Image.new("RGB", (5000, 100), "red")), 600_000)
    assert (picture.width, picture.height) == (MAX_SIDE, 40)
    assert picture.change == "scaled from 5000x100 to 2000x40 pixels"


def test_a_large_jpeg_is_decoded_at_a_lower_resolution() -> None:
    picture = fit(encoded(Image.new("RGB", (9000, 6000), "blue"), "JPEG"), 600_000)
    assert picture.width <= MAX_SIDE
    assert picture.mime == "image/jpeg"


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_other_formats_become_png(kind: str) -> None:
    picture = fit(encoded(Image.new("RGB", (40, 30), "red"), kind), 100_000)
    assert picture.change == f"converted from {kind}"
    assert sniff(picture.data) == picture.mime


def test_of_an_animation_the_first_frame_is_shown() -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    picture = fit(data, 100_000)
    assert picture.change == "first frame of an animation"
    assert opened(picture.data).convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_transparency_becomes_white_in_a_jpeg() -> None:
    image = noise(800, 800).convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 400, 800))
    picture = fit(encoded(image), 70_000)
    assert picture.mime == "image/jpeg"
    red, green, blue = opened(picture.data).getpixel((20, 20))  # type: ignore[misc]
    assert min(red, green, blue) > 240


@pytest.mark.parametrize("mode", ["I;16", "F", "CMYK", "P", "LA"])
def test_unusual_modes_can_be_shrunk(mode: str) -> None:
    image = noise(600, 400)
    source = image.convert("L").convert("I") if mode == "I;16" else image
    converted = source.convert(mode)
    kind = {"CMYK": "JPEG", "F": "TIFF"}.get(mode, "PNG")
    if kind == "TIFF":
        shrunk = images._normalised(converted)
        assert shrunk.mode == "L"
        return
    picture = fit(encoded(converted, kind), 20_000)
    assert len(picture.data) <= 20_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a picture",
        b"\x89PNG\r\n\x1a\n",
        b"\x89PNG\r\n\x1a\n" + bytes(1000),
        b"\xff\xd8\xff" + bytes(1000),
        b"GIF89a" + bytes(1000),
        b"RIFF\x00\x00\x00\x00WEBP" + bytes(1000),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
)
def test_damaged_data_is_an_error_in_words(data: bytes) -> None:
    with pytest.raises(ImageError):
        fit(data, 100_000)


def test_a_png_with_a_fault_is_encoded_anew_or_refused() -> None:
    data = encoded(noise(64, 64))
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    for broken in (data[:-12], data[: len(data) // 2], bytes(flipped), data + b"trailing"):
        try:
            picture = fit(broken, 100_000)
        except ImageError:
            continue
        assert picture.data != broken
        assert opened(picture.data).size == (64, 64)


def test_the_bytes_decide_not_what_they_are_called() -> None:
    jpeg = encoded(noise(20, 20), "JPEG")
    assert fit(jpeg, 100_000).mime == "image/jpeg"


def test_a_decompression_bomb_is_refused_without_being_decoded() -> None:
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 6, 0, 0, 0)
    body = zlib.compress(bytes(10_000_000))
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body)
    data += png_chunk(b"IEND", b"")
    start = time.process_time()
    with pytest.raises(ImageError, match="too many"):
        fit(data, 650_000)
    assert time.process_time() - start < 1


def test_more_raster_than_the_header_promises_is_not_sound() -> None:
    header = struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0)
    body = zlib.compress(bytes(1_000_000))
    data = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body)
    assert images._sound_png(data + png_chunk(b"IEND", b"")) is None


@given(st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a"]), st.binary())
def test_arbitrary_bytes_never_do_more_than_raise_an_image_error(start: bytes, rest: bytes) -> None:
    with contextlib.suppress(ImageError):
        fit(start + rest, 1000)


@given(st.lists(st.integers(0, 1000), max_size=8), st.integers(0, 2000))
def test_pictures_share_the_budget_and_small_ones_stay_whole(sizes: list[int], total: int) -> None:
    limits = shares(sizes, total)
    assert sum(limits) <= total
    assert all(limit <= size for limit, size in zip(limits, sizes, strict=True))
    if sum(sizes) <= total:
        assert limits == sizes
    elif sizes:
        fair = total // len(sizes)
        assert all(limit >= min(size, fair) for limit, size in zip(limits, sizes, strict=True))
