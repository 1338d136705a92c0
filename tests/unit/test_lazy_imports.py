"""Modules of which a server on pipes imports nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter

from kernel_mcp import start
from kernel_mcp.lazy_imports import LazyName, lazy_imports

HEAVY = """
class Base:
    size = 3
def made(*args, **kwargs):
    return args, kwargs
kinds = {"a": 1}
"""
USER = """
import heavy
from heavy.parts import Base, kinds, made
from heavy import parts
either = None | Base | int
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that takes names from a package while this is deferred."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("known = 'here'\n")
    (tmp_path / "heavy" / "parts.py").write_text(HEAVY)
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    with lazy_imports("heavy"):
        yield import_module("user")
    for name in ("user", "heavy", "heavy.parts"):
        sys.modules.pop(name, None)


def test_what_was_taken_is_there_when_it_is_used(user: Any) -> None:
    assert isinstance(user.made, LazyName)
    assert user.made(1, b=2) == ((1,), {"b": 2})
    assert user.Base.size == 3
    assert user.kinds["a"] == 1
    assert isinstance(user.Base(), user.Base)
    assert not isinstance(1, user.Base)
    assert user.Base | None == None | user.Base
    assert user.heavy.known == "here"
    assert user.parts.made() == ((), {})


def test_unions_are_made_when_they_are_used(user: Any) -> None:
    either: Any = user.either
    assert isinstance(user.either, LazyName)
    assert not hasattr(user.Base, "__parameters__")
    assert not hasattr(sys.modules["heavy"], "__file__")
    adapter = TypeAdapter[Any](either, config=ConfigDict(arbitrary_types_allowed=True))
    assert adapter.validate_python("7") == 7
    assert adapter.validate_python(base := user.Base()) is base
    assert either._found() == user.Base | int | None


def test_a_class_may_inherit_what_was_taken(user: Any) -> None:
    class Derived(user.Base):  # type: ignore[misc]
        pass

    assert Derived.__mro__[1] is import_module("heavy.parts").Base


def test_the_first_use_ends_it_within_the_block_too(user: Any) -> None:
    assert not hasattr(sys.modules["heavy"], "__file__")
    user.made()
    assert import_module("heavy").known == "here"
    assert import_module("heavy.parts").kinds == {"a": 1}


def test_others_import_what_is_there_after_it(tmp_path: Path, user: Any) -> None:
    with lazy_imports("other"):
        pass
    finder = next(each for each in sys.meta_path if type(each).__name__ == "LazyImportFinder")
    finder.end()  # type: ignore[attr-defined]
    assert finder not in sys.meta_path
    assert Path(import_module("heavy.parts").__file__ or "").is_relative_to(tmp_path)
    assert isinstance(user.Base, LazyName)


def test_a_server_on_pipes_imports_nothing_of_http_and_clients() -> None:
    code = (
        "from kernel_mcp import start\n"
        "with start._imports(start.SERVER, start.DEFERRED, start.PROTOCOL, start.TOOLS) as rest:\n"
        "    rest[start.TOOLS].result()\n"
        "import sys\n"
        "from kernel_mcp.deferred import UNUSED, VERSIONS\n"
        "loaded = set(sys.modules)\n"
        "print(*sorted(loaded))\n"
        "assert loaded.isdisjoint({*UNUSED, *VERSIONS, 'click', 'sse_starlette', 'uvicorn'})\n"
        "import mcp_types\n"
        "assert not mcp_types.client_request_adapter.pydantic_complete\n"
        "ping = mcp_types.client_request_adapter.validate_python({'method': 'ping'})\n"
        "assert isinstance(ping, mcp_types.PingRequest)\n"
        "from pydantic import TypeAdapter\n"
        "assert TypeAdapter(int | None).pydantic_complete\n"
        "from mcp import ClientSession\n"
        "from mcp.server.lowlevel.server import StreamableHTTPSessionManager\n"
        "assert ClientSession.send_ping\n"
        "assert StreamableHTTPSessionManager.run\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
    assert {"mcp.server.mcpserver", start.PROTOCOL} <= set(done.stdout.split())
