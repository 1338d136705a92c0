"""Values that tools return, the errors of calls, and the form in which both are shown."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TEXT_CHARS = 4000
"""Longest text of a server in an error, or in the description of a tool."""
Answer = tuple[dict[str, Any], list[bytearray]]
"""Header and blobs of an answer of the gateway."""
_SHOWN_IMAGES = ("image/png", "image/jpeg")
"""Types of images that notebooks display."""


class ToolError(Exception):
    """A tool has reported an error."""


class ToolRefused(ToolError):
    """The operator or the person does not permit this call."""


class ToolUnavailable(ToolError):
    """The gateway, or the server of the tool, cannot be reached."""


class ToolTimeout(ToolError):
    """The tool took longer than the operator permits."""


for _kind in (ToolError, ToolRefused, ToolUnavailable, ToolTimeout):
    _kind.__module__ = "mcp_tools"
_KINDS = {"refused": ToolRefused, "unavailable": ToolUnavailable, "timeout": ToolTimeout}


def error_of(error: Any) -> ToolError:
    """Return the exception for an error of the gateway."""
    fields = error if isinstance(error, dict) else {}
    return _KINDS.get(fields.get("kind", ""), ToolError)(shown(fields.get("text", ""), TEXT_CHARS))


def shown(text: object, most: int) -> str:
    """Return a text of a server for people: what is not printable escaped, cut after `most`."""
    words = str(text)
    cut = "…" if len(words) > most else ""
    kept = words[:most]
    if kept.isprintable():
        return kept + cut
    escaped = (
        each
        if each.isprintable() or each == "\n"
        else each.encode("unicode_escape", "surrogatepass").decode()
        for each in kept.replace("\r\n", "\n").expandtabs(4)
    )
    return "".join(escaped) + cut


class Text(str):
    """A text. `uri` names the resource that it is the content of, if any."""

    __module__ = "mcp_tools"
    uri = ""

    def json(self) -> Any:
        """Return what the text means as JSON. Raises ValueError."""
        return json.loads(self)


class Blob(bytes):
    """Data of the MIME type `mime`, such as sound; `uri` names the resource, if any."""

    __module__ = "mcp_tools"
    mime = ""
    uri = ""

    def __repr__(self) -> str:
        return f"<{shown(self.mime, 100) or 'data'}, {len(self):,} bytes>"

    __str__ = __repr__


class Image(Blob):
    """The bytes of an image; notebooks display PNG and JPEG."""

    __module__ = "mcp_tools"

    def pil(self) -> Any:
        """Return the image of Pillow. Raises ImportError without that package."""
        from PIL import Image as Pillow

        return Pillow.open(io.BytesIO(self))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str] | None:
        if self.mime not in _SHOWN_IMAGES:
            return None
        return {self.mime: base64.b64encode(self).decode(), "text/plain": repr(self)}


class Link:
    """A link to a resource, which `read` reads. It has `uri`, `name`, `mime` and `description`."""

    __module__ = "mcp_tools"

    def __init__(self, server: str, item: Mapping[str, Any]) -> None:
        self.server = server
        self.uri = str(item.get("uri", ""))
        self.name = str(item.get("name", ""))
        self.mime = str(item.get("mimeType") or "")
        self.description = str(item.get("description") or "")

    def read(self) -> Any:
        """Return the content of the resource. Raises ToolError."""
        from mcp_tools.functions import read

        return read(self.server, self.uri)

    def __repr__(self) -> str:
        return f"<link to {shown(self.uri, 300)}>"


def value_of(answer: Answer, server: str) -> Any:
    """Return the value of an answer of the gateway. Raises ToolError.

    Structured content comes without the wrapper `{"result": …}`, and makes texts superfluous, which
    repeat it. Some servers repeat all items as `{"content": …}`: then the items count. Several ones
    are a list, none is None.
    """
    header, blobs = answer
    if "error" in header:
        raise error_of(header["error"])
    result = header["result"]
    content = result.get("content") or []
    whole = result.get("structured")
    if (at := header.get("structured_blob")) is not None:
        whole = json.loads(blobs[at])
    if whole is None or _repeats(whole, content):
        values = [_value_of(item, blobs, server) for item in content]
        return values[0] if len(values) == 1 else values or None
    if isinstance(whole, dict) and whole.keys() == {"result"}:
        whole = whole["result"]
    others = [item for item in content if item.get("type") != "text"]
    return [whole, *(_value_of(item, blobs, server) for item in others)] if others else whole


def _repeats(whole: Any, content: Sequence[Mapping[str, Any]]) -> bool:
    """Return True for structured content that is the items once more."""
    if not content or not isinstance(whole, dict) or whole.keys() != {"content"}:
        return False
    again = whole["content"]
    if isinstance(again, list):
        return [_type(each) for each in again] == [_type(each) for each in content]
    return [again] == [each.get("text") for each in content]


def _type(item: Any) -> Any:
    return item.get("type") if isinstance(item, dict) else None


def _value_of(item: Mapping[str, Any], blobs: Sequence[bytearray], server: str) -> Any:
    kind = item.get("type")
    if kind == "resource_link":
        return Link(server, item)
    if kind in ("image", "audio"):
        return _data(Image if kind == "image" else Blob, item, "data", blobs)
    about = item.get("resource", item)
    if "blob" in about:
        return _data(Blob, about, "blob", blobs)
    words = about.get("text", "")
    text = Text(blobs[words["blob"]], "utf-8") if isinstance(words, dict) else Text(words)
    text.uri = str(about.get("uri", ""))
    return text


def _data(
    kind: Callable[[bytearray], Any],
    item: Mapping[str, Any],
    name: str,
    blobs: Sequence[bytearray],
) -> Any:
    data = kind(blobs[item[name]["blob"]])
    data.mime, data.uri = str(item.get("mimeType") or ""), str(item.get("uri", ""))
    return data
