"""Check pictures from a kernel and shrink them to the limits of clients.

The bytes are untrusted. A valid PNG is recognised without any decoder; everything else goes through
Pillow, limited to a few formats and to a number of pixels.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 2000
"""Longest side in pixels of pictures that clients pass to a model unscaled."""
MAX_DECODED_BYTES = 96 * 1024 * 1024
"""Memory that one decoded picture may use in the server."""
MIN_SIDE = 64
"""Longest side in pixels below which pictures are not shrunk."""

_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_DEPTHS = {
    0: (1, 2, 4, 8, 16),
    2: (8, 16),
    3: (1, 2, 4, 8),
    4: (8, 16),
    6: (8, 16),
}


class ImageError(ValueError):
    """The bytes are no picture that can be shown; the text says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture ready to show. `change` says how it differs from the original, if it does."""

    data: bytes
    mime: str
    width: int
    height: int
    change: str = ""


def sniff(data: bytes) -> str | None:
    """Return the MIME type of a picture by its first bytes; None for other data."""
    if data.startswith(_PNG_SIGNATURE):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Return the bytes that each picture may use so that all fit into `total`.

    Small ones keep their size; the others share the rest equally.
    """
    limits = list(sizes)
    left, count = total, len(sizes)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        limits[index] = min(sizes[index], left // count)
        left -= limits[index]
        count -= 1
    return limits


def fit(data: bytes, max_bytes: int) -> Picture:
    """Return `data` as a PNG or JPEG of at most `max_bytes`. Blocks for up to a few seconds.

    Raises ImageError when it is damaged, of another format, too large to decode or to shrink.
    """
    if len(data) <= max_bytes and (size := _sound_png(data)) and max(size) <= MAX_SIDE:
        return Picture(data, "image/png", *size)
    return _fit_decoded(data, max_bytes)


def raster_of(data: bytes) -> bytes | None:
    """Return a digest of what a valid PNG shows, by the Python's zlib alone; None for other data.

    Its compression, its texts and its resolution do not count.
    """
    digest = hashlib.sha256()
    return digest.digest() if _sound_png(data, digest.update) else None


def _sound_png(data: bytes, note: Callable[[bytes], object] = bool) -> tuple[int, int] | None:
    """Return width and height of a valid PNG; None for everything else.

    `note` takes its header, its colours and its inflated raster.
    """
    if not data.startswith(_PNG_SIGNATURE):
        return None
    header: tuple[int, ...] = ()
    inflate = zlib.decompressobj()
    expected = filled = 0
    position = len(_PNG_SIGNATURE)
    palette = False
    while position + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, position)
        kind = data[position + 4 : position + 8]
        body = data[position + 8 : position + 8 + length]
        end = position + 12 + length
        if end > len(data) or zlib.crc32(data[position + 4 : end - 4]) != int.from_bytes(
            data[end - 4 : end], "big"
        ):
            return None
        if not header:
            if kind != b"IHDR" or length != 13:
                return None
            header = struct.unpack(">IIBBBBB", body)
            expected = _png_raster_bytes(header)
            if not expected:
                return None
        elif kind == b"PLTE":
            palette = True
        elif kind == b"IDAT":
            try:
                rows = inflate.decompress(body, expected - filled + 1)
            except zlib.error:
                return None
            note(rows)
            filled += len(rows)
            if filled > expected:
                return None
        elif kind == b"IEND":
            complete = filled == expected and end == len(data)
            sound = complete and (palette or header[3] != 3)
            return (header[0], header[1]) if sound else None
        if kind in (b"IHDR", b"PLTE", b"tRNS"):
            note(body)
        position = end
    return None


def _png_raster_bytes(header: tuple[int, ...]) -> int:
    """Return the raster size of a plain PNG in bytes; 0 for a wrong, unusual or too large one."""
    width, height, depth, colour, compression, filtering, interlace = header
    if (compression, filtering, interlace) != (0, 0, 0) or not (width and height):
        return 0
    if depth not in _PNG_DEPTHS.get(colour, ()):
        return 0
    size = height * (1 + (width * depth * _PNG_CHANNELS[colour] + 7) // 8)
    return size if size <= MAX_DECODED_BYTES else 0


def _fit_decoded(data: bytes, max_bytes: int) -> Picture:
    image, width, height = _decode(data)
    kind = image.format or ""
    mime = _FORMATS[kind]
    changes: list[str] = []
    if kind in ("GIF", "WEBP"):
        animated = getattr(image, "is_animated", False)
        changes.append("first frame of an animation" if animated else f"converted from {kind}")
    elif kind == "JPEG" and len(data) <= max_bytes and max(width, height) <= MAX_SIDE:
        return Picture(data, mime, width, height)
    image = _normalised(image)
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    encoded, mime, image = _encode(image, max_bytes, lossy=kind in ("JPEG", "WEBP"))
    if image.size != (width, height):
        changes.append(f"scaled from {width}x{height} to {image.width}x{image.height} pixels")
    elif mime == "image/jpeg" and kind == "PNG":
        changes.append("converted to JPEG")
    elif not changes:
        changes.append("encoded anew")
    return Picture(encoded, mime, *image.size, ", ".join(changes))


def _decode(data: bytes) -> tuple[Image, int, int]:
    """Return the decoded picture and its true size; large JPEGs are scaled down.

    Raises ImageError.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=tuple(_FORMATS))
        width, height = image.size
        if image.format == "JPEG":
            image.draft(None, (MAX_SIDE, MAX_SIDE))
        pixels = image.width * image.height
        if pixels * 4 <= MAX_DECODED_BYTES:
            image.load()
            return image, width, height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError("it has too many pixels to decode") from None
    except UnidentifiedImageError:
        raise ImageError("the data is no sound PNG, JPEG, GIF or WebP") from None
    except Exception as error:  # noqa: BLE001  # decoders raise anything on hostile data
        raise ImageError(f"the data is damaged ({error})") from None
    raise ImageError(f"its {width:,}x{height:,} pixels are too many to decode")


def _normalised(image: Image) -> Image:
    """Return the picture in a mode that encoders and resampling support: RGB, RGBA or L."""
    if image.mode in ("RGB", "RGBA", "L"):
        return image
    if image.mode.startswith(("I", "F")):
        levels = image.convert("F")
        low, high = cast("tuple[float, float]", levels.getextrema())
        scale = 255.0 / (high - low) if high > low else 1.0
        return levels.point(lambda level: level * scale - low * scale).convert("L")
    transparent = "transparency" in image.info or image.mode in ("LA", "PA", "RGBa", "La")
    return image.convert("RGBA" if transparent else "RGB")


def _encode(image: Image, max_bytes: int, *, lossy: bool) -> tuple[bytes, str, Image]:
    """Return the best encoding within `max_bytes`, its type and the picture, perhaps shrunk.

    Raises ImageError.
    """
    if not lossy:
        png = _saved(image, "PNG")
        if len(png) > max_bytes and image.mode != "L" and len(png) < 8 * max_bytes:
            png = _saved(image.quantize(256), "PNG")
        if len(png) <= max_bytes:
            return png, "image/png", image
    image = _opaque(image)
    while True:
        for quality in (85, 65):
            jpeg = _saved(image, "JPEG", quality=quality)
            if len(jpeg) <= max_bytes:
                return jpeg, "image/jpeg", image
        factor = max(0.3, min(0.8, 0.9 * (max_bytes / len(jpeg)) ** 0.5))
        size = (int(image.width * factor), int(image.height * factor))
        if max(size) < MIN_SIDE or min(size) < 1:
            raise ImageError(f"it does not fit into {max_bytes:,} bytes")
        image = image.resize(size)


def _saved(image: Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    if kind == "PNG":
        options["compress_level"] = 4
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _opaque(image: Image) -> Image:
    """Return the picture on white, without transparency."""
    if image.mode != "RGBA":
        return image
    from PIL import Image as PillowImage

    page = PillowImage.new("RGB", image.size, "white")
    page.paste(image, mask=image.getchannel("A"))
    return page
