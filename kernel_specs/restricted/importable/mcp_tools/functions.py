"""Servers as modules and their tools as functions, made from what the gateway lists.

Names, descriptions and schemas are hostile texts: they are shown escaped and cut, never evaluated.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import json
import keyword
import sys
import types
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mcp_tools.calls import Gateway
from mcp_tools.values import TEXT_CHARS, ToolUnavailable, error_of, shown, value_of

MOST_PARAMETERS = 100
"""Properties of a schema beyond which a tool takes any keyword."""
MOST_FOUND = 20
MOST_LISTED = 100
LINE_CHARS = 200
FOUND_CHARS = 120
"""Longest description of a tool that a search has found."""
SCHEMA_CHARS = 2000
DEPTH = 4
"""Depth to which types in a schema are shown."""
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_POLICY = {
    "asks": "The person is asked before each call.",
    "refused": "The operator does not permit calls of this tool.",
}
gateway = Gateway()


def note_progress(progress: Any) -> None:
    """Call the function that code has set as `tools.on_progress`, if any."""
    hook = sys.modules["mcp_tools"].on_progress
    if hook is not None and isinstance(progress, dict):
        hook(progress.get("progress"), progress.get("total"), str(progress.get("message") or ""))


def read(server: str, uri: str) -> Any:
    """Return the content of a resource of a server. Raises ToolError."""
    request = {"op": "read", "server": server, "uri": uri}
    return value_of(gateway.call(request, note_progress), server)


class Directory:
    """The list of servers and their tools, which the gateway sends when it is needed first."""

    def __init__(self) -> None:
        self._about: dict[str, Mapping[str, Any]] | None = None
        self._made: dict[str, Server] = {}

    def listed(self, *, again: bool = False, of: str = "") -> dict[str, Mapping[str, Any]]:
        """Return what is known of each server; wait until the server `of` has started.

        Raises ToolError.
        """
        if self._about is None or again:
            header, _ = gateway.call({"op": "list", "server": of}, note_progress)
            if "error" in header:
                raise error_of(header["error"])
            self._about = {str(each["name"]): each for each in header["servers"]}
        return self._about

    def servers(self) -> dict[str, Server]:
        """Return all servers by name. Raises ToolError."""
        return {name: self.server(name) for name in self.listed()}

    def server(self, name: str) -> Server:
        """Return the server of a name, whether it is listed or not."""
        return self._made.setdefault(name, Server(name))

    def find(self, name: str) -> Server | None:
        """Return the server with this identifier. Raises ToolError."""
        for again in (False, True):
            if (own := identifiers(self.listed(again=again)).get(name)) is not None:
                return self.server(own)
        return None


directory = Directory()


class Server(types.ModuleType):
    """A server of tools: `server.tool`, or `server["tool"]` for any name."""

    def __init__(self, name: str) -> None:
        super().__init__(identifier(name))
        self._name = name

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return its description, and its tools."""
        lines = [f"{name}: {self[tool].line}" for name, tool in self._tools().items()]
        first = shown(self._about().get("description") or "", TEXT_CHARS)
        return "\n".join([first or repr(self), "", *lines[:MOST_LISTED]])

    def _about(self, *, again: bool = False) -> Mapping[str, Any]:
        missing = {"error": "the operator's list does not have it"}
        return directory.listed(again=again, of=self._name).get(self._name, missing)

    def _tools(self, *, again: bool = False) -> dict[str, str]:
        """Return the names of its tools by identifier. Raises ToolError."""
        listed = self._about(again=again).get("tools") or []
        return identifiers([str(each["name"]) for each in listed])

    def __getitem__(self, name: str) -> Tool:
        for again in (False, True):  # it may have come since
            for each in self._about(again=again).get("tools") or []:
                if each["name"] == name:
                    return Tool(self._name, name, each)
        raise KeyError(self._lacks(name))

    def __getattr__(self, name: str) -> Tool:
        if name.startswith("_"):
            raise AttributeError(name)
        for again in (False, True):
            if (own := self._tools(again=again).get(name)) is not None:
                return self[own]
        raise AttributeError(self._lacks(name))

    def _lacks(self, name: str) -> str:
        """Return the words for a tool that is missing. Raises ToolUnavailable if all are."""
        if not self._tools():
            raise ToolUnavailable(repr(self)[1:-1])
        known = shown(", ".join(self._tools()), TEXT_CHARS)
        return f"{shown(self._name, LINE_CHARS)} has no tool {name!r}; it has {known}"

    def __dir__(self) -> list[str]:
        return list(self._tools())

    def __reduce__(self) -> Any:
        return server_named, (self._name,)

    def __repr__(self) -> str:
        about, name = self._about(), shown(self._name, LINE_CHARS)
        error, tools = shown(about.get("error") or "", TEXT_CHARS), about.get("tools") or ()
        if len(error) > 2 * LINE_CHARS:
            error = f"{error[:LINE_CHARS]} … {error[-LINE_CHARS:]}"  # its end is what it wrote last
        if error and not tools:
            return f"<{name}: {error}>"
        first = shown(about.get("description") or "", LINE_CHARS).partition("\n")[0]
        return f"<{name}: {len(tools)} tools. {first}{error}>"


def server_named(name: str) -> Server:
    """Return a server by its name, for `pickle`; the gateway is not asked for that."""
    return directory.server(name)


class Tool:
    """A tool as a function. It is fetched when it is used, so that it can be saved and loaded."""

    def __init__(self, server: str, name: str, about: Mapping[str, Any] | None = None) -> None:
        self._server, self._name, self._known = server, name, about
        self.__name__ = identifier(name)
        self.__qualname__ = f"{identifier(server)}.{self.__name__}"
        self.__module__ = "mcp_tools"

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        return self  # a routine, as help() and inspect call what they show with a signature

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the tool; return its value. Raises TypeError, ToolError."""
        request = self._request(args, kwargs)
        return value_of(gateway.call(request, note_progress), self._server)

    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the tool while the event loop goes on. Cancelling cancels the call."""
        request = self._request(args, kwargs)
        return value_of(await gateway.call_async(request, note_progress), self._server)

    @property
    def _about(self) -> Mapping[str, Any]:
        if self._known is None:
            self._known = directory.server(self._server)[self._name]._about
        return self._known

    @property
    def line(self) -> str:
        """Its description in a line."""
        words = str(self._about.get("description") or self._about.get("title") or "")
        return shown(words.strip().partition("\n")[0], LINE_CHARS)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self._about)[0]

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return its description, its parameters, and the schema of what it returns."""
        return described(self._about)

    def _request(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        signature, names = signature_of(self._about)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            name = shown(self.__qualname__, LINE_CHARS)
            raise TypeError(f"{name}: {error}; its signature is {name}{signature}") from None
        more = given.pop("more", {}) if "more" not in names else {}
        arguments = {names[each]: value for each, value in given.items()} | more
        return {"op": "call", "server": self._server, "tool": self._name, "arguments": arguments}

    def __reduce__(self) -> Any:
        return Tool, (self._server, self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tool) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self._server, self._name))

    def __repr__(self) -> str:
        return f"<tool {shown(self.__qualname__, LINE_CHARS)}>"


def identifier(name: str) -> str:
    """Return a name as one of Python, other characters replaced by `_`."""
    plain = unicodedata.normalize("NFKC", name)[:LINE_CHARS]
    made = "".join(each if f"_{each}".isidentifier() else "_" for each in plain)
    made = made if made[:1].isidentifier() else f"_{made}"
    return f"{made}_" if keyword.iskeyword(made) else made


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return names by identifier; of names with the same one, the one that is it, or the first."""
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda each: each != identifier(each)):
        found.setdefault(identifier(name), name)
    return found


class _Kind:
    """A type in a signature, in words of Python."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __repr__(self) -> str:
        return self._words


def signature_of(about: Mapping[str, Any]) -> tuple[inspect.Signature, dict[str, str]]:
    """Return the signature of a tool, and the names of its arguments by those of parameters.

    Required ones come first, the others by keyword alone. A tool that takes further arguments, or
    whose schema is of no use, takes any keyword.
    """
    schema = about.get("inputSchema")
    schema = schema if isinstance(schema, dict) else {}
    properties = _properties(schema)
    required = [each for each in _strings(schema.get("required")) if each in properties]
    order = dict.fromkeys([*required, *properties])
    kinds = inspect.Parameter
    parameters: list[inspect.Parameter] = []
    names: dict[str, str] = {}
    for name in order:
        own = identifier(name)
        while own in names:
            own += "_"
        names[own] = name
        needed = name in required
        default = kinds.empty if needed else properties[name].get("default", None)
        parameters.append(
            kinds(
                own,
                kinds.POSITIONAL_OR_KEYWORD if needed else kinds.KEYWORD_ONLY,
                default=default if needed else _Kind(shown(repr(default), 60)),
                annotation=_Kind(kind_of(properties[name], schema)),
            )
        )
    listed = schema.get("properties")
    unknown = not isinstance(listed, dict) or len(properties) < len(listed)
    further = schema.get("additionalProperties", unknown)
    if further is not False and "more" not in names:
        parameters.append(kinds("more", kinds.VAR_KEYWORD))
    return inspect.Signature(parameters), names


def _properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = schema.get("properties")
    if not isinstance(found, dict) or len(found) > MOST_PARAMETERS:
        return {}
    return {name: each if isinstance(each, dict) else {} for name, each in found.items()}


def _strings(values: Any) -> list[str]:
    return [each for each in values if isinstance(each, str)] if isinstance(values, list) else []


def kind_of(schema: Any, whole: Mapping[str, Any], depth: int = DEPTH) -> str:
    """Return the type that a schema describes, as Python writes it; references are in `whole`."""
    if not isinstance(schema, dict) or not depth:
        return "Any"
    if isinstance(reference := schema.get("$ref"), str):
        defined = whole.get("$defs")
        name = reference.rpartition("/")[2]
        found = defined.get(name) if isinstance(defined, dict) else None
        return kind_of(found, whole, depth - 1)
    if isinstance(values := schema.get("enum"), list):
        return shown(" | ".join(map(repr, values[:MOST_FOUND])), LINE_CHARS)
    for name in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(name), list):
            kinds = [kind_of(each, whole, depth - 1) for each in several[:MOST_FOUND]]
            return " | ".join(dict.fromkeys(kinds))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_TYPES.get(str(each), shown(each, 20)) for each in kind[:MOST_FOUND])
    if kind == "array":
        return f"list[{kind_of(schema.get('items'), whole, depth - 1)}]"
    return "dict" if kind == "object" else _TYPES.get(str(kind), "Any")


def described(about: Mapping[str, Any]) -> str:
    """Return the text that help() shows for a tool."""
    schema = about.get("inputSchema")
    properties = _properties(schema) if isinstance(schema, dict) else {}
    lines = [shown(about.get("description") or about.get("title") or "", TEXT_CHARS), ""]
    for name, each in properties.items():
        if text := each.get("description"):
            lines.append(f"{identifier(name)}: {shown(text, 500)}")
    if output := about.get("outputSchema"):
        lines += ["", f"Returns, as a JSON schema: {shown(json.dumps(output), SCHEMA_CHARS)}"]
    if words := _POLICY.get(about.get("policy", "")):
        lines += ["", words]
    return "\n".join(lines)


def search(query: str) -> dict[str, str]:
    """Return signature and description of the tools that fit best to the words of `query`.

    At most 20, and none that is half as fit as the best: of names, words count more than of
    descriptions. Raises ToolError.
    """
    words = query.casefold().split()
    found: list[tuple[int, str, str]] = []
    for server in directory.servers().values():
        for tool in map(server.__getitem__, server._tools().values()):
            name, text = tool.__qualname__.casefold(), (tool.__doc__ or "").casefold()
            score = sum(3 * (word in name) + (word in text) for word in words)
            if score or not words:
                shape = shown(tool.__signature__, LINE_CHARS)
                found.append(
                    (-score, tool.__qualname__, f"{shape} {shown(tool.line, FOUND_CHARS)}")
                )
    found.sort()
    found = [each for each in found if 2 * each[0] <= found[0][0]]
    listed = {name: line for _, name, line in found[:MOST_FOUND]}
    if len(found) > MOST_FOUND:
        listed["…"] = f"{len(found) - MOST_FOUND} more: add words to the search"
    return listed


class ServerFinder:
    """Finds `tools.NAME`, which is a server and no file."""

    @staticmethod
    def find_spec(
        name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a server as a module, None for all other modules."""
        package, _, own = name.rpartition(".")
        if package not in ("tools", "mcp_tools") or directory.find(own) is None:
            return None
        return importlib.machinery.ModuleSpec(name, ServerFinder)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> Server | None:
        """Return the server."""
        return directory.find(spec.name.rpartition(".")[2])

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Do nothing: a server is complete."""
