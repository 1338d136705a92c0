"""Writes the generated parts of docs/: flags, tools with their fields, resources, test results.

`make reference` runs it. It also writes the schemas of the arguments of tools. A generated part
stands between two comments; the text around it is written by hand and stays.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import anyio
from mcp_types import CallToolResult, ResourceTemplate
from mcp_types import Tool as Definition

from kernel_mcp.config.options import Option
from kernel_mcp.config.settings import OPTIONS
from kernel_mcp.telemetry import Meters
from kernel_mcp.tools import SCHEMAS, Toolbox
from kernel_mcp.tools.arguments import CheckedTool
from kernel_mcp.tools.topics import register
from tests import proof
from tests.unit.tools.served import Served, served

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"flags": "flags.md", "tools": "tools.md", "resources": "tools.md", "proof": "proof.md"}
"""The page of each generated part."""

Schema = Mapping[str, Any]


def with_part(page: str, name: str, text: str) -> str:
    """Return `page` with `text` as its part of this name. Raises ValueError if it has none."""
    part = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
    replaced, found = part.subn(lambda _: text, page)
    if found != 1:
        raise ValueError(f"expected one part {name!r}, found {found}")
    return replaced


def flags() -> str:
    """Return a table of flags for each group of `--help`."""
    return "".join(
        f"## {group}\n\n| flag | default | |\n|---|---|---|\n{''.join(map(_flag, options))}\n"
        for group, options in groupby(OPTIONS, lambda option: option.group)
    )


def _flag(option: Option) -> str:
    flag = f"{option.flag} {option.metavar}".strip().replace("|", r"\|")
    default = option.default if option.in_words else f"`{option.default}`"
    return f"| `{flag}` | {default} | {option.help} |\n"


async def definitions() -> tuple[list[Definition], dict[str, Schema], list[ResourceTemplate]]:
    """Return the tools and resource templates that a client of the default server is shown.

    Between them are the schemas of structured results by tool, which no client is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder)) as server:
            client = server.agent.client
            tools = (await client.list_tools()).tools
            results = {name: _result(each.fn) for name, each in checked(server).items()}
            return tools, results, (await client.list_resource_templates()).resource_templates


def checked(server: Served) -> dict[str, CheckedTool]:
    """Return what checks the arguments of each tool."""
    box = Toolbox(server.manager, Meters(), server.services.settings)
    register(box, server.services)
    return {each.definition.name: each.checked() for each in box.tools}


async def schemas() -> str:
    """Return the file with the schemas of arguments, a line for each tool."""
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder)) as server:
            found = checked(server).items()
    rows = (f"{json.dumps(name)}: {json.dumps(each.parameters)}" for name, each in found)
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _result(function: Callable[..., Any]) -> Schema:
    """Return the schema of the model that a tool returns; empty for content alone."""
    returned = get_type_hints(function, include_extras=True)["return"]
    model = get_args(returned)[-1] if get_origin(returned) is Annotated else returned
    return {} if model is CallToolResult else model.model_json_schema()


def tool(definition: Definition, result: Schema) -> str:
    """Return the section of a tool: its description, arguments and result."""
    parts = [f"### {definition.name}\n", f"{definition.description}\n", _hints(definition)]
    rows = list(_arguments(definition.input_schema))
    if rows:
        head = ["| argument | type | default | |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows]) + "\n")
    if result:
        head = ["| result | type | |", "|---|---|---|"]
        found = _fields(result, result.get("$defs", {}))
        parts.append("\n".join([*head, *found]) + "\n")
    return "\n".join(parts) + "\n"


def _hints(definition: Definition) -> str:
    annotations = definition.annotations
    assert annotations is not None
    hints = [
        ("readOnlyHint", annotations.read_only_hint),
        ("destructiveHint", annotations.destructive_hint),
        ("idempotentHint", annotations.idempotent_hint),
        ("openWorldHint", annotations.open_world_hint),
    ]
    names = ", ".join(f"`{name}`" for name, value in hints if value)
    return f"Hints: {names or 'none'}.\n"


def _arguments(schema: Schema) -> Iterator[str]:
    required = schema.get("required", ())
    for name, each in schema["properties"].items():
        default = f"`{each['default']}`" if each.get("default") not in (None, "") else ""
        default = "required" if name in required else default
        yield f"| `{name}` | {_type(each)} | {default} | {each.get('description', '')} |"


def _fields(schema: Schema, models: Schema, path: str = "") -> Iterator[str]:
    for name, each in schema["properties"].items():
        if name == "notices":  # the same in all: the page says it once
            continue
        yield f"| `{path}{name}` | {_type(each)} | {each.get('description', '')} |"
        item = each.get("items", each)
        if isinstance(item, dict) and "$ref" in item:
            below = f"{path}{name}[]." if item is not each else f"{path}{name}."
            yield from _fields(models[item["$ref"].rpartition("/")[2]], models, below)


def _type(schema: Schema) -> str:
    """Return the type of a value in words: `list of string`, `integer or null`."""
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}s"
    return str(schema.get("type", "object"))


def resources(templates: list[ResourceTemplate]) -> str:
    """Return the table of resource templates."""
    rows = "".join(f"| `{each.uri_template}` | {each.description} |\n" for each in templates)
    return f"| address | |\n|---|---|\n{rows}"


async def parts() -> dict[str, str]:
    """Return the text of every generated part by its name."""
    tools, results, templates = await definitions()
    return {
        "flags": flags(),
        "tools": "".join(tool(each, results[each.name]) for each in tools),
        "resources": resources(templates),
        "proof": proof.tables(proof.loaded()),
    }


def write() -> None:
    """Write all generated parts."""
    SCHEMAS.write_text(anyio.run(schemas), "utf-8")
    for name, text in anyio.run(parts).items():
        page = DOCS / PAGES[name]
        page.write_text(with_part(page.read_text("utf-8"), name, text), "utf-8")


if __name__ == "__main__":
    write()
