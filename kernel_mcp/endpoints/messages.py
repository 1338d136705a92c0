"""Jupyter's messages on the kernel's side: requests of clients in, replies and outputs out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_mcp.kernels.message_codec import (
    DELIM,
    Signer,
    WireError,
    header,
    json_object,
    packed,
    text_of,
)
from kernel_mcp.output.items import Clear, Display, Event, Failure, Stream
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A client's message: routing identities for the reply, header, metadata, type and content.

    Lists and objects are left out of the header: all fields of Jupyter's protocol are scalars.
    """

    identities: tuple[bytes, ...]
    header: dict[str, Any]
    metadata: dict[str, Any]
    kind: str
    content: dict[str, Any]

    @property
    def client(self) -> str:
        """Id of the Jupyter session that has sent it; empty without one."""
        found = self.header.get("session")
        return found if isinstance(found, str) else ""


class Messages:
    """Reads and writes the messages of one connection."""

    def __init__(self, key: str) -> None:
        self._signer = Signer(key)
        self._session = secrets.token_hex(16)
        self.sent = 0
        """Number of messages written; each has its number at the end of its id."""
        self._parent: tuple[Mapping[str, Any], bytes] = {}, b"{}"
        """Cache of the last parent, which all messages of a cell share."""

    def read(self, frames: Sequence[bytes]) -> Request:
        """Return the message in `frames`. Raises WireError for a bad signature or shape."""
        identities, parts, _ = self._signer.signed(frames)
        head = json_object(parts[0])
        text_of(head, "msg_id")
        return Request(
            tuple(frames[:identities]),
            {name: value for name, value in head.items() if not isinstance(value, (dict, list))},
            json_object(parts[2]),
            text_of(head, "msg_type"),
            json_object(parts[3]),
        )

    def write(
        self,
        kind: str,
        content: Mapping[str, Any],
        parent: Mapping[str, Any],
        identities: Sequence[bytes] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> list[bytes]:
        """Return the frames of a signed message."""
        if parent is not self._parent[0]:
            self._parent = parent, packed(dict(parent))
        self.sent += 1
        head = header(kind, f"{self._session}_{self.sent}", self._session)
        parts = [packed(head), self._parent[1], packed(dict(metadata or {})), packed(dict(content))]
        return [*identities, DELIM, self._signer.sign(parts), *parts]


def shown(event: Event, count: int) -> tuple[str, dict[str, Any]]:
    """Return type and content of the message for an output; `count` is the cell's number."""
    if isinstance(event, Stream):
        return "stream", {"name": event.name, "text": event.text}
    if isinstance(event, Clear):
        return "clear_output", {"wait": event.wait}
    if isinstance(event, Failure):
        return "error", failure(event.name, event.value, event.traceback)
    assert isinstance(event, Display)
    content: dict[str, Any] = {"data": event.data, "metadata": event.metadata}
    content["transient"] = {} if event.display_id is None else {"display_id": event.display_id}
    if event.update:
        return "update_display_data", content
    if event.result:
        return "execute_result", {**content, "execution_count": count}
    return "display_data", content


def failure(name: str, value: str, traceback: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of an exception for messages; without a traceback it is one line."""
    return {"ename": name, "evalue": value, "traceback": list(traceback) or [f"{name}: {value}"]}


__all__ = ["Messages", "Request", "WireError", "failure", "shown"]
