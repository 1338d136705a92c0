"""Arguments that a tool cannot use: an error in words, and nothing is done."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from kernel_mcp.tools import PythonArg
from kernel_mcp.tools.arguments import Share, nearest, share, without_fence
from tests.unit.tools.served import served

pytestmark = [pytest.mark.anyio]

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "execute",
        {"code": "1", "session_id": "s"},
        "execute has no argument `session_id`; did you mean `session` (Handle or name",
    ),
    (
        "reset",
        {"keep_variables": True},
        "reset has no argument `keep_variables`.\nIt takes session, packages, files. Nothing was",
    ),
    ("reset", {"keep_files": True}, "did you mean `files` (Empty the workspace too)?"),
    ("execute", {"source": "1"}, "has no argument `source`; did you mean `code`?"),
    ("read_file", {"filePath": "a"}, "did you mean `path`?"),
    ("execute", {"code": "1", "timeout_s": 5}, "did you mean `timeout` ("),
    ("export_notebook", {"filename": "a.ipynb"}, "`filename`; did you mean `path`?"),
    ("list_files", {"directory": "a"}, "`directory`; did you mean `path`?"),
    ("create_session", {"session_id": "a"}, "`session_id`; did you mean `name`?"),
    ("create_session", {"requirements": "a"}, "`requirements`; did you mean `packages`?"),
    ("write_file", {"path": "a", "text": "", "content": ""}, "did you mean `content`?"),
    ("wait", {"timeout": 5}, "`timeout`; did you mean `wait`?"),
    ("run_script", {"script": "1", "args": ["a"]}, "has no argument `args`.\nIt takes script,"),
    ("interrupt", {"cell": True}, "`cell` is true: expected a whole number."),
    ("list_sessions", {"session": "s"}, "list_sessions has no argument `session`.\nIt takes none."),
    ("execute", {"code": "1", "x" * 99: 1}, "no argument `" + "x" * 59 + "…`.\n"),
    ("execute", {}, "execute needs `code`. Nothing was done."),
    ("write_file", {"path": 1}, "needs `content`.\n`path` has"),
    ("write_file", {"path": 1, "content": ""}, "`path` has to be a string, not the number 1."),
    ("execute", {"code": None}, "`code` has to be a string, not null. Nothing"),
    (
        "edit_notebook",
        {"path": "a", "op": "x"},
        "one of insert, replace, delete, move, not the string",
    ),
    (
        "edit_notebook",
        {"path": "a", "op": "insert", "kind": "md"},
        "`kind` has to be one of code, markdown, raw, not the string 'md'.",
    ),
    ("create_session", {"python": True}, "`python` has to be a string, not true."),
    ("execute", {"code": ["1"]}, "`code` has to be a string, not a list."),
    ("execute", {"code": {"a": 1}}, "`code` has to be a string, not an object."),
    ("execute", {"code": True}, "`code` has to be a string, not true."),
    ("execute", {"code": "1", "wait": "long"}, "`wait` is the string 'long': expected a time such"),
    ("read_file", {"path": "a", "limit": 1.5}, "a whole number, not the number 1.5."),
    ("reset", {"files": "maybe"}, "`files` has to be true or false, not the string 'maybe'."),
    ("execute", {"code": "1", "timeout": 4000}, "Ask for at most 3600 s (--max-timeout)"),
    ("create_session", {"memory": "2X"}, "`memory` is the string '2X': expected a size such as"),
    ("create_session", {"memory": 2}, "`memory` is the number 2: that is 2 bytes; write 2G if"),
    (
        "create_session",
        {"memory": "9" * 400},
        "`memory` is the string '" + "9" * 59 + "…': the num",
    ),
    ("create_session", {"memory": 10**400}, "…: the number is too large."),
    ("create_session", {"cpu": 10**400}, "expected processors such as 1.5, or a time"),
    ("create_session", {"timeout": 10**400}, "expected a time such as 30"),
    ("create_session", {"timeout": "9" * 400}, "timeout: inf s is more than the operator permits"),
    ("execute", {"code": "1", "wait": 10**400}, "expected a time such as 30"),
    ("create_session", {"memory": "3G"}, "memory: 3 GiB is more than the operator permits."),
    ("run_script", {"script": "1", "cpu": "0"}, "expected processors such as 1.5, or a time"),
    ("run_script", {"script": "1", "cpu": 3}, "Ask for at most 2 (--cpus), or leave it out."),
    ("create_session", {"timeout": "2h"}, "Ask for at most 3600 s (--max-timeout)"),
    (
        "create_session",
        {"packages": ["a", None]},
        "`packages[1]` has to be a string, not null.",
    ),
    ("install", {"packages": ["a", 1]}, "`packages[1]` has to be a string, not the number 1."),
    ("install", {"packages": 1}, "has to be a list of strings, not the number 1."),
    ("create_session", {"packages": {"a": 1}}, "has to be a list of strings, not an object."),
]


async def test_wrong_arguments_are_told_in_words_and_nothing_is_done(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        for tool, arguments, words in WRONG:
            answer = await server.agent.client.call_tool(tool, arguments)
            assert answer.is_error, (tool, arguments)
            text = "".join(getattr(block, "text", "") for block in answer.content)
            assert words in text, (tool, arguments)
            assert "Nothing was done." in text or "is more than the operator permits" in text
            assert "pydantic" not in text
            assert "validation" not in text
            assert len(text.splitlines()) <= 5
        many = await server.agent.refused("interrupt", **{f"x{n}" * 999: 1 for n in range(5000)})
        assert "4996 more are wrong.\nIt takes session, cell. Nothing was done." in many
        assert len(many.splitlines()) == 6
        many = await server.agent.refused("create_session", packages=[1] * 5000)
        assert "4996 more are wrong. Nothing was done." in many
        assert not server.manager.sessions


async def test_what_a_client_means_by_other_types_is_taken(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        answer = await server.call("execute", code="say 1", timeout="5", wait="5s")
        assert not answer.failed
        assert not (await server.call("reset", files="true")).failed
        assert not (await server.call("create_session", packages="[]")).failed


async def test_every_optional_argument_may_be_null_or_empty(tmp_path: Path) -> None:
    needed = {
        "code": "say 1",
        "script": "say 1",
        "content": "",
        "packages": ["kmtest"],
        "op": "insert",
        "cells": "all",
        "branch": "x",
    }
    async with served(tmp_path) as server:
        await server.call("open_notebook", path="book.ipynb")
        for tool in (await server.agent.client.list_tools()).tools:
            if tool.name in ("wait", "interrupt", "run_script", "undo", "branch", "adopt"):
                continue
            required = tool.input_schema.get("required", ())
            empties: list[Any] = [None, "", {}, [], " ", "None", "null"]
            for empty in empties:
                given = dict.fromkeys(tool.input_schema["properties"], empty)
                given |= {name: needed.get(name, "book.ipynb") for name in required}
                if tool.name == "create_session":
                    given["name"] = None
                answer = await server.agent.call(tool.name, **given)
                words = f"{tool.name} {empty!r}: {answer.text}"
                assert "has to be" not in answer.text, words
                assert "expected" not in answer.text, words


async def test_code_in_a_markdown_block_is_run_without_its_fence(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        answer = await server.call("execute", code="```python\nsay 1\n```")
        assert not answer.failed
        assert answer.text.startswith("1")
        assert (
            "[kernel-mcp] `code` was a Markdown code block: its fence was taken off" in answer.text
        )
        checked = await server.call("check_syntax", code="```\n1 + 1\n```\n")
        assert checked.data["valid"]
        assert "fence was taken off" in checked.data["notices"][0]
        assert "fence" not in (await server.call("execute", code="say 1")).text
        await server.call("open_notebook", path="a.ipynb")
        added = await server.call(
            "edit_notebook", path="a.ipynb", op="insert", source="```py\nx = 1\n```"
        )
        assert "`source` was a Markdown code block" in added.text
        text = "```py\nx = 2\n```"
        kept = await server.call(
            "edit_notebook", path="a.ipynb", op="insert", source=text, kind="markdown"
        )
        assert "fence" not in kept.text
        book = (await server.call("read_file", path="a.ipynb")).text
        assert '"x = 1"' in book
        assert '"```py\\n"' in book


@pytest.mark.parametrize(
    "fenced",
    [
        "```python\n1 + 1\n```",
        "\n  ```py\n1 + 1\n  ```  \n",
        "```\n1 + 1\n```",
        "```Python3 title='a'\n1 + 1\n````",
        "```{python}\n1 + 1\n```",
        "```{.python .numberLines}\n1 + 1\n```",
        "~~~python\n1 + 1\n~~~",
        "```python\n1 + 1",
        "```1 + 1```",
        "```python 1 + 1```",
        "`1 + 1`",
    ],
)
def test_fences_of_python(fenced: str) -> None:
    assert without_fence(fenced) == "1 + 1"


@pytest.mark.parametrize(
    "code",
    [
        "1 + 1",
        "~~~x",
        "~~~x\n1",
        "x = '```'",
        "```bash\nls\n```",
        "%%writefile a.md\n```python\n1\n```",
        '"""\n```\n"""',
        "`",
        "",
        7,
    ],
)
def test_code_without_a_fence_of_python_stays(code: object) -> None:
    assert without_fence(code) is code


R = frozenset({"r", "ir"})


@pytest.mark.parametrize("fenced", ["```r\n1 + 1\n```", "```{r, echo=FALSE}\n1 + 1\n```"])
def test_fences_of_another_language_are_those_of_its_sessions(fenced: str) -> None:
    assert without_fence(fenced, R) == "1 + 1"
    assert without_fence(fenced) is fenced


@pytest.mark.parametrize("code", ["```python\n1\n```", "`my column`"])
def test_code_of_another_language_keeps_what_means_something_there(code: str) -> None:
    assert without_fence(code, R) is code


def test_a_version_may_be_a_number() -> None:
    versions = TypeAdapter(PythonArg)
    assert [versions.validate_python(each) for each in (3.12, 3.1, 3.10, 3, "3.9")] == [
        "3.12",
        "3.10",
        "3.10",
        "3",
        "3.9",
    ]


async def test_the_default_session_has_a_name_and_versions_are_told_as_they_were_meant(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        for version in (3.5, 2):
            calls: list[tuple[str, dict[str, Any]]] = [
                ("create_session", {}),
                ("run_script", {"script": "1"}),
            ]
            for tool, code in calls:
                refused = await server.agent.refused(tool, python=version, **code)
                assert f"python='{version}': pass a version" in refused
        await server.call("execute", code="say 1")
        answer = await server.call("execute", code="say 2", session="default")
        assert answer.cell["session"] == server.session.handle
        assert len(server.manager.sessions) == 1
        assert "is your default session" in await server.agent.refused(
            "create_session", name="default"
        )
        read = await server.call("read_file", path="kernel://default/cells/2")
        assert read.text.startswith("2")


async def test_a_tool_that_is_not_there_is_an_error_that_names_those_that_are(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        text = await server.agent.refused("read", path="a")
        assert text.startswith("There is no tool 'read'; did you mean read_file? There are execute")
        assert "run_script" in await server.agent.refused("[kernel-mcp] x")


async def test_schemas_have_no_ornament(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        for tool in (await server.agent.client.list_tools()).tools:
            assert tool.output_schema is None, tool.name
            for each in _schemas(tool.input_schema):
                assert not isinstance(each.get("title"), str), tool.name
                assert each.get("default", "given"), tool.name
                assert "additionalProperties" not in each, tool.name
            assert "pydantic" not in json.dumps(tool.model_dump(mode="json"))


def test_the_nearest_name_is_one_that_could_be_meant() -> None:
    known = ["code", "session", "timeout", "wait"]
    assert nearest("sessionId", known) == "session"
    assert nearest("time_out", known) == "timeout"
    assert nearest("max-wait", known) == "wait"
    assert nearest("sesion", known) == "session"
    assert nearest("x", known) == nearest("", known) == nearest("language", known) == ""


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema:  # type: ignore[attr-defined]
        if isinstance(each, (dict, list)):
            yield from _schemas(each)


def test_a_share_is_of_processors_or_with_a_unit_of_their_time() -> None:
    for text in (1.5, "1.5", " 1.5 "):
        assert share(text) == Share(cpus=1.5)
    assert share("30s") == Share(seconds=30)
    assert share("500 ms") == Share(seconds=0.5)
    wrong: list[object] = ["", "0", 0, "-1", "x", True, None, "0s", "0.001", math.nan, math.inf, []]
    for given in wrong:
        with pytest.raises(ValueError, match=r"processors such as 1\.5, or a time such as 30s"):
            share(given)
