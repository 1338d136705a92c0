"""Compare two texts row by row, and pass what differs between any two runs of the same code."""

from __future__ import annotations

import math
import re
from itertools import zip_longest

from kernel_mcp.records import dataclass
from kernel_mcp.verification.clock import Run, both_the_clock

SHOWN_CHARS = 60
"""Maximum characters of each side of a difference that are shown."""
RELATIVE = 1e-9
"""Relative difference of two equal floats: sums in another order."""
_EXACT_DIGITS = 9
"""Digits from which on a float can show so small a difference."""
_TOKEN = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T _]\d{2}[:-]\d{2}(?:[:-]\d{2}(?:[.,]\d{1,9})?)?)?(?!\d)"
    r"|\d{8}[T_-]\d{6}(?!\w)"
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? )?(?:"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6} {1,2}\d{1,2}"
    r"(?:, \d{4}| \d{2}:\d{2}(?::\d{2}(?: [A-Z]{3,4})? \d{4})?)"
    r"|\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6} \d{4}"
    r"(?: \d{2}:\d{2}:\d{2})?)"
    r"|\d{1,2}/\d{1,2}/\d{4}"
    r"|date(?:time)?\(\d{4}(?:, \d{1,6}){2,6}"
    r"|\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?|\d{2}:\d{2}(?![\d:])"
    r"|\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?(?!\w)"
    r"|\w+|[^\w\s]"
)
_ADDRESS = re.compile(r"0x[0-9a-f]{5,15}[08]")
_OBJECTS = ((0x550000000000, 0x56FFFFFFFFFF), (0x7E0000000000, 0x7FFFFFFFFFFF))
"""Where Linux places the heap of a program, and what it maps, on 64 bits."""
_ALIGNMENT = 16
"""Addresses of Python objects and of threads are multiples of it."""
_RANDOM = re.compile(r"[a-z0-9_]{8}")
"""Random characters that `tempfile` appends to names."""
_CHANGES = 6
"""Number of these that differ at least in two random names: 8 less two that are equal by chance."""
_COUNTERS = ("In[", "Out[", "In [", "Thread-", "Task-", "ThreadPoolExecutor-", "PoolWorker-")
"""Texts before numbers that count cells, threads, processes and tasks of a kernel."""
_STAMP = re.compile(r"\d{8}_\d{6}")
_STEP = re.compile(r"\d+(?:us|ms|s|m|h)")
_QUANTITY = re.compile(
    r"[\d.,]{1,20} ?(?:ns|us|[\xb5\u03bc]s|ms|s|min|h|d)(?: \d{1,2} ?[a-z]{1,3})*"
)
_ELAPSED = re.compile(r"[\d:?]{1,12}(?:<[\d:?]{1,12})?")
_NEAR_CHARS = 40
"""Characters before or after a text that say what it is."""
_REPR_CHARS = 400
"""Characters of a repr or a path before the text in question."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """The first difference of two texts; `row` and `column` count from 1, `more` further rows."""

    row: int
    column: int
    before: str
    after: str
    more: int = 0


def differing_row(before: str, after: str, was: Run, now: Run) -> RowDifference | None:
    """Return the first difference of two texts beside those of any two runs of the same code.

    Differences in spaces alone count only where no column is as wide as a text that may differ.
    """
    if before == after:
        return None
    found: list[RowDifference] = []
    spaces: list[RowDifference] = []
    resized = False
    for row, (one, two) in enumerate(zip_longest(before.split("\n"), after.split("\n")), 1):
        if one == two:
            continue
        if one is None or two is None:
            found.append(RowDifference(row, 1, shown(one or ""), shown(two or "")))
            continue
        compared = _compared(_last(one), _last(two), row, was, now)
        resized = resized or compared.resized
        if compared.difference is not None:
            (spaces if compared.is_space else found).append(compared.difference)
    if not resized:
        found = sorted([*found, *spaces], key=lambda each: each.row)
    if not found:
        return None
    first = found[0]
    return RowDifference(first.row, first.column, first.before, first.after, len(found) - 1)


def _last(row: str) -> str:
    """Return what a row shows in the end that returned to its start."""
    return row.rstrip("\r").rpartition("\r")[2]


def floats_equal(one: float, two: float) -> bool:
    """Return True if two floats are equal but for the order of sums; NaN equals NaN."""
    if math.isnan(one) or math.isnan(two):
        return math.isnan(one) and math.isnan(two)
    return one == two or abs(one - two) <= RELATIVE * max(abs(one), abs(two)) < math.inf


def shown(text: str) -> str:
    """Return the start of a text on one line, of at most `SHOWN_CHARS` characters."""
    line = " ".join(text[: 4 * SHOWN_CHARS].split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


@dataclass(frozen=True, slots=True)
class _Compared:
    """The first difference of two rows, None without one; `is_space` if only spaces differ.

    `resized` is True if texts of other lengths count as equal.
    """

    difference: RowDifference | None
    is_space: bool
    resized: bool


def _compared(before: str, after: str, row: int, was: Run, now: Run) -> _Compared:
    if _is_timing(before) and _is_timing(after):
        return _Compared(None, is_space=False, resized=True)
    one, two = _reduced(before), _reduced(after)
    resized = (len(one), len(two)) != (len(before), len(after))
    spaces: RowDifference | None = None
    end = other_end = 0
    for token, other in zip_longest(_TOKEN.finditer(one), _TOKEN.finditer(two)):
        if token is None or other is None:
            rest = RowDifference(row, end + 1, shown(one[end:]), shown(two[other_end:]))
            return _Compared(rest, is_space=False, resized=resized)
        if token[0] != other[0]:
            if not _passes(token, other, was, now):
                told = _word if token[0][0].isalnum() and other[0][0].isalnum() else _around
                found = RowDifference(row, token.start() + 1, told(token), told(other))
                return _Compared(found, is_space=False, resized=resized)
            resized = resized or len(token[0]) != len(other[0])
        gap, other_gap = one[end : token.start()], two[other_end : other.start()]
        if gap != other_gap and spaces is None:
            spaces = RowDifference(row, end + 1, repr(gap), repr(other_gap))
        end, other_end = token.end(), other.end()
    if one[end:] != two[other_end:] and spaces is None:
        spaces = RowDifference(row, end + 1, repr(one[end:]), repr(two[other_end:]))
    return _Compared(spaces, is_space=True, resized=resized)


def _word(token: re.Match[str]) -> str:
    """Return what differs, up to the next space or tag, with its sign and without brackets."""
    row, start = token.string, token.start()
    if start and row[start - 1] in "+-":
        start -= 1
    text = row[start : token.end() + SHOWN_CHARS]
    inner = token.end() - start
    rest = text[inner:].partition(" ")[0].partition("<")[0]
    return shown(text[:inner] + rest.rstrip(",;:)]}'\""))


def _around(token: re.Match[str]) -> str:
    """Return what differs with what is before it; the whole row if that is short."""
    row = token.string.strip()
    return shown(row if len(row) <= SHOWN_CHARS else token.string[max(0, token.start() - 20) :])


def _passes(token: re.Match[str], other: re.Match[str], was: Run, now: Run) -> bool:
    """Return True if two texts differ as they do between any two runs of the same code."""
    one, two = token[0], other[0]
    return (
        _both_floats(one, two)
        or (one == str(was.pid) and two == str(now.pid))
        or (_is_object(one) and _is_object(two))
        or (_is_address(token) and _is_address(other))
        or _counted(token) == _counted(other) != ""
        or (_is_step(token) and _is_step(other))
        or _both_temporary(token, other)
        or _with_pid(one, was) == _with_pid(two, now) != ""
        or both_the_clock(one, two, was, now)
        or _both_stamped(one, two, was, now)
    )


def _both_floats(one: str, two: str) -> bool:
    """Return True for floats that are equal but for the order of sums, one with many digits."""
    if not all(any(sign in each for sign in ".eE") for each in (one, two)):
        return False
    if max(sum(map(str.isdigit, each)) for each in (one, two)) < _EXACT_DIGITS:
        return False
    try:
        return floats_equal(float(one), float(two))
    except ValueError:
        return False


def _is_object(text: str) -> bool:
    """Return True for the value of `id`, or the number of a thread: an address in decimal."""
    if len(text) not in (14, 15) or not (text.isascii() and text.isdecimal()):
        return False
    value = int(text)
    return value % _ALIGNMENT == 0 and any(low <= value <= high for low, high in _OBJECTS)


def _is_address(token: re.Match[str]) -> bool:
    """Return True for an address in a repr such as `<function f at 0x7f2b6c1d3a60>`."""
    row, place = token.string, token.start()
    if not _ADDRESS.fullmatch(token[0]) or not row.startswith(" at ", max(0, place - 4)):
        return False
    return row.rfind("<", max(0, place - _REPR_CHARS), place) >= 0


def _counted(token: re.Match[str]) -> str:
    """Return the text before a number that counts cells or threads, as in `In[3]`; or none."""
    if not token[0].partition("_")[0].isdecimal():
        return ""
    before = token.string[max(0, token.start() - _NEAR_CHARS) : token.start()]
    return next((each for each in _COUNTERS if before.endswith(each)), "")


def _is_step(token: re.Match[str]) -> bool:
    """Return True for a time of a training step, as in `1s 12ms/step`."""
    near = token.string[token.end() : token.end() + _NEAR_CHARS]
    return bool(_STEP.fullmatch(token[0])) and ("/step" in near or "/epoch" in near)


def _both_temporary(token: re.Match[str], other: re.Match[str]) -> bool:
    """Return True for two names in a temporary folder that end in random characters."""
    one, two = token[0], other[0]
    before = token.string[max(0, token.start() - _REPR_CHARS) : token.start()]
    in_temporary = "/tmp/" in before.rpartition(" ")[2]
    if not in_temporary or len(one) != len(two) or one[:-8] != two[:-8]:
        return False
    ends = one[-8:], two[-8:]
    if not all(map(_RANDOM.fullmatch, ends)):
        return False
    changes = sum(a != b for a, b in zip(*ends, strict=True))
    return one[:-8] == "tmp" or (changes >= _CHANGES and not any(map(str.isalpha, ends)))


def _with_pid(text: str, run: Run) -> str:
    """Return a name without the run's pid at its end, as in `ipykernel_123`; or none."""
    end = f"_{run.pid}"
    return text.removesuffix(end) if run.pid is not None and text.endswith(end) else ""


def _both_stamped(one: str, two: str, was: Run, now: Run) -> bool:
    """Return True for names that differ by their times alone, as in `model_20260101_100000`."""
    found, other = _STAMP.search(one), _STAMP.search(two)
    if found is None or other is None:
        return False
    around = [(each.string[: each.start()], each.string[each.end() :]) for each in (found, other)]
    return around[0] == around[1] and both_the_clock(found[0], other[0], was, now)


def _is_timing(row: str) -> bool:
    """Return True for the rows of `%time` and `%timeit`."""
    text = row.strip()
    head, colon, rest = text.partition(":")
    if colon and head.strip() in ("Wall time", "Compiler", "Parser"):
        return bool(_QUANTITY.fullmatch(rest.strip()))
    if text.startswith("CPU times: "):
        return "total: " in text
    if text.startswith("The slowest run took "):
        return "longer than the fastest" in text
    ends = (" loops each)", " loop each)", " best of ")
    return " per loop" in text and any(each in text for each in ends)


def _reduced(row: str) -> str:
    """Return a row without the bar and the speed of tqdm, and without the time of test runners."""
    text = row.strip()
    if text.startswith("Ran ") and text.endswith("s") and " test" in text:
        return text.rpartition(" in ")[0]
    if text.startswith("==") and text.strip("= ").endswith("s") and " in " in text:
        return text.strip("= ").rpartition(" in ")[0]
    start, end = row.rfind("["), row.rfind("]")
    parts = row[start + 1 : end].split(", ") if 0 <= start < end else [""]
    is_speed = len(parts) > 1 and ("/s" in parts[1] or "s/" in parts[1])
    if not is_speed or not _ELAPSED.fullmatch(parts[0]):
        return row
    head, bar, count = row[:start].partition("|")
    counted = count.rpartition("|")[2] if bar else ""
    return f"{head}{bar}{counted}{', '.join(parts[2:])}{row[end:]}"
