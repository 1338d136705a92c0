"""What a kernel says about its variables, checked and cut before it is shown or kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_mcp.output.text import one_line

MAX_DESCRIBED = 500
MAX_DIMENSIONS = 32


def descriptions(value: object) -> tuple[dict[str, Any], ...]:
    """A list of descriptions with the fields of `models.Variable`, whatever was sent."""
    items = value[:MAX_DESCRIBED] if isinstance(value, list) else []
    return tuple(_description(item) for item in items if isinstance(item, dict))


def counted(value: object) -> int | None:
    """A size or length, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**63 else None


def _description(item: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: _text(item.get(key)) for key in ("name", "type", "preview")}
    counts = {key: counted(item.get(key)) for key in ("length", "size")}
    shape = item.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or None in [counted(size) for size in shape]
    ):
        shape = None
    return {**texts, **counts, "shape": shape}


def _text(value: object) -> str:
    return one_line(value) if isinstance(value, str) else ""
