"""Patterns of a source tree: where they are, what repeats in them, which texts are hard on them."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NEW = sys.version_info >= (3, 11)
codes: Any = importlib.import_module("re._constants" if _NEW else "sre_constants")
parser: Any = importlib.import_module("re._parser" if _NEW else "sre_parse")

FUNCTIONS = frozenset(
    ("compile", "match", "fullmatch", "search", "findall", "finditer", "split", "sub", "subn")
)
LARGE = 64
"""Times above which a repeat counts as one: two of 64 take 4,000 steps together."""
ALPHABET = frozenset(map(chr, range(256))) | frozenset("\u017f\u212a\u2028\u0660\U0001f389\ud800")
_BOUND = re.compile(r"# bound: ([0-9,]{1,12}) (?:characters|bytes), \w")
_PARTS = re.compile(r"# parts: \w")


@dataclass
class Pattern:
    """A pattern in the source; `uses` are the methods that are called on it.

    bound  characters of the longest text that it meets, 0 for any
    """

    place: str
    text: str | bytes
    flags: int
    uses: set[str]
    bound: int = 0

    @property
    def compiled(self) -> re.Pattern[Any]:
        return re.compile(self.text, self.flags)


class Unresolved(Exception):
    """A pattern that is put together while the program runs, without a comment on its parts."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def patterns_of(path: Path, module: str, uses: dict[str, set[str]]) -> Iterator[Pattern]:
    """Yield the patterns of one file. Raises Unresolved."""
    source = path.read_text(encoding="utf-8")
    if "re." not in source and "Pattern(" not in source:
        return
    tree = parsed(path)
    lines = source.splitlines()
    names = _names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not (function := _function(node.func)):
            continue
        place = f"{path.name}:{node.lineno}"
        near = lines[max(0, node.lineno - 2) : node.end_lineno]
        try:
            text, flags = _evaluated(node, function, module)
        except (NameError, AttributeError, TypeError) as error:
            if any(map(_PARTS.search, near)):
                continue
            raise Unresolved(f"{place}: {ast.unparse(node)} ({error!r})") from None
        called = {function} - {"compile"}
        name = names.get(id(node), "")
        used = called or uses.get(name, set()) or {"search", "fullmatch"}
        bound = next((found[1] for line in near if (found := _BOUND.search(line))), "0")
        yield Pattern(f"{path.name}:{node.lineno}", text, flags, used, int(bound.replace(",", "")))


def uses_in(trees: Iterable[ast.AST]) -> dict[str, set[str]]:
    """The methods of patterns that are called on each name, `_NAME.match` and `_NAME[x].match`."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
                value = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                if isinstance(value, ast.Attribute) and value.attr == "compiled":
                    value = value.value
                name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
                found.setdefault(name, set()).add(node.attr)
    return found


def _names(tree: ast.AST) -> dict[int, str]:
    """Names that the value of an assignment is given, by each call within it."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.update(dict.fromkeys(map(id, ast.walk(node.value)), node.targets[0].id))
    return found


def _function(func: ast.expr) -> str:
    """The function of `re` that is called; `compile` for our own `Pattern`, empty for others."""
    if isinstance(func, ast.Name):
        return "compile" if func.id == "Pattern" else ""
    if isinstance(func, ast.Attribute) and ast.unparse(func.value) == "re":
        return func.attr if func.attr in FUNCTIONS else ""
    return ""


class _Escaped(ast.NodeTransformer):
    """Takes `re.escape(...)` for one word."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == "re.escape":
            return ast.copy_location(ast.Constant("word"), node)
        return node


def _evaluated(node: ast.Call, function: str, module: str) -> tuple[str | bytes, int]:
    place = {"compile": 1, "match": 2, "fullmatch": 2, "search": 2, "findall": 2, "finditer": 2}
    given = next((each.value for each in node.keywords if each.arg == "flags"), None)
    position = place.get(function, 99)
    if given is None and len(node.args) > position:
        given = node.args[position]
    return _value(node.args[0], module), int(_value(given, module)) if given else 0


def _value(expression: ast.expr, module: str) -> Any:
    clean = _Escaped().visit(expression)
    code = compile(ast.Expression(clean), module, "eval")
    try:
        return eval(code, {"re": re})
    except NameError:
        return eval(code, dict(vars(importlib.import_module(module))))


@dataclass(eq=False)
class Repeat:
    """A repeat of a pattern: what its body may begin with, and texts that it takes.

    before  a text that comes to it
    """

    first: frozenset[str]
    units: list[str]
    before: str
    least: int


@dataclass
class Shape:
    """Properties of a part of a pattern: empty, first characters, and the repeats at its ends."""

    empty: bool = True
    first: frozenset[str] = frozenset()
    opening: list[Repeat] = field(default_factory=list)
    closing: list[Repeat] = field(default_factory=list)
    sample: str = ""


class Reader:
    """Walks a parse tree; collects its repeats and the pairs that stand side by side."""

    def __init__(self, pattern: Pattern) -> None:
        self.repeats: list[Repeat] = []
        self.pairs: list[str] = []
        self._ignore = bool(pattern.compiled.flags & re.IGNORECASE)
        self._all = bool(pattern.compiled.flags & re.DOTALL)
        self._ascii = isinstance(pattern.text, bytes) or bool(pattern.flags & re.ASCII)
        parsed = parser.parse(pattern.text, pattern.flags)
        self.whole = self._sequence(list(parsed), "")

    def _sequence(self, items: list[Any], before: str) -> Shape:
        whole = Shape()
        for operation, argument in items:
            part = self._part(operation, argument, before + whole.sample)
            self._meet(whole.closing, part.opening)
            whole.opening = [*whole.opening, *part.opening] if whole.empty else whole.opening
            whole.first = whole.first | part.first if whole.empty else whole.first
            whole.closing = [*whole.closing, *part.closing] if part.empty else part.closing
            whole.empty = whole.empty and part.empty
            whole.sample += part.sample
        return whole

    def _meet(self, left: list[Repeat], right: list[Repeat]) -> None:
        for one in left:
            for other in right:
                if common := one.first & other.first:
                    self.pairs.append(f"two repeats over {min(common)!r}")

    def _part(self, operation: Any, argument: Any, before: str) -> Shape:
        if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, body = argument
            return self._repeat(least, most, body, before)
        if operation is codes.SUBPATTERN:
            return self._sequence(list(argument[-1]), before)
        if operation is codes.BRANCH:
            return self._branch([self._sequence(list(each), before) for each in argument[1]])
        name = str(operation)
        if name in ("ATOMIC_GROUP", "POSSESSIVE_REPEAT"):
            inner = argument[-1] if name == "POSSESSIVE_REPEAT" else argument
            kept = self._sequence(list(inner), before)
            return Shape(kept.empty or name[0] == "P", kept.first, [], [], kept.sample)
        if operation is codes.GROUPREF_EXISTS:
            chosen = [each for each in argument[1:] if each is not None]
            return self._branch([Shape(), *(self._sequence(list(e), before) for e in chosen)])
        if operation is codes.GROUPREF:
            return Shape(True, ALPHABET)
        if operation in (codes.ASSERT, codes.ASSERT_NOT):
            self._sequence(list(argument[1]), before)
            return Shape()
        if operation is codes.AT:
            return Shape()
        chars = self._characters(operation, argument)
        return Shape(False, chars, sample=min(chars, key=_plainness) if chars else "")

    def _branch(self, ways: list[Shape]) -> Shape:
        return Shape(
            any(each.empty for each in ways),
            frozenset().union(*(each.first for each in ways)),
            [repeat for each in ways for repeat in each.opening],
            [repeat for each in ways for repeat in each.closing],
            ways[0].sample,
        )

    def _repeat(self, least: int, most: Any, body: Any, before: str) -> Shape:
        inner = self._sequence(list(body), before)
        sample = inner.sample * min(least, 64)
        opening, closing = inner.opening, inner.closing
        if int(most) > 1:
            self._meet(closing, opening)
            for repeat in closing if int(most) > LARGE else ():
                if common := repeat.first & inner.first:
                    self.pairs.append(f"a repeat of repeats over {min(common)!r}")
        if int(most) > LARGE:
            units = [inner.sample] if len(inner.sample) > 1 else _spread(inner.first)
            own = Repeat(inner.first, units, before, int(least))
            self.repeats.append(own)
            opening, closing = [own, *opening], [own, *closing]
        return Shape(least == 0 or inner.empty, inner.first, opening, closing, sample)

    def _characters(self, operation: Any, argument: Any) -> frozenset[str]:
        found: frozenset[str]
        if operation is codes.LITERAL:
            found = frozenset(chr(argument))
        elif operation is codes.NOT_LITERAL:
            return ALPHABET - self._cases(frozenset(chr(argument)))
        elif operation is codes.ANY:
            return ALPHABET if self._all else ALPHABET - {"\n"}
        elif operation is codes.RANGE:
            low, high = argument
            found = frozenset(each for each in ALPHABET if low <= ord(each) <= high)
        elif operation is codes.CATEGORY:
            return self._category(str(argument))
        else:
            assert operation is codes.IN, operation
            negated = argument[0][0] is codes.NEGATE
            parts = [self._characters(*each) for each in argument[negated:]]
            found = frozenset().union(*parts)
            return ALPHABET - self._cases(found) if negated else self._cases(found)
        return self._cases(found)

    def _cases(self, chars: frozenset[str]) -> frozenset[str]:
        if not self._ignore:
            return chars
        both = {form for each in chars for form in (each.lower(), each.upper()) if len(form) == 1}
        return chars | both

    def _category(self, name: str) -> frozenset[str]:
        letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[name.rpartition("_")[2]]
        letter = letter.upper() if "_NOT_" in name else letter
        test = re.compile(f"\\{letter}", re.ASCII if self._ascii else 0)
        return frozenset(filter(test.match, ALPHABET))


def _plainness(char: str) -> tuple[bool, bool, str]:
    return not char.isascii(), not char.isalnum(), char


def _spread(chars: frozenset[str]) -> list[str]:
    """A few unlike characters of a class."""
    kinds = ("a", "1", " ", "\t", "-", ".", "<", "=", '"', "\\", "[")
    found = [each for each in kinds if each in chars]
    return found or [min(chars, key=_plainness)] if chars else []


def pumps(repeat: Repeat) -> Iterator[tuple[str, str, str]]:
    """Beginning, repeated part and end of texts that a repeat may take too long for."""
    end = next((each for each in '\0\n<!"x' if each not in repeat.first), "")
    for unit in repeat.units:
        yield "", unit, end
        if repeat.before:
            yield repeat.before, unit, end
            yield "", repeat.before + unit * max(1, repeat.least), end
