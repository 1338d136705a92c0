"""Readers of single values: each turns text or TOML into a typed value.

An invalid value raises ValueError with a message for the operator.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_mcp.extensions import offered
from kernel_mcp.linux.folders import from_home
from kernel_mcp.units import MIB, count, duration, format_bytes, size

LEAST_CHARACTERS = 1000
LEAST_MEMORY = 16 * MIB


def texts(given: object, expected: str) -> Sequence[str]:
    """Return a text or a list of texts as a list.

    Raises ValueError with the message `expected` for anything else.
    """
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, str) for each in found):
        raise ValueError(expected)
    return found


def memory(given: object) -> int:
    """Read bytes as `size` does, enough for a kernel; 0 means no limit."""
    found = size(given)
    if 0 < found < LEAST_MEMORY:
        raise ValueError(f"a kernel needs {format_bytes(LEAST_MEMORY)} at least")
    return found


LEAST_PROCESSES = 4
"""With fewer a kernel fails to start, or cannot run any program."""


def processes(given: object) -> int:
    """Read a number of processes and threads; 0 for no limit."""
    found = count(given)
    if 0 < found < LEAST_PROCESSES:
        raise ValueError(f"a kernel needs {LEAST_PROCESSES} processes and threads at least")
    return found


def address(given: object) -> tuple[str, int]:
    """Read `HOST:PORT`, `[::1]:PORT` or a port of 127.0.0.1. Raises ValueError."""
    host, _, port = str(given).strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:8000")
    if ":" in host and not str(given).strip().startswith("["):
        raise ValueError("an IPv6 address takes brackets, such as [::1]:8000")
    return host, int(port)


def characters(given: object) -> int:
    """Read a number of characters of an answer, at least `LEAST_CHARACTERS`."""
    found = count(given)
    if found < LEAST_CHARACTERS:
        raise ValueError(f"expected a number of {LEAST_CHARACTERS} or more")
    return found


def choice(*words: str, group: str = "") -> Callable[[object], str]:
    """Return a reader that accepts exactly one of `words`, or a name in a group of extensions."""

    def read(given: object) -> str:
        word = given.strip().lower() if isinstance(given, str) else ""
        if word not in words and not (group and word in offered(group)):
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return word

    return read


def choices_in_order(
    words: tuple[str, ...], chained: tuple[str, ...], group: str
) -> Callable[[object], tuple[str, ...]]:
    """Return a reader of one of `words`, or of several of `chained` in order of preference.

    Names in a group of extensions stand alone.
    """
    several = ",".join(chained)

    def read(given: object) -> tuple[str, ...]:
        listed = given.split(",") if isinstance(given, str) else given
        if not isinstance(listed, list) or not listed:
            listed = [given]
        found = tuple(dict.fromkeys(map(choice(*words, group=group), listed)))
        if len(found) > 1 and (alone := [each for each in found if each not in chained]):
            raise ValueError(f"{alone[0]} stands alone; what may follow each other is {several}")
        return found

    return read


def some_of(*words: str, group: str) -> Callable[[object], tuple[str, ...]]:
    """Return a reader of several of `words`, including the first, or of names of extensions."""

    def read(given: object) -> tuple[str, ...]:
        listed = given.split(",") if isinstance(given, str) else given
        if not isinstance(listed, list) or not listed:
            listed = [given]
        found = tuple(dict.fromkeys(map(choice(*words, group=group), listed)))
        if words[0] not in found:
            raise ValueError(f"{words[0]} has to be among them: {words[0]},{','.join(found)}")
        return found

    return read


def switch(given: object) -> bool:
    """Read on or off: a flag without a value, `true` in TOML, `1` in a variable."""
    word = str(given).strip().lower() if isinstance(given, (bool, int, str)) else ""
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off"):
        return False
    raise ValueError("expected true or false")


def url(given: object) -> str:
    """Read the address of a package index."""
    text = given.strip() if isinstance(given, str) else ""
    if not re.match(r"(https?|file)://[^\s]+$", text):
        raise ValueError("expected an address that begins with https://, http:// or file://")
    return text


def places(given: object) -> tuple[str, ...]:
    """Read folders and addresses with wheels, one or a list; the caller resolves folders."""
    expected = "expected a folder or an address that begins with https://"
    found = texts(given, expected)
    if not all(place.strip() and "\0" not in place for place in found):
        raise ValueError(expected)
    return tuple(
        place if "://" in place else str(from_home(Path(place))) for place in map(str.strip, found)
    )


def path(given: object) -> Path:
    """Read a path that is not empty; the caller resolves it."""
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise ValueError("expected a path")
    return Path(given)


def hosts(given: object) -> tuple[str, ...]:
    """Read comma lists of hosts, as `network.rules` reads them; empty for `none`."""
    found = texts(given, "expected none, '*', or hosts such as api.example.com, *.example.com")
    named = [text.strip().lower() for each in found for text in each.split(",") if text.strip()]
    if "none" in named:
        if set(named) != {"none"}:
            raise ValueError("none stands alone")
        return ()
    return tuple(dict.fromkeys(named))


def devices(given: object) -> tuple[Path, ...]:
    """Read paths of device files, one or a list; the caller resolves them."""
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, (list, tuple)):
        raise ValueError("expected a device such as /dev/kvm")
    return tuple(map(path, found))


def word(given: object) -> str:
    """Read a single word that does not begin with `-`, as an option of a program does."""
    if not isinstance(given, str) or not given.strip() or given.strip().startswith("-"):
        raise ValueError("expected a name")
    if len(given.split()) != 1:
        raise ValueError("expected a single word")
    return given.strip()


def close_to(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most `most` of the `known` names that resemble `name`, the nearest first.

    `cutoff` is the least `difflib.SequenceMatcher.ratio` of two such names.
    """
    from difflib import get_close_matches

    return get_close_matches(name, list(known), most, cutoff)


MOST_DOTS = 4_000_000
"""Squares of the dots between two `=` or line ends, together: 2,000 in one key take 60 ms."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return a TOML document. Raises ValueError, with the position, and RecursionError."""
    if sum(part.count(".") ** 2 for part in re.split("[=\n]", text)) > MOST_DOTS:
        raise ValueError("its keys have too many parts")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    document: dict[str, Any] = tomllib.loads(text)
    return document


def asking(given: object) -> tuple[float, ...]:
    """Read the seconds that a person has for an answer; empty for `off`."""
    if given is False or (isinstance(given, str) and given.strip().lower() == "off"):
        return ()
    try:
        return (duration(given),)
    except ValueError:
        raise ValueError("expected a time such as 10m, or off") from None
