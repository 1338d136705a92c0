"""Render outputs that only a browser would draw, and scale pictures to fit into a message.

Renderers run in a process of their own, so that a crash does not end the kernel.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import importlib.util
import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_DECODED_BYTES = 96 * 1024 * 1024
"""Most bytes of a decoded picture that the server shows."""
MOST_SIDE = 2000
"""Longest side in pixels of a picture that had to be scaled: no client shows more."""
DRAW_SECONDS = 60.0
SOURCE_CHARS = 16 * 1024 * 1024
PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
VEGA = re.compile(r"application/vnd\.(vega|vegalite)\.v(\d+)(?:\.\d+)*[.+]json")

_DRAW = """\
import json, sys, resource
asked = json.load(sys.stdin)
sys.path.append(asked["place"])
kind, source = asked["kind"], asked["source"]
if kind == "svg":
    import resvg_py
    picture = resvg_py.svg_to_bytes(svg_string=source, background="white", **asked["options"])
else:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    import vl_convert
    if kind == "vega":
        picture = vl_convert.vega_to_png(source, scale=1.5)
    else:
        versions = vl_convert.get_vegalite_versions()
        known = [each for each in versions if each.split(".")[0] == asked["version"]]
        picture = vl_convert.vegalite_to_png(source, vl_version=[*versions, *known][-1], scale=1.5)
sys.stdout.buffer.write(bytes(picture))
"""


def of_vega(kind: str, version: str, spec: Any) -> bytes | None:
    """Return a PNG of a Vega or Vega-Lite chart; None if no renderer is installed, or it fails."""
    place = _place("vl_convert")
    if place is None:
        return None
    return _drawn({"kind": kind, "version": version, "source": spec, "place": place})


def of_svg(source: str) -> bytes | None:
    """Return a PNG of an SVG document; None if no renderer is installed, or it fails."""
    place = _place("resvg_py")
    if place is None:
        return None
    return _drawn({"kind": "svg", "source": source, "place": place, "options": _options(source)})


def _place(module: str) -> str | None:
    """Return the folder that `module` would be imported from, or None."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return str(Path(spec.origin).parent.parent) if spec is not None and spec.origin else None


def _drawn(asked: dict[str, Any]) -> bytes | None:
    text = json.dumps(asked)
    if len(text) > SOURCE_CHARS:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DRAW],
            input=text.encode("utf-8", "replace"),
            capture_output=True,
            timeout=DRAW_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 and done.stdout else None


_EMBEDDED = re.compile(r"[\"'(]data:(image/(?:png|jpeg|gif|webp));base64,([\w+/=\s\\]+)")
_BETWEEN = re.compile(r"[\s\\]+")
"""Line ends and escapes within base64 text of a script."""


def embedded(page: str) -> dict[str, str]:
    """Return the first picture embedded in an HTML page, as a bundle; empty if there is none."""
    found = _EMBEDDED.search(page)
    return {found[1]: _BETWEEN.sub("", found[2])} if found else {}


def drawing_in(page: str) -> str:
    """Return the first SVG drawing of an HTML page, or ""."""
    start = page.find("<svg")
    end = page.find("</svg>", start) if start >= 0 else -1
    if end < 0:
        return ""
    drawing = page[start : end + len("</svg>")]
    space = ' xmlns="http://www.w3.org/2000/svg"'
    return drawing if "xmlns=" in drawing else f"<svg{space}{drawing[4:]}"


_SVG = re.compile(r"<svg\b[^>]*>", re.IGNORECASE)
_LENGTH = r"\s*=\s*[\"']\s*([\d.]+)\s*(px|pt|in|cm|mm|pc)?\s*[\"']"
_WIDTH = re.compile(rf"\bwidth{_LENGTH}")
_HEIGHT = re.compile(rf"\bheight{_LENGTH}")
_BOX = re.compile(r"\bviewBox\s*=\s*[\"']\s*[-\d.e]+[\s,]+[-\d.e]+[\s,]+([\d.e]+)[\s,]+([\d.e]+)")
_PIXELS = {"pt": 4 / 3, "in": 96.0, "cm": 37.8, "mm": 3.78, "pc": 16.0}
_GOOD_SIDE = 800
"""Pixels that a small drawing is enlarged to, at most four times."""


def size_of_svg(source: str) -> tuple[float, float]:
    """Return width and height of a drawing in pixels; zeros if it does not state them."""
    root = _SVG.search(source, 0, 65_536)
    if root is None:
        return 0.0, 0.0
    with contextlib.suppress(ValueError):
        found = [_WIDTH.search(root.group()), _HEIGHT.search(root.group())]
        if all(found):
            width, height = (
                float(each[1]) * _PIXELS.get(each[2] or "", 1.0) for each in found if each
            )
            return width, height
        if box := _BOX.search(root.group()):
            return float(box[1]), float(box[2])
    return 0.0, 0.0


_FONTS = {
    "DejaVuSans.ttf": "DejaVu Sans",
    "LiberationSans-Regular.ttf": "Liberation Sans",
    "NotoSans-Regular.ttf": "Noto Sans",
}
_FAMILIES = ("font_family", "serif_family", "sans_serif_family", "cursive_family")


def _options(source: str) -> dict[str, Any]:
    """Return renderer options for an SVG: zoom to a legible size, and a font that is installed."""
    side = max(size_of_svg(source))
    zoom = 1.0 if side <= 0 else min(4.0, max(1.0, _GOOD_SIDE / side), MOST_SIDE / side)
    options: dict[str, Any] = {"zoom": zoom, "dpi": 96}
    package = _place("matplotlib") or ""
    folders = [Path(package, "matplotlib/mpl-data/fonts/ttf")] if package else []
    for folder in (*folders, Path("/usr/share/fonts")):
        for path in folder.rglob("*.ttf"):
            if path.name in _FONTS:
                options.update(dict.fromkeys(_FAMILIES, _FONTS[path.name]))
                return {**options, "font_dirs": [str(folder)], "skip_system_fonts": True}
    return options


def pixels(data: bytes) -> int:
    """Return the number of pixels of a PNG, by its header; 0 for everything else."""
    if len(data) < 24 or not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return 0
    width, height = struct.unpack(">II", data[16:24])
    return int(width) * int(height)


def fitted(bundle: Mapping[str, Any], most: int) -> tuple[dict[str, Any], str]:
    """Return the pictures of a bundle, within `most` bytes of base64, and a remark on scaling.

    Values are bytes or base64 text. If several are too large together, those that fit stay. If one
    has more pixels than the server decodes, a smaller one is added. Scaling requires Pillow:
    without it the pictures are returned as they are.
    """
    found = {mime: bundle[mime] for mime in PICTURES if mime in bundle}
    if all(_fits(value, most) for value in found.values()):
        if sum(map(_encoded, found.values())) > most:
            found = dict([min(found.items(), key=lambda each: _encoded(each[1]))])
        if any(_decodable(value) for value in found.values()):
            return found, ""
    kept = {mime: value for mime, value in found.items() if _fits(value, most)}
    if any(_decodable(value) for value in kept.values()):
        return kept, ""
    try:
        mime, value = next(iter((kept or found).items()))
        data = base64.b64decode(value) if isinstance(value, str) else bytes(value)
        small, was, now = _scaled(data, (most - _encoded(value) if kept else most) * 3 // 4)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # no Pillow, or nothing that it can read
        return found, ""
    if kept:
        return {mime: value, "image/jpeg" if mime == "image/png" else "image/png": small}, ""
    remark = (
        f"[scaled from {was[0]}x{was[1]} to {now[0]}x{now[1]} pixels: the whole of "
        f"{len(data) / 1e6:.1f} MB is more than a message takes; save it to a file to keep it]"
    )
    return {"image/png": small}, remark


def _encoded(value: Any) -> int:
    """Return the bytes of a picture in base64."""
    return len(value) if isinstance(value, str) else len(value) * 4 // 3


def _fits(value: Any, most: int) -> bool:
    return _encoded(value) <= most


def _decodable(value: Any) -> bool:
    return pixels(_head(value)) * 4 <= MOST_DECODED_BYTES


def _head(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value[:24]
    try:
        return binascii.a2b_base64(value[:32].encode())
    except (ValueError, AttributeError):
        return b""


def _scaled(data: bytes, most: int) -> tuple[bytes, tuple[int, int], tuple[int, int]]:
    from PIL import Image

    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        image: Any = Image.open(io.BytesIO(data))
        was = image.size
        image.draft(None, (MOST_SIDE, MOST_SIDE))
        if image.mode not in ("RGB", "RGBA", "L"):
            image = image.convert("RGBA" if "transparency" in image.info else "RGB")
        image.thumbnail((MOST_SIDE, MOST_SIDE))
    finally:
        Image.MAX_IMAGE_PIXELS = before
    while True:
        written = io.BytesIO()
        image.save(written, "PNG")
        if written.tell() <= most or max(image.size) < 64:
            return written.getvalue(), was, image.size
        image = image.resize((max(1, image.width * 2 // 3), max(1, image.height * 2 // 3)))
