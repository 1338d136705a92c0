"""The real server with what the conformance suite looks for by its names.

Started as the server is, by the flags of the server: `python -m tests.clients.conformance.fixture
--http …`. All but these tools, resources and prompts is that of the server.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import wave
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NoReturn

import anyio
import mcp_types as types
from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.request_state import RequestStateSecurity
from mcp.shared.exceptions import MCPError
from PIL import Image
from pydantic import Field

from kernel_mcp import cli, protocol
from kernel_mcp.protocol import Callers
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import resources
from kernel_mcp.tools.answer_pages import Pages
from kernel_mcp.tools.resources import ResourceServer

Ctx = Context[Any, Any]
Answer = types.CallToolResult | types.InputRequiredResult
PAUSE_S = 0.05
HEADER: dict[str, Any] = {"x-mcp-header": "Word"}
OWN = "test_"
"""How the names of added tools begin."""
SCHEMA_TOOL = types.Tool(
    name="json_schema_2020_12_tool",
    description="Tool with JSON Schema 2020-12 features",
    input_schema={
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
)
"""Only listed: the suite looks whether its schema arrives as it is."""


def picture() -> str:
    """A red dot as PNG."""
    file = io.BytesIO()
    Image.new("RGB", (1, 1), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def sound() -> str:
    """A moment of silence as WAV."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(1)
        written.setframerate(8000)
        written.writeframes(b"\x80" * 8)
    return base64.b64encode(file.getvalue()).decode()


def text(said: str) -> types.TextContent:
    return types.TextContent(text=said)


def image() -> types.ImageContent:
    return types.ImageContent(data=picture(), mime_type="image/png")


def embedded(uri: str, said: str, mime: str = "text/plain") -> types.EmbeddedResource:
    found = types.TextResourceContents(uri=uri, mime_type=mime, text=said)
    return types.EmbeddedResource(resource=found)


def result(*content: types.ContentBlock) -> types.CallToolResult:
    return types.CallToolResult(content=list(content))


def form(message: str, **properties: str) -> types.ElicitRequest:
    """A question with fields of these types, all of which have to be answered."""
    fields = {name: {"type": kind} for name, kind in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return types.ElicitRequest(
        params=types.ElicitRequestFormParams(message=message, requested_schema=schema)
    )


def sample(prompt: str, most: int = 100) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=text(prompt))
    return types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(messages=[message], max_tokens=most)
    )


def answered(ctx: Ctx, name: str) -> Any:
    """Return the client's answer to one of the requests, or None."""
    found = (ctx.input_responses or {}).get(name)
    if isinstance(found, types.ElicitResult) and (found.action != "accept" or not found.content):
        return None
    return found


def asked(state: str | None = None, /, **requests: Any) -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests or None, request_state=state)


class FixtureServer(ResourceServer):
    """A server that has tools, resources and prompts of tests besides its own."""

    async def list_tools(self) -> list[types.Tool]:
        return [*await super().list_tools(), SCHEMA_TOOL]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Ctx | None = None
    ) -> types.CallToolResult | types.InputRequiredResult:
        if name.startswith(OWN):
            return await MCPServer.call_tool(self, name, arguments, context)
        return await super().call_tool(name, arguments, context)

    async def get_prompt(self, *args: Any, **kwargs: Any) -> Any:
        return await MCPServer.get_prompt(self, *args, **kwargs)

    async def read_resource(
        self, uri: Any, context: Ctx | None = None
    ) -> Iterable[ReadResourceContents]:
        known = str(uri).startswith(("test://static-", "test://template/"))
        if known:
            found = await MCPServer.read_resource(self, uri, context)
            assert not isinstance(found, types.InputRequiredResult)
            return found
        return await super().read_resource(uri, context)


def add_contents(mcp: MCPServer[Any]) -> None:
    """Tools that return one kind of content each."""

    @mcp.tool(structured_output=False)
    def test_simple_text() -> str:
        """Answers with a text."""
        return "This is a simple text response for testing."

    @mcp.tool(structured_output=False)
    def test_image_content() -> types.CallToolResult:
        """Answers with a picture."""
        return result(image())

    @mcp.tool(structured_output=False)
    def test_audio_content() -> types.CallToolResult:
        """Answers with a sound."""
        return result(types.AudioContent(data=sound(), mime_type="audio/wav"))

    @mcp.tool(structured_output=False)
    def test_embedded_resource() -> types.CallToolResult:
        """Answers with a resource."""
        said = "This is an embedded resource content."
        return result(embedded("test://embedded-resource", said))

    @mcp.tool(structured_output=False)
    def test_multiple_content_types() -> types.CallToolResult:
        """Answers with a text, a picture and a resource."""
        data = json.dumps({"test": "data", "value": 123})
        resource = embedded("test://mixed-content-resource", data, "application/json")
        return result(text("Multiple content types test:"), image(), resource)

    @mcp.tool(structured_output=False)
    def test_header(word: Annotated[str, Field(json_schema_extra=HEADER)]) -> str:
        """Has an argument that a header repeats."""
        return word

    @mcp.tool(structured_output=False)
    def test_error_handling() -> NoReturn:
        """Fails."""
        raise ToolError("This tool intentionally returns an error for testing")


def add_messages(mcp: MCPServer[Any]) -> None:
    """Tools that say something while they run, and that ask their client."""

    @mcp.tool(structured_output=False)
    async def test_tool_with_logging(ctx: Ctx) -> str:
        """Logs thrice."""
        for step in ("started", "processing data", "execution completed"):
            await ctx.info(f"Tool {step}")
            await anyio.sleep(PAUSE_S)
        return "It has logged."

    @mcp.tool(structured_output=False)
    async def test_logging_tool(ctx: Ctx) -> str:
        """Logs, if its client wants to hear of it."""
        await ctx.info("a line of the log")
        return "It has logged."

    @mcp.tool(structured_output=False)
    async def test_tool_with_progress(ctx: Ctx) -> str:
        """Reports its progress."""
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100)
            await anyio.sleep(PAUSE_S)
        return "It is done."

    @mcp.tool(structured_output=False)
    async def test_reconnection(ctx: Ctx) -> str:
        """Would end its stream where a client could come back to it."""
        await ctx.close_sse_stream()
        return "The stream goes on to its end."

    @mcp.tool(structured_output=False)
    async def test_sampling(prompt: str, ctx: Ctx) -> str:
        """Asks the client's model."""
        wanted = sample(prompt).params
        said = await ctx.session.create_message(wanted.messages, max_tokens=wanted.max_tokens)
        return f"LLM response: {getattr(said.content, 'text', '')}"

    async def ask(ctx: Ctx, message: str, **properties: object) -> str:
        schema = {"type": "object", "properties": properties, "required": []}
        said = await ctx.session.elicit_form(message, schema)
        return f"action={said.action}, content={json.dumps(said.content)}"

    @mcp.tool(structured_output=False)
    async def test_elicitation(message: str, ctx: Ctx) -> str:
        """Asks the client's user."""
        fields = {name: {"type": "string"} for name in ("username", "email")}
        return f"User response: {await ask(ctx, message, **fields)}"

    @mcp.tool(structured_output=False)
    async def test_elicitation_sep1034_defaults(ctx: Ctx) -> str:
        """Asks with a default for each field."""
        said = await ask(
            ctx,
            "Who are you?",
            name={"type": "string", "default": "John Doe"},
            age={"type": "integer", "default": 30},
            score={"type": "number", "default": 95.5},
            status={
                "type": "string",
                "enum": ["active", "inactive", "pending"],
                "default": "active",
            },
            verified={"type": "boolean", "default": True},
        )
        return f"Elicitation completed: {said}"

    @mcp.tool(structured_output=False)
    async def test_elicitation_sep1330_enums(ctx: Ctx) -> str:
        """Asks with all ways to choose."""
        plain = [f"option{number}" for number in (1, 2, 3)]
        titled = [
            {"const": f"value{number}", "title": f"{word} Option"}
            for number, word in enumerate(("First", "Second", "Third"), 1)
        ]
        names = ["Option One", "Option Two", "Option Three"]
        said = await ask(
            ctx,
            "Which?",
            untitledSingle={"type": "string", "enum": plain},
            titledSingle={"type": "string", "oneOf": titled},
            legacyEnum={"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": names},
            untitledMulti={"type": "array", "items": {"type": "string", "enum": plain}},
            titledMulti={"type": "array", "items": {"anyOf": titled}},
        )
        return f"Elicitation completed: {said}"

    @mcp.tool(structured_output=False)
    async def test_streaming_elicitation(ctx: Ctx) -> Answer:
        """Asks by its answer, in the middle of a stream."""
        await ctx.report_progress(1, 2)
        return asked(user_name=form("What is your name?", name="string"))

    @mcp.tool(structured_output=False)
    async def test_missing_capability(ctx: Ctx) -> str:
        """Needs a client that samples."""
        if ctx.client_capabilities is None or ctx.client_capabilities.sampling is None:
            raise MCPError(
                types.MISSING_REQUIRED_CLIENT_CAPABILITY,
                "This tool takes a client that samples.",
                {"requiredCapabilities": {"sampling": {}}},
            )
        return "It samples."


def add_inputs(mcp: MCPServer[Any]) -> None:
    """Tools that take several rounds."""
    name = form("What is your name?", name="string")

    @mcp.tool(structured_output=False)
    async def test_input_required_result_elicitation(ctx: Ctx) -> Answer:
        """Asks for a name."""
        said = answered(ctx, "user_name")
        given = (said.content or {}).get("name") if isinstance(said, types.ElicitResult) else None
        return result(text(f"Hello, {given}!")) if given else asked(user_name=name)

    @mcp.tool(structured_output=False)
    async def test_input_required_result_sampling(ctx: Ctx) -> Answer:
        """Asks the client's model."""
        said = answered(ctx, "capital_question")
        if said is None:
            return asked(capital_question=sample("What is the capital of France?"))
        return result(text(f"The model says: {getattr(said.content, 'text', '')}"))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_list_roots(ctx: Ctx) -> Answer:
        """Asks for the client's roots."""
        said = answered(ctx, "client_roots")
        if said is None:
            return asked(client_roots=types.ListRootsRequest())
        return result(text(f"Roots: {[str(root.uri) for root in said.roots]}"))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_request_state(ctx: Ctx) -> Answer:
        """Asks, and knows what it was about."""
        if answered(ctx, "confirm") is None or ctx.request_state != "to confirm":
            return asked("to confirm", confirm=form("Please confirm", ok="boolean"))
        return result(text("state-ok"))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_tampered_state(ctx: Ctx) -> Answer:
        """Asks with a state that nobody else can make."""
        if answered(ctx, "confirm") is None or ctx.request_state != "sealed":
            return asked("sealed", confirm=form("Please confirm", ok="boolean"))
        return result(text("state-ok"))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_multiple_inputs(ctx: Ctx) -> Answer:
        """Asks thrice at once."""
        requests = {
            "user_name": name,
            "greeting": sample("Generate a greeting", 50),
            "client_roots": types.ListRootsRequest(),
        }
        if any(answered(ctx, each) is None for each in requests):
            return asked("several", **requests)
        return result(text("All of it is there."))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_multi_round(ctx: Ctx) -> Answer:
        """Asks twice, one after the other."""
        if ctx.request_state == "second" and answered(ctx, "step2") is not None:
            return result(text("Both steps are done."))
        if ctx.request_state == "first" and answered(ctx, "step1") is not None:
            question = "Step 2: What is your favorite color?"
            return asked("second", step2=form(question, color="string"))
        return asked("first", step1=form("Step 1: What is your name?", name="string"))

    @mcp.tool(structured_output=False)
    async def test_input_required_result_capabilities(ctx: Ctx) -> Answer:
        """Asks for what the client can answer."""
        can = ctx.client_capabilities or types.ClientCapabilities()
        requests: dict[str, Any] = {}
        if can.elicitation is not None:
            requests["user_name"] = name
        if can.sampling is not None:
            requests["greeting"] = sample("Generate a greeting", 50)
        if can.roots is not None:
            requests["client_roots"] = types.ListRootsRequest()
        return asked(**requests) if requests else result(text("There is nobody to ask."))

    @mcp.prompt()
    async def test_input_required_result_prompt(ctx: Ctx) -> Any:
        """Asks before it answers."""
        said = answered(ctx, "user_context")
        if said is None:
            question = form("What context should the prompt use?", context="string")
            return asked(user_context=question)
        return f"Use this context: {said.content['context']}"


def add_prompts(mcp: MCPServer[Any]) -> None:
    """Prompts, and completions of their arguments."""

    @mcp.prompt()
    def test_simple_prompt() -> str:
        """Takes no arguments."""
        return "This is a simple prompt for testing."

    @mcp.prompt()
    def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
        """Takes two."""
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @mcp.prompt()
    def test_prompt_with_embedded_resource(resourceUri: str) -> Sequence[Any]:  # noqa: N803
        """Has a resource in it."""
        said = embedded(resourceUri, "Embedded resource content for testing.")
        return [
            {"role": "user", "content": said},
            {"role": "user", "content": text("Please process the embedded resource above.")},
        ]

    @mcp.prompt()
    def test_prompt_with_image() -> Sequence[Any]:
        """Has a picture in it."""
        return [
            {"role": "user", "content": image()},
            {"role": "user", "content": text("Please analyze the image above.")},
        ]

    async def complete(_: Any, __: types.CompleteRequestParams) -> types.CompleteResult:
        return types.CompleteResult(completion=types.Completion(values=[]))

    handlers = mcp._lowlevel_server
    handlers.add_request_handler("completion/complete", types.CompleteRequestParams, complete)


def add_resources(mcp: MCPServer[Any]) -> None:
    """Resources with addresses of their own, which can be subscribed to."""

    @mcp.resource("test://static-text", mime_type="text/plain", description="A text")
    def static_text() -> str:
        return "This is the content of the static text resource."

    @mcp.resource("test://static-binary", mime_type="image/png", description="A picture")
    def static_binary() -> bytes:
        return base64.b64decode(picture())

    @mcp.resource("test://template/{id}/data", mime_type="application/json", description="By id")
    def template(id: str) -> str:  # noqa: A002  # the suite's name
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    async def note(_: Any, __: Any) -> types.EmptyResult:
        return types.EmptyResult()

    handlers = mcp._lowlevel_server
    handlers.add_request_handler("resources/subscribe", types.SubscribeRequestParams, note)
    handlers.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, note)
    handlers.add_request_handler("logging/setLevel", types.SetLevelRequestParams, note)


def add_changes(mcp: MCPServer[Any]) -> None:
    """Tools that tell of changes."""

    @mcp.tool(structured_output=False)
    async def test_trigger_tool_change(ctx: Ctx) -> str:
        """Tells that there are other tools."""
        await ctx.notify_tools_changed()
        return "told"

    @mcp.tool(structured_output=False)
    async def test_trigger_prompt_change(ctx: Ctx) -> str:
        """Tells that there are other prompts."""
        await ctx.notify_prompts_changed()
        return "told"


_build = protocol.build_mcp


def build_mcp(
    services: ToolContext,
    callers: Callers,
    links: Callable[[str], str] | None = None,
    pages: Callable[[], Pages] | None = None,
) -> ResourceServer:
    """The server's own, with all of this added."""
    mcp = _build(services, callers, links, pages)
    mcp.__class__ = FixtureServer
    for add in (add_contents, add_messages, add_inputs, add_prompts, add_resources, add_changes):
        add(mcp)
    return mcp


if __name__ == "__main__":
    protocol.build_mcp = build_mcp
    sealed = RequestStateSecurity.ephemeral()
    vars(resources)["NoRequestState"] = lambda: sealed.codec
    sys.exit(cli.main())
