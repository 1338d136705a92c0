"""Values of calls for each kind of content, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.guest.importable.gateway import PIXEL, Gateway

Out = Callable[[str], str]
TEXT = {"type": "text", "text": '{"a": 1}'}
LINK = {"type": "resource_link", "uri": "crm://1", "name": "one", "mimeType": "text/plain"}
RESOURCE = {"type": "resource", "resource": {"uri": "crm://2", "text": "two"}}
BLOB = {"type": "resource", "resource": {"uri": "crm://3", "blob": {"blob": 0}, "mimeType": "x/y"}}
IMAGE = {"type": "image", "data": {"blob": 0}, "mimeType": "image/png"}
AUDIO = {"type": "audio", "data": {"blob": 0}, "mimeType": "audio/wav"}


@pytest.fixture
def answered(out: Out, gateway: Gateway) -> Callable[..., str]:
    """Returns what code prints of `value`, the value of a call with this answer."""

    def run(header: dict[str, Any], code: str, *blobs: bytes) -> str:
        given = json.dumps({"header": header, "blobs": [list(each) for each in blobs]})
        return out(f"import tools, json\nvalue = tools.crm.answer(**json.loads({given!r}))\n{code}")

    return run


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"structured": {"result": [1]}, "content": [TEXT]}, "[1]"),
        ({"structured": {"result": 1, "more": 2}, "content": []}, "{'result': 1, 'more': 2}"),
        ({"structured": None, "content": []}, "None"),
        ({"content": [TEXT]}, "'{\"a\": 1}'"),
        ({"content": [TEXT, RESOURCE]}, "['{\"a\": 1}', 'two']"),
        ({"content": [{"type": "text", "text": {"blob": 1}}]}, "'long'"),
        ({"content": [LINK]}, "<link to crm://1>"),
        ({"content": [IMAGE]}, "<image/png, 70 bytes>"),
        ({"content": [AUDIO, BLOB]}, "[<audio/wav, 70 bytes>, <x/y, 70 bytes>]"),
        ({"structured": {"content": TEXT["text"]}, "content": [TEXT]}, "'{\"a\": 1}'"),
        ({"structured": {"content": [IMAGE]}, "content": [IMAGE]}, "<image/png, 70 bytes>"),
        ({"structured": {"content": "x"}, "content": [TEXT]}, "{'content': 'x'}"),
        ({"structured": {"a": 1}, "content": [TEXT, IMAGE]}, "[{'a': 1}, <image/png, 70 bytes>]"),
    ],
)
def test_the_value_of_a_call(result: Any, shown: str, answered: Callable[..., str]) -> None:
    assert answered({"result": result}, "print(repr(value))", PIXEL, b"long") == f"{shown}\n"


def test_a_large_value_lies_in_a_blob(answered: Callable[..., str]) -> None:
    header = {"result": {"content": []}, "structured_blob": 0}
    assert answered(header, "print(len(value['a']))", b'{"a": [1, 2]}') == "2\n"


def test_texts_are_strings_with_json_and_links_are_read(answered: Callable[..., str]) -> None:
    code = (
        "text, link, two = value\n"
        "print(text.json(), isinstance(text, str), link.read(), link.name, link.mime, two.uri)\n"
        "import pickle\n"
        "print(pickle.loads(pickle.dumps(text)).json(), pickle.loads(pickle.dumps(two)).uri)"
    )
    said = answered({"result": {"content": [TEXT, LINK, RESOURCE]}}, code)
    assert said == "{'a': 1} True read one text/plain crm://2\n{'a': 1} crm://2\n"


def test_an_image_is_one_of_pillow_and_shown_in_notebooks(answered: Callable[..., str]) -> None:
    code = (
        "print(value, value.pil().size, list(value._repr_mimebundle_()), value[:4], value.mime)\n"
        "value.mime = 'image/svg+xml'\n"
        "print(value._repr_mimebundle_())"
    )
    said = answered({"result": {"content": [IMAGE]}}, code, PIXEL)
    assert (
        said
        == "<image/png, 70 bytes> (1, 1) ['image/png', 'text/plain'] b'\\x89PNG' image/png\nNone\n"
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("tool", "ToolError"), ("refused", "ToolRefused"), ("timeout", "ToolTimeout")),
        *(("unavailable", "ToolUnavailable"), ("another", "ToolError")),
    ],
)
def test_an_error_is_raised_with_its_text_escaped(
    kind: str, name: str, out: Out, gateway: Gateway
) -> None:
    error = {"error": {"kind": kind, "text": "no \x1b[2J" + "x" * 9000}}
    gateway.answers["answer"] = lambda _: (error, ())
    said = out(
        "import pickle, tools\n"
        "try: tools.crm.answer()\n"
        "except tools.ToolError as error:\n"
        "    print(type(error), str(error)[:14], len(str(error)), error.__context__)\n"
        "    print(repr(pickle.loads(pickle.dumps(error)))[:20])"
    )
    assert said.startswith(f"<class 'mcp_tools.{name}'> no \\x1b[2Jxxxx 4004 None\n{name}")
