"""Places of values in JSON text, and changes that leave the rest of it as it is."""

from __future__ import annotations

import json

import pytest

from kernel_mcp.notebooks import jsontext
from kernel_mcp.output.markup import NotJson

OBJECT = '{ "a": 1.50e3 ,\n "b":[1, {"c":2}],"d" : "x\\u00e9" }'


def test_members_are_found_with_their_text() -> None:
    found, end = jsontext.members(OBJECT)
    assert [OBJECT[each.start : each.end] for each in found] == [
        "1.50e3",
        '[1, {"c":2}]',
        '"x\\u00e9"',
    ]
    assert [each.name for each in found] == ["a", "b", "d"]
    assert end == len(OBJECT)


def test_elements_are_found_with_their_text() -> None:
    text = 'x[ 1 , [2,3] ,{"a":4}]y'
    found, end = jsontext.elements(text, 1)
    assert [text[each.start : each.end] for each in found] == ["1", "[2,3]", '{"a":4}']
    assert text[end:] == "y"
    assert jsontext.elements("[ ]", 0) == ([], 3)


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({"a": "7"}, '{ "a": 7 ,\n "b":[1, {"c":2}],"d" : "x\\u00e9" }'),
        ({"d": "[]", "b": "{}"}, '{ "a": 1.50e3 ,\n "b":{},"d" : [] }'),
        ({}, OBJECT),
        ({"e": "5"}, '{ "e": 5, "a": 1.50e3 ,\n "b":[1, {"c":2}],"d" : "x\\u00e9" }'),
    ],
)
def test_a_change_leaves_all_other_bytes(values: dict[str, str], changed: str) -> None:
    assert jsontext.changed(OBJECT, values) == changed
    json.loads(changed)


def test_an_object_without_members_gets_some() -> None:
    assert json.loads(jsontext.changed("{}", {"a": "1", "b": "2"})) == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a"}', '{"a":1', '{"a":1,}', "{1:2}", '{"a":x}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(NotJson):
        jsontext.members(text)


def test_what_would_take_too_much_to_parse_is_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jsontext, "MOST_VALUES", 100)
    jsontext.bounded(json.dumps(list(range(90))))
    with pytest.raises(NotJson, match="more than 100 values"):
        jsontext.bounded(json.dumps(list(range(200))))
    monkeypatch.setattr(jsontext, "MOST_LEVELS", 50)
    with pytest.raises(NotJson, match="more than 50 levels deep"):
        jsontext.bounded("[" * 51)


@pytest.mark.parametrize("text", ["", "a", "a\n", "a\nb", "\n\n", "a\r\nb"])
def test_lines_are_joined_to_what_they_were(text: str) -> None:
    assert jsontext.joined(jsontext.lines(text)) == text


def test_names_become_unlike_those_that_are_taken() -> None:
    assert jsontext.unlike("a", ["b"]) == "a"
    assert jsontext.unlike("a", ["a", "a-2"]) == "a-3"
