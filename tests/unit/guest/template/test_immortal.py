"""Objects of a template that are not counted: on tried versions, and found without extensions."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kernel_specs
from kernel_specs.template import immortal
from tests.interpreters import NAMES, interpreter

ROOT = Path(kernel_specs.__file__).parents[1]
SCRIPT = """
import _asyncio, asyncio, functools, gc, json, platform, sys
sys.path.insert(0, sys.argv[1])
from kernel_specs.template import immortal

def function(value=("constant", 2)):
    return "text of its own"

async def twice():
    for _ in range(3):
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(50)])

asyncio.run(twice())
partial = functools.partial(function)
kept = [function, function.__code__, function(), function.__defaults__, sys.modules, immortal]
gc.freeze()
made = immortal.keep()
counts = [sys.getrefcount(one) for one in kept]
more = [list(kept) for _ in range(9)]
same = counts == [sys.getrefcount(one) for one in kept]
others = sys.getrefcount([]), sys.getrefcount(partial)
asyncio.run(twice())
gc.collect()
print(json.dumps([immortal.possible(), made, same, others]))
"""


def kept(python: str) -> tuple[bool, int, bool, list[int]]:
    """Return the report of a separate process whose objects are made immortal."""
    words = [python, "-c", SCRIPT, str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    possible, made, same, others = json.loads(done.stdout)
    return possible, made, same, others


@pytest.mark.parametrize("python", NAMES)
def test_references_are_not_counted_on_tried_versions_and_nothing_is_touched_on_others(
    python: str,
) -> None:
    version, path = interpreter(python)
    possible, made, same, others = kept(path)
    assert possible == (version in immortal.TRIED)
    assert (made > 1000) == same == possible
    assert max(others) <= 2, "a fresh list and an object of an extension type are counted"


def test_where_that_cannot_be_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal, "possible", lambda: False)
    assert immortal.keep() == 0


def test_only_builtin_containers_are_asked_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[type[Any]] = set()

    def get_referents(*objects: Any) -> list[Any]:
        asked.update(map(type, objects))
        return found(*objects)

    found = gc.get_referents
    monkeypatch.setattr(gc, "get_referents", get_referents)
    monkeypatch.setattr(immortal, "_parts_of_code", lambda _code: [])  # older code has fewer
    addresses = immortal._found()
    assert asked <= immortal.CONTAINERS
    assert not asked & {types.ModuleType, type}
    assert {id(sys), id(pytest), id(immortal.keep.__code__)} <= addresses
    assert id(monkeypatch) not in addresses
