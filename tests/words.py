"""Checks the words of docstrings and documents; `make lint` runs it.

It reads files as text, which takes a second for the whole project. It checks:

- how docstrings begin: with what something is or does, never with one of `NEVER_FIRST`;
- the length of sentences: at most `MOST_WORDS`;
- words of `PRIVATE`, each of which has a usual name, in prose and in names of code.

Tables, lists of fields, quotations, code blocks and generated parts are skipped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("kernel_mcp", "kernel_specs", "examples")
"""Folders whose docstrings are checked."""
ASIDE = ("benchmarks", "tests")
"""Folders of which only the beginning of docstrings is checked."""
MOST_WORDS = 25
NEVER_FIRST = ("Have", "What", "Whether", "Who", "Whom", "Whose")
PRIVATE = {
    "absences": "ignore_missing",
    "at rest": "idle",
    "commons": "app context",
    "furniture": "protocol keys",
    "hearer": "listener",
    "outbox": "delivery tracker",
    "prover": "self-test",
    "roster": "admin status",
    "shelf": "dump",
    "to be had": "available",
    "spoken": "text",
    "told": "reported, or notified",
    "unsaid": "unreported",
    "untold": "undelivered",
    "veil": "redactor",
    "wing": "tenant pool",
    "workshop": "build sandbox",
}
"""Words that only this project used in their sense, and the usual ones."""

_DOCSTRING = re.compile(r'^( *)r?"""(?=[^\s\\])(.*?)"""$', re.MULTILINE | re.DOTALL)
_LEFT_OUT = re.compile(
    r"^```.*?^```$|<!-- ([\w ]+) -->.*?<!-- end of \1 -->", re.MULTILINE | re.DOTALL
)
_PARAGRAPH = re.compile(r"\n\n|\n(?= *- )")
_LINK = re.compile(r"\[([^\[\]]*)\]\([^()\s]*\)")
_QUOTED = re.compile(r"`[^`]*`")
_END = re.compile(r"[.!?:;]\W*(?=\s)|$")
_NAMED = re.compile(r"\b(?:def |class |self\.)(\w+)")
_PARTS = re.compile(r"[A-Z]?[a-z]+")
_PRIVATE = re.compile(rf"\b({'|'.join(map(re.escape, PRIVATE))})s?\b", re.IGNORECASE)


def of_beginning(text: str) -> Iterator[str]:
    """Yield a fault if a docstring begins with a word that none should."""
    first = text.split(maxsplit=1)[:1]
    if first and first[0] in NEVER_FIRST:
        yield f"begins with {first[0]!r}: say what it is, or what it does"


def of_docstring(text: str) -> Iterator[str]:
    """Yield what is wrong with a docstring."""
    yield from of_beginning(text)
    for paragraph in _PARAGRAPH.split(text):
        if not any("  " in line.strip() for line in paragraph.splitlines()):
            yield from of_prose(paragraph)


def of_prose(text: str) -> Iterator[str]:
    """Yield what is wrong with a paragraph."""
    plain = _QUOTED.sub("x", _LINK.sub(r"\1", text))
    for sentence in _sentences(plain):
        words = sentence.split()
        if len(words) > MOST_WORDS:
            yield f"{len(words)} words in one sentence: {' '.join(words[:6])} …"
    for word in _PRIVATE.findall(plain):
        yield f"{word!r}: say {PRIVATE[word.lower()]}"


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(text):
        yield text[start : end.end()]
        start = end.end()


def of_module(
    source: str, check: Callable[[str], Iterator[str]] = of_docstring
) -> Iterator[tuple[int, str]]:
    """Yield lines of a module and what is wrong with their docstrings."""
    for found in _DOCSTRING.finditer(source):
        for fault in check(found[2]):
            yield source.count("\n", 0, found.start()) + 1, fault


def of_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield lines of a module with names of functions, classes or fields that have such words."""
    for found in _NAMED.finditer(source):
        for part in _PARTS.findall(found[1]):
            word = part.lower()
            if usual := PRIVATE.get(word) or PRIVATE.get(word.removesuffix("s")):
                yield source.count("\n", 0, found.start()) + 1, f"{found[1]!r}: say {usual}"


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines of a document and what is wrong with them; a line is a paragraph."""
    text = _LEFT_OUT.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(("|", "#", ">", "    ")):
            for fault in of_prose(line):
                yield number, fault


def faults() -> Iterator[str]:
    """Yield all that is wrong, with its place."""
    for path in _modules(CODE):
        source = path.read_text("utf-8")
        yield from _placed(path, [*of_module(source), *of_names(source)])
    for path in _modules(ASIDE):
        yield from _placed(path, of_module(path.read_text("utf-8"), of_beginning))
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        yield from _placed(path, of_page(path.read_text("utf-8")))


def _modules(folders: tuple[str, ...]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _placed(path: Path, found: Iterable[tuple[int, str]]) -> Iterator[str]:
    return (f"{path.relative_to(ROOT)}:{line}: {fault}" for line, fault in found)


if __name__ == "__main__":
    found = list(faults())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
