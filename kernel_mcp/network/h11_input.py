"""Splitting of input for h11 into pieces on which its regular expressions take linear time.

Its patterns for headers and chunk lines have two adjacent repeats over blanks. On a run of n blanks
before a character that does not match, they take n² steps: 5 s for 32 KiB.
"""

from __future__ import annotations

import re

import h11

MOST_BLANKS = 512
"""The longest run of blanks and line ends in a head; no client sends so many."""
MOST_CHUNK_LINE = 2048
"""Most bytes of an unfinished chunk line or trailer while the input has such a run."""
_PIECE_BYTES = 1024
_RUN = b" " * MOST_BLANKS
_BLANKS = bytes.maketrans(b"\t\r\n", b"   ")
_HEAD_END = re.compile(rb"\n\r?\n")


class TooManyBlanks(ValueError):
    """A head or chunk line has so long a run of blanks that h11 would take seconds to parse it."""


class H11Input:
    """Splits incoming data for one h11 connection; data without a long run of blanks stays whole.

    The caller has to take all events that a piece yields before it asks for the next piece.
    """

    def __init__(self, connection: h11.Connection) -> None:
        self._connection = connection
        self._tail = b""
        self._suspect = False
        self.rest = b""
        """Bytes that were added and not yet returned by `next`."""

    def add(self, data: bytes) -> None:
        """Append bytes that came in."""
        self.rest += data
        self._suspect = _long_run(self._tail + self.rest)

    def next(self) -> bytes:
        """Return the next piece, empty when nothing is left. Raises TooManyBlanks."""
        size = self._size() if self._suspect else len(self.rest)
        piece, self.rest = self.rest[:size], self.rest[size:]
        around = self._tail + piece
        self._tail = around[1 - MOST_BLANKS :]
        if not self._suspect:
            return piece
        if self._body_comes:
            held, _ = self._connection.trailing_data
            refused = len(held) > MOST_CHUNK_LINE
        else:
            refused = self._connection.their_state is not h11.ERROR and _long_run(around)
        if refused:
            raise TooManyBlanks
        return piece

    @property
    def _body_comes(self) -> bool:
        return self._connection.their_state is h11.SEND_BODY

    def _size(self) -> int:
        if self._body_comes:
            return _PIECE_BYTES
        last = self._tail[-2:]
        found = _HEAD_END.search(last + self.rest)
        return max(found.end() - len(last), 1) if found else len(self.rest)


def _long_run(data: bytes) -> bool:
    return len(data) >= MOST_BLANKS and _RUN in data.translate(_BLANKS)
