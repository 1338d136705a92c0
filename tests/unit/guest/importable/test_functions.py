"""Servers as modules and tools as functions, of lists that may be hostile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.guest.importable.gateway import ORDERS, Gateway, tool

Out = Callable[[str], str]


def test_a_server_is_imported_in_every_form(out: Out) -> None:
    said = out(
        "import tools, mcp_tools\n"
        "import tools.crm\n"
        "import mcp_tools.crm as second\n"
        "from tools import crm\n"
        "from tools.crm import list_orders, echo as say\n"
        "print(tools is mcp_tools, tools.crm is crm is second, say(a=1))\n"
        "print(list_orders == crm['list_orders'])\n"
        "try: from tools import nobody\n"
        "except ImportError as error: print(type(error).__name__)\n"
        "try: import tools.nobody\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
        "try: from tools.crm import nothing\n"
        "except ImportError as error: print(type(error).__name__)"
    )
    assert said == "True True {'a': 1}\nTrue\nImportError\ntools.nobody\nImportError\n"


def test_signature_and_help_come_from_the_schema(out: Out) -> None:
    said = out(
        "import inspect, pydoc\n"
        "from tools import crm\n"
        "print(inspect.signature(crm.list_orders))\n"
        "print(pydoc.plain(pydoc.render_doc(crm.list_orders)))\n"
        "for args, given in (((), {}), (('a', 'b'), {}), (('a',), {'x': 1})):\n"
        "    try: crm.list_orders(*args, **given)\n"
        "    except TypeError as error: print(error)"
    )
    shape = "(customer: str, *, limit: int = 20, state: 'open' | 'closed' = None)"
    assert said.startswith(f"{shape}\n")
    assert f"list_orders{shape}\n    Return the orders of a customer.\n    Newest first." in said
    assert "limit: Most orders." in said
    errors = said.splitlines()[-3:]
    assert [each.split(":")[1] for each in errors] == [
        " missing a required argument",
        " too many positional arguments; its signature is crm.list_orders(customer",
        " got an unexpected keyword argument 'x'; its signature is crm.list_orders(customer",
    ]


def test_only_what_was_given_is_sent_under_its_own_name(out: Out, gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"from": {"type": "string"}, "a-b": {}, "a_b": {}, "self": {}, "n": {}},
        "required": ["from", "a-b", "unknown"],
    }
    gateway.servers = [{"name": "s", "tools": [tool("echo", inputSchema=schema)]}]
    said = out(
        "import inspect, tools\n"
        "echo = tools.s.echo\n"
        "print(inspect.signature(echo))\n"
        "print(echo('x', 1), echo(from_='x', a_b=1, a_b_=2, self=3, n=None))"
    )
    assert said.splitlines() == [
        "(from_: str, a_b: Any, *, a_b_: Any = None, self: Any = None, n: Any = None)",
        "{'from': 'x', 'a-b': 1} {'from': 'x', 'a-b': 1, 'a_b': 2, 'self': 3, 'n': None}",
    ]


@pytest.mark.parametrize(
    ("schema", "shape"),
    [
        ({}, "(**more)"),
        ({"properties": {}, "additionalProperties": False}, "()"),
        ({"properties": {}}, "()"),
        ({"properties": {"a": {}}, "additionalProperties": True}, "(*, a: Any = None, **more)"),
        (
            {"properties": {"a": {}, "more": 1}, "required": 3},
            "(*, a: Any = None, more: Any = None)",
        ),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "(*, a: str | None = None)"),
        (
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
            "(*, a: int | None = None)",
        ),
        (
            {
                "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/X"}}},
                "$defs": {"X": {"type": "object"}},
            },
            "(*, a: list[dict] = None)",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
            "(*, a: Any = None)",
        ),
        ({"properties": {str(n): {} for n in range(101)}}, "(**more)"),
        ([], "(**more)"),
    ],
)
def test_a_schema_of_any_form_makes_a_signature(
    schema: Any, shape: str, out: Out, gateway: Gateway
) -> None:
    gateway.servers = [{"name": "s", "tools": [tool("echo", inputSchema=schema)]}]
    said = out("import inspect, tools\nprint(inspect.signature(tools.s.echo))\nhelp(tools.s.echo)")
    assert said.splitlines()[0] == shape


def test_more_arguments_are_sent_where_a_schema_permits_them(out: Out) -> None:
    assert out("import tools\nprint(tools.crm.echo(a=1, more=2))") == "{'a': 1, 'more': 2}\n"


def test_names_that_are_no_identifiers_become_ones(out: Out, gateway: Gateway) -> None:
    names = ["get-it", "get_it", "3d", "class", "a b/c", "__class__", "\u202ename", "ﬁle"]
    gateway.servers = [{"name": "my-server", "tools": [tool("echo"), *map(tool, names)]}]
    said = out(
        "import tools\n"
        "s = tools.my_server\n"
        "print(s is tools.servers()['my-server'], dir(s))\n"
        "print(s.get_it._name, s['get-it']._name, s.class_._name, s.a_b_c._name, s.file)\n"
        "print(type(s).__name__, s['__class__'], s['3d'])"
    )
    assert said.splitlines() == [
        "True ['_3d', '___class__', '_name', 'a_b_c', 'class_', 'echo', 'file', 'get_it']".replace(
            "'___class__'", "'__class__'"
        ),
        "get_it get-it class a b/c <tool my_server.file>",
        "Server <tool my_server.__class__> <tool my_server._3d>",
    ]


def test_hostile_texts_are_escaped_and_cut(out: Out, gateway: Gateway) -> None:
    bad = "\x1b[2J\u202e\x00" + "x" * 10_000
    schema = {"properties": {"a": {"description": bad, "default": bad, "enum": [bad]}}}
    described = tool("t", description=bad, inputSchema=schema, outputSchema={"title": bad})
    gateway.servers = [{"name": "s", "description": bad, "tools": [described]}]
    said = out(
        "import inspect, pydoc, tools\n"
        "print(tools.servers(), tools.search('t'), inspect.signature(tools.s.t))\n"
        "print(pydoc.plain(pydoc.render_doc(tools.s.t)), tools.s.__doc__)"
    )
    assert all(each.isprintable() or each == "\n" for each in said)
    assert "\\x1b[2J\\u202e\\x00xxx" in said
    assert len(said) < 20_000


def test_search_names_the_best_first_and_no_more_than_twenty(out: Out, gateway: Gateway) -> None:
    many = [tool(f"order_{n:02}") for n in range(30)]
    gateway.servers = [{"name": "crm", "tools": [*many, ORDERS, tool("by", description="order")]}]
    said = out(
        "import tools\n"
        "found = tools.search('list order')\n"
        "print(len(found), list(found)[0], list(found)[-1], found['…'])\n"
        "print(tools.search('nothing'), len(tools.search('')))"
    )
    assert said == "21 crm.list_orders … 11 more: add words to the search\n{} 21\n"


def test_a_tool_that_came_later_is_found(out: Out, gateway: Gateway) -> None:
    gateway.answers["answer"] = lambda given: (
        gateway.servers.__setitem__(0, {"name": "crm", "tools": [tool("echo")]})
        or {"result": {"content": []}},
        (),
    )
    gateway.servers = [{"name": "crm", "tools": [tool("answer")]}]
    said = out(
        "from tools import crm\n"
        "try: crm.echo\n"
        "except AttributeError as error: print(error)\n"
        "print(crm.answer(), crm.echo(a=1), hasattr(crm, 'answer'))"
    )
    assert said == "crm has no tool 'echo'; it has answer\nNone {'a': 1} False\n"


def test_a_server_that_is_not_available_says_why(out: Out) -> None:
    said = out(
        "from tools import git_hub\n"
        "import tools\n"
        "print(git_hub)\n"
        "try: git_hub.issues\n"
        "except tools.ToolUnavailable as error: print(error)"
    )
    assert said == "<git-hub: it has not started>\ngit-hub: it has not started\n"


def test_functions_are_saved_and_loaded_without_the_gateway(out: Out, gateway: Gateway) -> None:
    said = out("import pickle, tools\nprint(pickle.dumps((tools.crm, tools.crm.echo)).hex())")
    while not gateway.events.empty():
        gateway.events.get()
    said = out(
        f"import pickle\n"
        f"crm, echo = pickle.loads(bytes.fromhex('{said.strip()}'))\n"
        "print(echo, echo.__name__)\n"
        "print(echo(a=1), crm.echo == echo)"
    )
    assert said == "<tool crm.echo> echo\n{'a': 1} True\n"
    assert [gateway.events.get()[0] for _ in range(2)] == ["list", "call"]


def test_parts_of_the_module_hide_no_server(out: Out, gateway: Gateway) -> None:
    gateway.servers = [{"name": name, "tools": [tool("echo")]} for name in ("values", "calls")]
    said = out("from tools import values, calls\nprint(values.echo(a=1), calls.echo(a=2))")
    assert said == "{'a': 1} {'a': 2}\n"


def test_a_server_that_is_still_starting_is_waited_for_where_it_is_used(
    out: Out, gateway: Gateway
) -> None:
    gateway.servers = [
        {"name": "crm", "tools": [tool("echo")]},
        {"name": "late", "error": "it is still starting", "tools": [], "then": [tool("get-it")]},
    ]
    said = out("from tools import crm, late\nprint(crm.echo(a=1), repr(late), late.get_it._name)")
    assert said == "{'a': 1} <late: it is still starting> get-it\n"
    requests = [gateway.events.get() for _ in range(3)]
    assert [(op, request.get("server")) for op, request in requests] == [
        *(("list", ""), ("call", "crm"), ("list", "late"))
    ]
