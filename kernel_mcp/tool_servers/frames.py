"""Frames between a kernel and the gateway: a JSON object, then raw blobs.

A frame is the length of its header (4 bytes, big endian), the header, and the blobs whose sizes the
header lists as `blobs`. The peer is hostile: a malformed frame ends its connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

HEADER_BYTES = 8 * MIB
BLOB_BYTES = 64 * MIB
"""Upper bound of all blobs of one frame."""
_LENGTH = 4


MOST_VALUES = 200_000
"""Values of a request's header: as many may take 100 MB of memory, and 0.1 s."""


class FrameError(ValueError):
    """Raised when received bytes are no frame."""


class TooManyValues(FrameError):
    """Raised for a header with more than `MOST_VALUES` values, which is not decoded."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A header, and the blobs that it lists."""

    header: Mapping[str, Any]
    blobs: Sequence[bytes] = ()

    def encoded(self) -> list[bytes]:
        """Return the bytes to send. Raises FrameError if the header is too long."""
        listed = {"blobs": [len(each) for each in self.blobs]} if self.blobs else {}
        header = json.dumps({**self.header, **listed}).encode()
        if len(header) > HEADER_BYTES:
            raise FrameError(f"a header of {len(header):,} bytes")
        return [len(header).to_bytes(_LENGTH, "big") + header, *self.blobs]


async def read_frame(
    reader: asyncio.StreamReader,
    first: bytes = b"",
    blob_bytes: int = BLOB_BYTES,
    *,
    most_values: int | None = None,
) -> Frame | None:
    """Return the next frame, which begins with `first`; None at the end of the connection.

    Raises FrameError, also for more than `blob_bytes` of blobs, TooManyValues, and OSError.
    """
    try:
        start = first + await reader.readexactly(_LENGTH - len(first))
    except asyncio.IncompleteReadError as reason:
        if reason.partial or first:
            raise FrameError("a frame was cut") from None
        return None
    length = int.from_bytes(start, "big")
    if length > HEADER_BYTES:
        raise FrameError(f"a header of {length:,} bytes")
    try:
        text = await reader.readexactly(length)
        if most_values is not None and sum(map(text.count, (b",", b"[", b"{"))) > most_values:
            raise TooManyValues(f"a request with more than {most_values:,} values")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise FrameError("a header is no object")
        sizes = _sizes(header.pop("blobs", []), blob_bytes)
        blobs = [await reader.readexactly(size) for size in sizes]
    except asyncio.IncompleteReadError:
        raise FrameError("a frame was cut") from None
    except FrameError:
        raise
    except (ValueError, RecursionError) as reason:
        raise FrameError(f"a header cannot be read: {reason}") from None
    return Frame(header, blobs)


def _sizes(listed: object, most: int) -> list[int]:
    sizes = listed if isinstance(listed, list) else [-1]
    if any(type(each) is not int or each < 0 for each in sizes) or sum(sizes) > most:
        raise FrameError("its blobs are too large, or no sizes")
    return sizes
