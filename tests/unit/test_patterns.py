"""No pattern of the server takes more than linear time for a text that comes from elsewhere."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.patterns import Pattern, Reader, Unresolved, parsed, patterns_of, pumps, uses_in
from tests.unit.test_imports import ROOT, imported, sources

SIZES = (1_000, 10_000, 100_000)
MOST_GROWTH = 15
"""Times more processor time for ten times the text."""
ENOUGH_S = 0.05
"""Processor time that any text may take; clocks that tick a hundred times a second tell it."""
TRIALS = 2
"""Measurements until a pattern counts as slow; one may be the machine's."""
CHILD_S = 60


def server_files() -> dict[str, Path]:
    """The files of the server, and those of kernels that it imports itself."""
    known = sources()
    server = {name: path for name, path in known.items() if name.startswith("kernel_mcp")}
    shared = {other for path in server.values() for other in imported(parsed(path), known)}
    return server | {name: known[name] for name in shared}


def all_patterns(files: dict[str, Path]) -> tuple[list[Pattern], list[str]]:
    used = {name: uses_in([parsed(path)]) for name, path in files.items()}
    shared: dict[str, set[str]] = {}
    for uses in used.values():
        for name, methods in uses.items():
            shared[name] = shared.get(name, set()) | methods
    found: list[Pattern] = []
    unresolved: list[str] = []
    for module, path in files.items():
        private = {k: v for k, v in used[module].items() if k.startswith("_")}
        try:
            found += patterns_of(path, module, shared | private)
        except Unresolved as error:
            unresolved.append(str(error))
    return found, unresolved


def calls(pattern: Pattern) -> list[Callable[[Any], object]]:
    compiled = pattern.compiled
    every = {"finditer", "findall", "sub", "subn", "split"}
    ways: list[Callable[[Any], object]] = [
        getattr(compiled, name) for name in sorted(pattern.uses - every)
    ]
    if pattern.uses & every:
        ways.append(lambda text: deque(compiled.finditer(text), 0))
    return ways


def processor_time(call: Callable[[Any], object], text: Any, times: int = 1) -> float:
    start = time.process_time()
    for _ in range(times):
        call(text)
    return (time.process_time() - start) / times


def slow(pattern: Pattern, begin: str, unit: str, end: str) -> str:
    """Why a pump is one that the pattern may not meet; empty when it is none."""

    def text(size: int) -> Any:
        whole = begin + unit * (size // len(unit)) + end
        return whole.encode("latin-1", "replace") if isinstance(pattern.text, bytes) else whole

    sizes = [size for size in SIZES if not pattern.bound or size < pattern.bound]
    for call in calls(pattern):
        for size in sizes + [pattern.bound] * bool(pattern.bound):
            spent = processor_time(call, text(size))
            if spent <= ENOUGH_S:
                continue
            told = f"{spent:.2f} s for {size:,} of {begin!r}, {unit!r} …, {end!r}"
            if pattern.bound:
                return told
            for _ in range(TRIALS):
                before = processor_time(call, text(size // 10), int(ENOUGH_S * 10 / spent) + 10)
                if spent <= MOST_GROWTH * before:
                    break
                spent = min(spent, processor_time(call, text(size)))
            else:
                return f"{told}: {spent / before:.0f} times that of a tenth of it"
    return ""


def judged(pattern: Pattern) -> list[str]:
    reader = Reader(pattern)
    found = [] if pattern.bound else reader.pairs[:1]
    for repeat in [] if found else reader.repeats:
        for begin, unit, end in pumps(repeat):
            if why := slow(pattern, begin, unit, end):
                return [*found, why]
    return found


def main() -> None:
    """Judge all patterns, a line of JSON for each that is refused; in a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_S, CHILD_S))
    patterns, unresolved = all_patterns(server_files())
    for each in unresolved:
        print(json.dumps(["unresolved", each]), flush=True)
    for pattern in patterns:
        print(json.dumps(["begins", pattern.place]), flush=True)
        for why in judged(pattern):
            print(json.dumps(["refused", pattern.place, str(pattern.text), why]), flush=True)
    print(json.dumps(["ends", len(patterns)]), flush=True)


def test_every_pattern_of_the_server_takes_linear_time() -> None:
    command = [sys.executable, "-m", "tests.unit.test_patterns"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [each for each in told if each[0] in ("unresolved", "refused")] == []
    assert told[-1][0] == "ends", (told[-1], ran.returncode, ran.stderr[-2000:])
    assert told[-1][1] > 150


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (r"([!-~]+):[ \t]*([\t -~]*?)[ \t]*", 0),
        (r"<!--|</?([a-zA-Z][a-zA-Z0-9]*)[^<>]*>", 0),
        (r"(?:-\w+(?:[ \t]*\d+)?[ \t]+)*(.*)$", 0),
        (r"a(?:\s*\(?\s*<1)?!", 0),
        (r"bytes\s*=\s*(\d{0,18})\s*-", 0),
        (r"^Requires-Dist:\s*(.*\S)", re.MULTILINE),
        (r"(a+)*b", 0),
        (r"(?:a|ab\w*)*c", 0),
        (r"<!--.*?-->", re.DOTALL),
        (r"\s+$", 0),
        (r"x*y*z", 0),
        (r"(?=\s*a)\w*?\s*[\s-]*b", 0),
    ],
)
def test_a_pattern_that_is_not_linear_is_found(text: str, flags: int) -> None:
    assert judged(Pattern("here", text, flags, {"search", "fullmatch"}))


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        (r"[a-z]+(?:-[a-z]+)*", {"fullmatch"}),
        (r"\s*,\s*", {"match"}),
        (r"<[^<>]*>", {"sub"}),
        (r'"(?:[^"\\]|\\.)*"', {"match"}),
        (r"\d{1,18}\d{1,18}", {"fullmatch"}),
    ],
)
def test_a_linear_pattern_passes(text: str, uses: set[str]) -> None:
    assert judged(Pattern("here", text, 0, uses)) == []


def test_the_bound_in_a_comment_is_held_to() -> None:
    assert judged(Pattern("here", r"a*a*b", 0, {"match"}, 255)) == []
    assert judged(Pattern("here", r"a*a*b", 0, {"match"}, 100_000))


if __name__ == "__main__":
    main()
