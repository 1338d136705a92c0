"""Jupyter messages on the wire, with less work for each than jupyter_client spends."""

from __future__ import annotations

import itertools
import os
from datetime import datetime, timezone
from hmac import compare_digest
from typing import Any

from jupyter_client._version import protocol_version
from jupyter_client.adapter import adapt
from jupyter_client.jsonutil import json_default
from jupyter_client.session import DELIM, Message, Session, json_packer

from kernel_specs.restricted.originals import json

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=json_default).encode
_PARTS = 5  # signature, header, parent header, metadata, content


def pack(value: Any) -> bytes:
    """Return one message part as JSON; lone surrogates become question marks."""
    try:
        return _encode(value).encode("utf-8", "replace")
    except (TypeError, ValueError):
        return json_packer(value)


class LeanSession(Session):
    """A `Session` that builds the same messages at a third of the cost.

    One JSON encoder is reused, the parent header of a cell is encoded once, and dates stay strings
    (nothing in a kernel reads them). No digests are stored against replays: the sockets are in a
    private folder, and 65 536 digests cost megabytes.
    """

    digest_history_size = 0

    def __init__(self, **kwargs: Any) -> None:
        self._numbers = itertools.count()
        self._parent: tuple[Any, bytes] = (None, b"{}")
        super().__init__(**kwargs)

    def renew(self, key: bytes, signature_scheme: str | None = None) -> None:
        """Become a new session after a fork: new id, and `key` for signatures."""
        if signature_scheme and signature_scheme != self.signature_scheme:
            self.signature_scheme = signature_scheme
        self.key = key
        self.session = os.urandom(16).hex()
        self.pid = os.getpid()
        self._numbers = itertools.count()

    @property
    def msg_id(self) -> str:
        """A new message id at each access; safe in every thread."""
        return f"{self.session}_{self.pid}_{next(self._numbers)}"

    def msg_header(self, msg_type: str) -> dict[str, Any]:
        """Return a new header, with its date as a string."""
        return {
            "msg_id": self.msg_id,
            "msg_type": msg_type,
            "username": self.username,
            "session": self.session,
            "date": datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"),
            "version": protocol_version,
        }

    def serialize(
        self, msg: dict[str, Any], ident: bytes | list[bytes] | None = None
    ) -> list[bytes]:
        """Return the frames of one message without its buffers."""
        parent, packed = self._parent
        if parent is not msg["parent_header"]:
            parent = msg["parent_header"]
            packed = pack(parent)
            self._parent = (parent, packed)
        metadata = msg["metadata"]
        content = msg.get("content")
        parts = [
            pack(msg["header"]),
            packed,
            pack(metadata) if metadata else b"{}",
            content if isinstance(content, bytes) else pack(content or {}),
        ]
        idents = ident if isinstance(ident, list) else [] if ident is None else [ident]
        return [*idents, DELIM, self.sign(parts), *parts]

    def send(
        self,
        stream: Any,
        msg_or_type: dict[str, Any] | str,
        content: dict[str, Any] | None = None,
        parent: dict[str, Any] | None = None,
        ident: bytes | list[bytes] | None = None,
        buffers: list[Any] | None = None,
        track: bool = False,
        header: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Build and send one message; does nothing in a forked child."""
        if buffers or track or stream is None:
            return super().send(
                stream, msg_or_type, content, parent, ident, buffers, track, header, metadata
            )
        if isinstance(msg_or_type, Message | dict):
            msg: dict[str, Any] = msg_or_type
            if msg.get("buffers"):
                return super().send(stream, msg, ident=ident)
        else:
            msg = self.msg(msg_or_type, content, parent, header, metadata)
        if os.getpid() != self.pid:
            return None
        stream.send_multipart(self.serialize(msg, ident))
        return msg

    def feed_identities(
        self, msg_list: list[Any], copy: bool = True
    ) -> tuple[list[bytes], list[Any]]:
        """Split routing identities from the message; frames are always bytes here."""
        end = msg_list.index(DELIM)
        return msg_list[:end], msg_list[end + 1 :]

    def deserialize(
        self, msg_list: list[Any], content: bool = True, copy: bool = True
    ) -> dict[str, Any]:
        """Check and unpack one message. Raises ValueError or TypeError for a malformed one."""
        if len(msg_list) < _PARTS:
            raise TypeError(f"malformed message, must have at least {_PARTS} elements")
        if self.auth is not None and not compare_digest(msg_list[0], self.sign(msg_list[1:_PARTS])):
            raise ValueError("Invalid Signature")
        header = json.loads(msg_list[1])
        msg = {
            "header": header,
            "msg_id": header["msg_id"],
            "msg_type": header["msg_type"],
            "parent_header": json.loads(msg_list[2]),
            "metadata": json.loads(msg_list[3]),
            "content": json.loads(msg_list[4]) if content else msg_list[4],
            "buffers": [memoryview(frame) for frame in msg_list[_PARTS:]],
        }
        return adapt(msg) if not str(header.get("version", "")).startswith("5") else msg
