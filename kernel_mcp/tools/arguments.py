"""Arguments of tools: short schemas, and an error with one line for each wrong argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from kernel_mcp.config.values import close_to
from kernel_mcp.errors import InputError
from kernel_mcp.kernels.interpreter import PYTHON, Interpreter
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.tools.calls import Call
from kernel_mcp.tools.results import refusal
from kernel_mcp.units import duration, number

MOST_LINES = 4
SHOWN_CHARS = 60
LEAST_CPUS = 0.01
"""Smallest processor share of a control group: a millisecond in every tenth of a second."""
NEAR = 0.6
"""Least similarity of an unknown name and the one that was perhaps meant."""
_ANY_TEXT = ("code", "content", "match", "path", "script", "source")
"""Arguments in which a blank or the words of `_NOTHING` can be meant."""
_NOTHING = ("", "None", "null")
_FENCES = ("```", "~~~")
_SPELLINGS = (
    frozenset({"py", "py3", "python", "python3", "ipython", "ipython3", "jupyter"}),
    frozenset({"bash", "sh", "shell", "zsh"}),
    frozenset({"typescript", "ts", "javascript", "js"}),
)
"""Names of one language in Markdown code blocks."""
_QUOTING = frozenset({"python"})
"""Languages in which no code begins and ends with a backtick."""

_ALSO = {
    "code": ("source", "script"),
    "content": ("text", "data", "body"),
    "cpu": ("core", "processor"),
    "dependencies": ("package", "requirement", "librar"),
    "name": ("session", "title"),
    "network": ("host", "domain", "internet"),
    "packages": ("dependenc", "requirement", "librar", "module"),
    "path": ("file", "folder", "dir", "destination"),
    "script": ("source", "code"),
    "timeout": ("second", "limit"),
    "wait": ("timeout", "second", "duration"),
}
"""Parts of names that other servers use for an argument, by our name of it."""

_TYPES = {
    "string": "a string",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "an object",
}


@dataclass(frozen=True, slots=True)
class Share:
    """Processor limit: the number of processors, or seconds for one cell; 0 where not given."""

    cpus: float = 0.0
    seconds: float = 0.0


def share(given: object) -> Share:
    """Read processors as `number` does, or with a unit a time as `duration`; more than zero."""
    try:
        cpus = number(given)
    except ValueError:
        try:
            return Share(seconds=duration(given))
        except ValueError:
            cpus = 0.0
    if cpus < LEAST_CPUS:
        raise ValueError("expected processors such as 1.5, or a time such as 30s")
    return Share(cpus=cpus)


Finish: TypeAlias = Callable[[CallToolResult, Call, str], CallToolResult]
"""Adds pending notices to an answer; takes the answer, the call, and the session it named."""


class CheckedTool(Tool):
    """A tool that accepts the arguments of its schema and no others.

    `finish` completes the answer about arguments that cannot be used.
    """

    finish: Finish = Field(default=lambda result, _context, _session: result, exclude=True)

    def model_post_init(self, context: Any, /) -> None:
        """Shorten the schema: models read it with every request."""
        super().model_post_init(context)
        self.parameters = plain_schema(self.parameters)

    async def run(
        self, arguments: dict[str, Any], context: Any, convert_result: bool = False
    ) -> Any:
        """Run the tool for a `Call`, and return its answer, or the error about its arguments."""
        arguments = given_only(arguments, self.parameters)
        unknown = [name for name in arguments if name not in self.parameters["properties"]]
        errors: list[ErrorDetails] = []
        try:
            if not unknown:
                return await super().run(arguments, context, convert_result)
            self.fn_metadata.validate_arguments(arguments)
        except UnexpectedToolError:
            raise
        except ValidationError as error:
            errors = error.errors(include_url=False)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            errors = error.__cause__.errors(include_url=False)
        answer = refusal(InputError(complaint(self.name, self.parameters, unknown, errors)))
        named = arguments.get("session")
        return self.finish(answer, context, named if isinstance(named, str) else "")


UNFENCED = "`{}` was a Markdown code block: its fence was taken off"


def unfenced(name: str, code: str, interpreter: Interpreter, response: ResponseContext) -> str:
    """Return the code of an argument without a Markdown fence; if it had one, the answer says so.

    `interpreter` is that which runs it.
    """
    bare = without_fence(code, interpreter.names)
    if bare is not code:
        response.remarks.append(UNFENCED.format(name))
    return str(bare)


def given_only(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without optional ones that are empty, such as null, "" or "None".

    Some clients send all arguments, with these values for those that are not given. An empty list
    stays where the schema accepts lists.
    """
    known, required = schema["properties"], schema.get("required", ())
    return {
        name: value
        for name, value in arguments.items()
        if name not in known or name in required or not _is_empty(name, value, known[name])
    }


def _is_empty(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    if value is None or value in ("", {}):
        return True
    if isinstance(value, str) and name not in _ANY_TEXT:
        return value.strip() in _NOTHING
    accepted = [each.get("type") for each in schema.get("anyOf", [schema])]
    return value == [] and "array" not in accepted


def without_fence(code: Any, languages: Collection[str] = PYTHON.names) -> Any:
    """Return the code inside a Markdown code block of one of `languages`; all else as it is.

    Code that could be run as it is never has such a fence.
    """
    words = {"", *languages}.union(*(each for each in _SPELLINGS if not each.isdisjoint(languages)))
    text = code.strip() if isinstance(code, str) else ""
    fence = next((each for each in _FENCES if text.startswith(each)), "")
    if not fence:
        inline = len(text) > 2 and text[0] == text[-1] == "`" and not _QUOTING.isdisjoint(languages)
        return text[1:-1] if inline and "`" not in text[1:-1] else code
    opening, line_end, inside = text.partition("\n")
    mark = fence[0]
    language = opening.lstrip(mark).strip()
    if not line_end and mark == "`":  # all in one line
        inside = language.rstrip(mark).strip()
        word, _, rest = inside.partition(" ")
        return rest.strip() if rest and word.lower() in words else inside
    named = language.strip("{}").lower().replace("{", " ").replace(",", " ").split()
    if named and named[0].lstrip(".") not in words:
        return code
    body, _, last = inside.rstrip().rpartition("\n")
    if last.strip().startswith(fence) and not last.strip().strip(mark):
        return body
    return inside if mark == "`" else code


def no_such_tool(name: str, known: Sequence[str]) -> InputError:
    """Return the error for a call of an unknown tool, with the name that was perhaps meant."""
    meant = nearest(name, known)
    hint = f"; did you mean {meant}?" if meant else "."
    return InputError(f"There is no tool {_cut(name)!r}{hint} There are {', '.join(known)}.")


def plain_schema(schema: Any) -> Any:
    """Return a JSON schema without titles, and without defaults that are empty."""
    if isinstance(schema, list):
        return [plain_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: plain_schema(value) for key, value in schema.items()}
    if isinstance(found.get("title"), str):
        del found["title"]
    if "default" in found and not found["default"] and not isinstance(found["default"], dict):
        del found["default"]
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name in `known` that was perhaps meant; empty for none."""
    plainly = {_folded(each): each for each in known}
    given = _folded(name[:SHOWN_CHARS])
    for each in plainly:
        if min(len(each), len(given)) > 2 and (each in given or given in each):
            return plainly[each]
    close = close_to(given, plainly, cutoff=NEAR)
    return plainly[close[0]] if close else ""


def _also(name: str, known: Iterable[str]) -> str:
    """Return the argument in `known` that other servers call `name`; empty for none."""
    given = _folded(name[:SHOWN_CHARS])
    found = (each for each in known if any(part in given for part in _ALSO.get(each, ())))
    return next(found, "")


def _folded(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def complaint(
    tool: str, schema: Mapping[str, Any], unknown: Sequence[str], errors: Sequence[ErrorDetails]
) -> str:
    """Return an error text with a line for each wrong argument, which says that nothing was done.

    `unknown` are names that the tool does not have. At most `MOST_LINES` faults are described.
    """
    takes: Mapping[str, Any] = schema["properties"]
    missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
    told = []

    def about(name: str, form: str) -> str:
        words = takes[name].get("description")
        return form.format(words) if words else ""

    for name in unknown[:MOST_LINES]:
        meant = nearest(name, takes) or _also(name, takes) or next(iter(missing), "")
        if meant in missing:
            missing.remove(meant)
        hint = f"; did you mean `{meant}`{about(meant, ' ({})')}?" if meant else "."
        told.append(f"{tool} has no argument `{_cut(name)}`{hint}")
    told += [f"{tool} needs `{name}`{about(name, ': {}')}." for name in missing]
    wrong = {_place(error["loc"]): error for error in errors if error["type"] != "missing"}
    told += [_fault(place, schema, error) for place, error in islice(wrong.items(), MOST_LINES)]
    more = len(unknown) + len(missing) + len(wrong) - MOST_LINES
    told = [*told[:MOST_LINES], *([f"{more} more are wrong."] if more > 0 else [])]
    if unknown:
        told.append(f"It takes {', '.join(takes) or 'none'}.")
    return "\n".join([*told[:-1], f"{told[-1]} Nothing was done."])


def _fault(place: str, schema: Mapping[str, Any], error: ErrorDetails) -> str:
    name = str(error["loc"][0])
    if error["type"] == "value_error":
        return f"`{place}` is {_given(error['input'])}: {error['ctx']['error']}."
    wanted = expected(_inside(schema["properties"][name], error["loc"][1:]))
    return f"`{place}` has to be {wanted}, not {_given(error['input'])}."


def expected(schema: Mapping[str, Any]) -> str:
    """Return in words which values a JSON schema accepts."""
    if "anyOf" in schema:
        return " or ".join(expected(each) for each in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("type") == "array":
        inside = schema.get("items", {}).get("type", "value")
        return f"a list of {inside}s"
    return _TYPES.get(str(schema.get("type")), "something else")


def _inside(schema: Mapping[str, Any], path: Sequence[int | str]) -> Mapping[str, Any]:
    """Return the schema of list items if `path` leads to one, else `schema` itself."""
    if not any(isinstance(step, int) for step in path):
        return schema
    lists = [each for each in schema.get("anyOf", [schema]) if "items" in each]
    return lists[0]["items"] if lists else schema


def _place(path: Sequence[int | str]) -> str:
    """Return the name of an argument or of an item of it, such as `packages[1]`."""
    items = "".join(f"[{each}]" for each in path[1:] if isinstance(each, int))
    return f"{_cut(str(path[0]))}{items}"


def _given(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return f"the number {_cut(str(value))}"
        case str():
            return f"the string {_cut(value)!r}"
        case list():
            return "a list"
        case _:
            return "an object"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"
