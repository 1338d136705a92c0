"""The bytes of a dump, written without copies and read into place.

Layout: length of the header (8 bytes), the header (JSON), then for each segment its pickles and the
buffers outside of them. One memo pickles all values of a segment, so shared objects stay shared.
Values that share none have a segment each: one that cannot be read costs no other.
"""

from __future__ import annotations

import ctypes
import enum
import re
import struct
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from kernel_specs.restricted.hibernation.attempt_limits import TooLargeError
from kernel_specs.restricted.hibernation.hashes import (
    IDS,
    SETS,
    STALE_HASH,
    has_stale_hash,
    keys_of,
    possible_ids,
)
from kernel_specs.restricted.hibernation.homes import Foreign, registered
from kernel_specs.restricted.hibernation.memory_ranges import (
    COPIED,
    MemoryRange,
    copies,
    of_bytearrays,
)
from kernel_specs.restricted.hibernation.object_reducer import BY_IDENTITY
from kernel_specs.restricted.originals import io, json, os

if TYPE_CHECKING:
    from kernel_specs.restricted.hibernation.notebook_pickler import NotebookPickler


LENGTH = struct.Struct("<Q")
RESULT = re.compile(r"Out\[\d+\]")
"""Pattern of the name of a cell's result in a dump."""
BUFFER_BYTES = 64 * 1024
"""Size below which buffers are copied into the pickle."""
PIECE_BYTES = 1024 * 1024
"""Size of the pieces in which pickles are read, and freed while their values are made."""
NOT_WHOLE = "the dump is not complete"
TOO_LARGE = "too large"
"""Prefix of the reason for a value that was left out because there was no room."""
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_ALWAYS_EQUAL = (str, int, bytes)
_OF_VALUES = re.compile(
    r"(builtins|_?datetime|_?decimal|fractions|pathlib|uuid|zoneinfo|ipaddress|re|numpy)(\.|$)"
    r"|pandas\.(_libs\.tslibs|core\.dtypes)\."
)
"""Modules whose objects with their own `__hash__` are immutable: equal copies can replace them."""


class ByteBudget:
    """The bytes that a dump may still use, `left` of `size`.

    With `drafts`, pickles may use that many times `size`, and each buffer up to `size`. Drafts of
    values that turn out to share objects are pickled again, together.
    """

    def __init__(self, size: int, drafts: int = 0) -> None:
        self._size = size
        self._drafts = drafts
        self.left = size * (drafts or 1)

    def take(self, count: int, *, copied: bool = True) -> None:
        """Use `count` bytes; not `copied` for a buffer.

        Raises TooLargeError if there is no room.
        """
        if count > (self.left if copied or not self._drafts else self._size):
            raise TooLargeError(f"{TOO_LARGE}: a dump takes {self._size / 1e6:,.0f} MB in all")
        if copied or not self._drafts:
            self.left -= count


class Segment:
    """Values pickled with one memo; `undo` removes a failed one.

    `changed` maps names of values that will not be equal after loading to reasons.
    """

    def __init__(
        self,
        room: ByteBudget,
        pickler: Callable[[Any, Callable[[Any], bool]], Any],
        ask: Callable[[], object] = bool,
    ) -> None:
        """`pickler` makes a NotebookPickler from a file and a callback for buffers.

        `ask` is called at each write; it stops pickling by an exception.
        """
        self.names: list[str] = []
        self.changed: dict[str, str] = {}
        self._modules: dict[str, list[str]] = {}
        self.pickles: list[bytes] = []
        self.buffers: list[memoryview] = []
        self._room = room
        self._ask = ask
        self._pickler: NotebookPickler = pickler(self, self._put_aside)
        self._record: list[Any] = []
        self._own: object = None
        self.objects: set[int] = set()
        """Ids of its objects that another segment with them would have to share; set by `look`."""
        self.homes: set[int] = set()
        """Ids of the globals of its functions that are `Foreign`; set by `look`."""
        self.inner: set[int] = set()
        """Ids of the dicts of modules in it that code has made; set by `look`."""
        self.numbers: set[int] = set()
        """Keys of its dicts and members of its sets that may be ids of objects; set by `look`."""
        self.ranges: list[MemoryRange] = []
        """The memory of its objects; that of bytearrays is added by `look`."""
        self._mark: tuple[int, int, int] | None = None
        self._seen = 0

    def write(self, data: Any) -> None:
        """Append pickled data; the pickler calls this every 64 KiB and for each long string."""
        self._ask()
        self._room.take(len(data))
        self.pickles.append(bytes(data))

    def add(self, value: Any) -> None:
        """Pickle one value. The caller then calls `keep`, or `undo` if this has raised."""
        # The list is the first object of this value in the pickler's memo.
        self._record = [value]
        self._own = value
        self._mark = (len(self.pickles), len(self.buffers), self._room.left)
        self._seen = len(self._pickler.modules)
        self._pickler.begin()
        try:
            self._pickler.dump(self._record)
            again = self._pickler.identifying(self.pickles[self._mark[0] :])
        except Exception:  # it may refer to the user namespace, with values that cannot be pickled
            again = self._pickler.identifying()
            if again is None:
                raise
        if again is not None:
            self._restore(self._mark)
            again.memo = self._before()
            again.begin()
            self._pickler = again
            self._pickler.dump(self._record)

    def keep(self, name: str) -> None:
        """Keep the last value under a name."""
        self.names.append(name)
        if fresh := list(self._pickler.modules)[self._seen :]:
            self._modules[name] = fresh
        if self._pickler.changes:
            self.changed[name] = ", ".join(self._pickler.changes)
        self.ranges += self._pickler.ranges
        self._mark = None

    def undo(self) -> None:
        """Remove what was written and memoized since the last `keep`."""
        if self._mark is None:
            return
        self._restore(self._mark)
        self._mark = None
        for module in list(self._pickler.modules)[self._seen :]:
            del self._pickler.modules[module]
        if self.names:
            self._pickler.memo = self._before()
        else:
            self._pickler.clear_memo()  # which may be large

    def _restore(self, mark: tuple[int, int, int]) -> None:
        """Remove what was written since a mark."""
        pickles, buffers, self._room.left = mark
        del self.pickles[pickles:]
        del self.buffers[buffers:]

    def _before(self) -> dict[int, Any]:
        """Return the pickler's memo as it was before the current value."""
        memo: dict[int, Any] = self._pickler.memo.copy()
        first = memo.get(id(self._record))
        if first is None:
            return memo
        return {key: entry for key, entry in memo.items() if entry[0] < first[0]}

    def _put_aside(self, buffer: Any) -> bool:
        """Keep a large buffer outside of the pickle; return True for one that stays inside."""
        try:
            view = buffer.raw()
        except BufferError:
            return True
        if view.nbytes < BUFFER_BYTES:
            return True
        self._room.take(view.nbytes, copied=False)
        self.buffers.append(view)
        return False

    def look(self) -> None:
        """Set `objects`, `homes`, `inner`, `numbers`, `ranges`. It takes longer than pickling.

        It may run code of values. Left out are objects that an equal copy can replace, and those
        pickled by name. Temporary objects stay in the memo, so that no two have the same id.
        """
        memo = self._pickler.memo.copy()
        kinds = {type(each) for _, each in memo.values()}
        alike = {kind: _is_value(kind) for kind in kinds}
        self.objects = {
            key
            for key, (_, each) in memo.items()
            if not (alike[type(each)] and each is not self._own and _equals_itself(each))
            and (not isinstance(each, _BY_NAME) or _of_a_cell(each))
        } - self._pickler.named
        if any(issubclass(kind, bytearray) for kind in kinds):
            self.ranges += of_bytearrays(each for _, each in memo.values())
        if hashing := tuple(kind for kind in kinds if issubclass(kind, (dict, *SETS))):
            tables = [each for _, each in memo.values() if isinstance(each, hashing)]
            found = [(each, keys) for each in tables if (keys := keys_of(each))]
            self.numbers = {key for _, keys in found for key in possible_ids(keys)}
            if any(has_stale_hash(table, keys) for table, keys in found):
                self.changed[self.names[-1]] = ", ".join([*self._pickler.changes, STALE_HASH])
        if kinds & {Foreign, types.ModuleType}:
            every = [each for _, each in memo.values()]
            self.homes = {id(each.owner) for each in every if type(each) is Foreign}
            self.inner = {id(vars(each)) for each in every if _of_code(each)}

    def among_ids(self, numbers: set[int]) -> set[int]:
        """Return those of the numbers that are ids of its objects."""
        memo: dict[int, Any] = self._pickler.memo.copy()
        return numbers & memo.keys()

    @property
    def size(self) -> int:
        """Number of its bytes in a dump."""
        return sum(map(len, self.pickles)) + sum(view.nbytes for view in self.buffers)

    def drop(self) -> None:
        """Remove all values."""
        for part in (self.names, self.pickles, self.buffers):
            part.clear()

    def close(self) -> None:
        """Free the values now: pickler and segment form a reference cycle."""
        self._pickler.clear_memo()
        del self._pickler, self._record, self._own
        self.pickles.clear()
        self.buffers.clear()

    def description(self) -> dict[str, Any]:
        """Return the header's entry for this segment: names, modules, sizes in bytes."""
        return {
            "names": self.names,
            "modules": self._modules,
            "size": sum(map(len, self.pickles)),
            "buffers": [view.nbytes for view in self.buffers],
        }


def _is_value(kind: type) -> bool:
    """Return True for a class of values: an equal copy can stand for the object."""
    if kind.__hash__ in BY_IDENTITY:
        return False
    return isinstance(kind, enum.EnumMeta) or bool(_OF_VALUES.match(str(kind.__module__)))


def _equals_itself(value: object) -> bool:
    """Return False for a NaN of `decimal`, `complex` or numpy, which dicts find by identity alone.

    Also for an object whose comparison fails.
    """
    if type(value) in _ALWAYS_EQUAL:
        return True
    try:
        return bool(value == value)
    except (ArithmeticError, ValueError, TypeError):
        return False


def _of_a_cell(value: object) -> bool:
    if type(value) is types.FunctionType:
        return value.__module__ == "__main__"
    return _of_code(value)


def _of_code(value: object) -> bool:
    """Return True for a module that code has made."""
    return type(value) is types.ModuleType and registered(value) is None


def homes_in_values(segments: Sequence[Segment]) -> set[int]:
    """Return ids of functions' globals that values also hold as a dict, or as a module's."""
    homes = {key for segment in segments for key in segment.homes}
    return {key for segment in segments for key in homes & (segment.objects | segment.inner)}


def copying(segments: Sequence[Segment], live: Mapping[int, str]) -> dict[str, str]:
    """Return reasons by name for values that will hold ids, or copies of memory or live objects.

    Such objects are `live`, names by id, and the dicts of modules that code has made.
    """
    inner = {key: "the __dict__ of a module" for segment in segments for key in segment.inner}
    known = {**live, **inner}
    numbers = {key for segment in segments for key in segment.numbers}
    ids = {key for part in segments for key in part.among_ids(numbers)} if numbers else set()
    ranges = [(each, name) for part in segments for name in part.names for each in part.ranges]
    found = {name: IDS for part in segments if part.numbers & ids for name in part.names}
    return (
        dict.fromkeys(copies(ranges), COPIED)
        | found
        | {
            name: f"has a copy of {known[key]} now"
            for segment in segments
            for key in segment.objects & known.keys()
            for name in segment.names
        }
    )


def sharing(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return groups of segments that share objects, each in order; `look` was called for all."""
    group = list(range(len(segments)))

    def first(place: int) -> int:
        while group[place] != place:
            group[place] = group[group[place]]
            place = group[place]
        return place

    owner: dict[int, int] = {}
    for place, segment in enumerate(segments):
        for key in segment.objects | segment.homes | segment.inner:
            other = first(owner.setdefault(key, place))
            here = first(place)
            group[max(other, here)] = min(other, here)
    found: dict[int, list[Segment]] = {}
    for place, segment in enumerate(segments):
        found.setdefault(first(place), []).append(segment)
    return list(found.values())


class DumpBytes:
    """The bytes of a finished dump, not copied; they are read once, in parts."""

    def __init__(self, header: dict[str, Any], segments: list[Segment]) -> None:
        text = json.dumps(header).encode()
        pieces: list[bytes | memoryview] = [LENGTH.pack(len(text)), text]
        for segment in segments:
            pieces += [*segment.pickles, *segment.buffers]
        self.size = sum(memoryview(piece).nbytes for piece in pieces)
        self._pieces = deque(memoryview(piece) for piece in pieces)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""
        found = []
        while size > 0 and self._pieces:
            piece = self._pieces.popleft()
            found.append(piece[:size])
            if len(piece) > size:
                self._pieces.appendleft(piece[size:])
            size -= len(found[-1])
        return b"".join(found)

    def write(self, descriptor: int) -> None:
        """Write the bytes that were not read to a blocking descriptor. Raises OSError."""
        while self._pieces:
            piece = self._pieces.popleft()
            while piece:
                piece = piece[os.write(descriptor, piece) :]


class Pieces(io.RawIOBase):
    """Bytes received in pieces, to be read once; each piece is freed once it is read."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: deque[memoryview] = deque()

    def add(self, data: bytes | memoryview) -> None:
        """Append a piece."""
        self._pieces.append(memoryview(data))

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, room: Any) -> int:
        """Read as much of the first piece as fits; return the number of bytes, 0 at the end."""
        if not self._pieces:
            return 0
        piece = self._pieces.popleft()
        count = min(len(room), len(piece))
        room[:count] = piece[:count]
        if count < len(piece):
            self._pieces.appendleft(piece[count:])
        return count


class Arrival:
    """Reader of a dump: reads a file once, segment by segment."""

    def __init__(self, file: io.RawIOBase) -> None:
        """Take over a file, and read the header. Raises ValueError, OSError."""
        self._file = io.BufferedReader(file)
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        self.header: dict[str, Any] = json.loads(self._exactly(length))

    def segment(self, description: Mapping[str, Any]) -> tuple[IO[bytes], list[bytearray]]:
        """Return the pickles and buffers of the next segment; `description` is its header entry.

        Raises ValueError if the file ends early, OSError.
        """
        pickles, left = Pieces(), description["size"]
        while left:
            pickles.add(self._exactly(min(left, PIECE_BYTES)))
            left -= min(left, PIECE_BYTES)
        buffers = [_uncleared(size) for size in description["buffers"]]
        for buffer in buffers:
            if self._file.readinto(buffer) < len(buffer):
                raise ValueError(NOT_WHOLE)
        return io.BufferedReader(pickles), buffers

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _exactly(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise ValueError(NOT_WHOLE)
        return found


def _uncleared(size: int) -> bytearray:
    """Return a bytearray with undefined content: `bytearray(size)` would touch its memory twice."""
    make = ctypes.pythonapi.PyByteArray_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    made = make(None, size)
    assert isinstance(made, bytearray)
    return made
