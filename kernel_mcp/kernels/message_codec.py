"""The Jupyter wire protocol as this server needs it: signed requests out, validated messages in.

The kernel is hostile and holds the signing key: every field is checked, whatever the signature.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Literal

from kernel_mcp.output.items import Clear, Display, Event, Failure, Stream
from kernel_mcp.records import dataclass

PROTOCOL_VERSION = "5.4"
"""Version in requests, as `jupyter_client._version.protocol_version`."""
DELIM = b"<IDS|MSG>"
"""Delimiter of routing identities and signature, as `jupyter_client.session.DELIM`. An import of
that package would need 6 MB of memory."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a kernel's message: decoding 16 MiB delays other sessions by some 50 ms."""
MAX_HEADER_BYTES = 64 * 1024
MAX_VALUES = 200_000
"""Maximum number of JSON values in one message: decoding 16 MiB of `[],` would take a second."""
UNSUSPICIOUS_BYTES = 128 * 1024
"""Bytes of content up to which values are not counted."""
MAX_ENTRIES = 256
"""Maximum number of entries of a MIME bundle; a usual one has a handful."""
MAX_ID_CHARS = 256
MAX_FRAMES = 2000
"""Maximum number of lines of a traceback, half of them from its end."""
UNNAMED = "error reported by the kernel"
"""Name of an error without name and traceback, such as bash's for a command that failed."""
MAX_COUNT = 2**53


_NUMBER = re.compile(r"[0-9]{1,18}")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=lambda _word: None).decode
"""Decodes JSON. NaN and infinities, which are not valid JSON, become null as in Jupyter's front
ends."""


class WireError(ValueError):
    """Raised for a message with an invalid signature, invalid JSON or an invalid structure."""


class Overload(WireError):
    """Raised for a signed message that would take the server too long to decode."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of checked structure: its type `kind`, the id of its request, its content.

    `buffers` are unchecked bytes: no signature covers them. A `foreign` message answers a request
    of the type `asked` that another client of the kernel has sent.
    """

    kind: str
    parent: str
    content: dict[str, Any]
    buffers: tuple[bytes, ...] = ()
    foreign: bool = False
    asked: str = ""


def header(kind: str, msg_id: str, session: str, username: str = "kernel-mcp") -> dict[str, Any]:
    """Return the header of a message with the current time; `session` identifies the sender."""
    return {
        "msg_id": msg_id,
        "msg_type": kind,
        "username": username,
        "session": session,
        "date": datetime.now(timezone.utc).isoformat(),
        "version": PROTOCOL_VERSION,
    }


class Signer:
    """Signs the parts of messages with the key of a connection."""

    def __init__(self, key: str) -> None:
        self._digest = hmac.new(key.encode(), digestmod="sha256")

    def sign(self, parts: Sequence[bytes]) -> bytes:
        """Return the signature of header, parent, metadata and content, in hexadecimal digits."""
        digest = self._digest.copy()
        for part in parts:
            digest.update(part)
        return digest.hexdigest().encode()

    def signed(self, frames: Sequence[bytes]) -> tuple[int, Sequence[bytes], Sequence[bytes]]:
        """Check the signature; return the number of identities, the four parts, and the buffers.

        Raises WireError.
        """
        try:
            identities = frames.index(DELIM)
        except ValueError:
            raise WireError("no delimiter") from None
        start = identities + 1
        parts, buffers = frames[start + 1 : start + 5], frames[start + 5 :]
        if len(parts) != 4:
            raise WireError("too few frames")
        if not hmac.compare_digest(self.sign(parts), frames[start]):
            raise WireError("bad signature")
        if len(parts[0]) > MAX_HEADER_BYTES or len(parts[1]) > MAX_HEADER_BYTES:
            raise WireError("header or parent is too long")
        return identities, parts, buffers


class MessageCodec:
    """Encodes requests and decodes messages of one kernel connection.

    Answers to requests of other clients are refused, unless the kernel is `shared`.
    """

    def __init__(self, key: str, *, shared: bool = False) -> None:
        self._name = secrets.token_hex(16)
        self._sent = 0
        self._signer = Signer(key)
        self._shared = shared
        self._former: frozenset[str] = frozenset()
        self._foreign = ""
        """Type of the last parent request if another client sent it; else empty."""
        self._parent, self._parent_id = b"{}", ""
        """Cache of the last parent header, which all messages of a cell share."""

    @property
    def name(self) -> bytes:
        """The name of this client, which no other has."""
        return self._name.encode()

    def follow(self, former: MessageCodec) -> None:
        """Accept late answers to requests of `former`, whose kernel goes on as this one."""
        self._former = former._former | {former._name}

    def request(self, kind: str, content: dict[str, Any]) -> tuple[str, list[bytes]]:
        """Return the id and the frames of a new request."""
        msg_id = f"{self._name}_{self._sent}"
        self._sent += 1
        head = header(kind, msg_id, self._name)
        parts = [packed(head), b"{}", b"{}", packed(content)]
        return msg_id, self._sealed(parts)

    def decode(self, frames: Sequence[bytes]) -> Message:
        """Check signature, structure and parent of a multi-part message. Raises WireError."""
        parts, buffers = self._opened(frames)
        if parts[1] != self._parent:
            self._parent_id = self._request_of(json_object(parts[1]))
            self._parent = parts[1]
        _check_values(parts[3])
        kind = text_of(json_object(parts[0]), "msg_type")
        foreign = self._foreign
        return Message(
            kind,
            self._parent_id,
            json_object(parts[3]),
            tuple(buffers),
            foreign=bool(foreign),
            asked=foreign,
        )

    def _sealed(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return the frames of a message with these four parts."""
        return [DELIM, self._signer.sign(parts), *parts]

    def _opened(self, frames: Sequence[bytes]) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Return the four parts of a message and its buffers. Raises WireError."""
        _, parts, buffers = self._signer.signed(frames)
        return parts, buffers

    def _request_of(self, parent: dict[str, Any]) -> str:
        """Return the id of the request in a parent header; empty without a parent.

        Raises WireError for a request of another client, unless the kernel is shared.
        """
        self._foreign = ""
        if not parent:
            return ""
        msg_id = text_of(parent, "msg_id")
        if self._shared and parent.get("session") != self._name:
            self._foreign = text_of(parent, "msg_type", "unknown")[:MAX_ID_CHARS]
            return msg_id[:MAX_ID_CHARS]
        if self._former and text_of(parent, "session", "") in self._former:
            return msg_id[:MAX_ID_CHARS]
        name, _, number = msg_id.rpartition("_")
        if (
            name != self._name
            or parent.get("session") != self._name
            or not _NUMBER.fullmatch(number)
            or int(number) >= self._sent
        ):
            raise WireError("it answers no request of this server")
        return msg_id


def event_from(message: Message) -> Event | None:
    """Return the output event of a message; None for other messages. Raises WireError."""
    content = message.content
    if message.kind == "stream":
        return Stream(_stream_name(content.get("name")), text_of(content, "text"))
    if message.kind in ("display_data", "execute_result", "update_display_data"):
        transient = _object(content.get("transient", {}))
        display_id = transient.get("display_id")
        return Display(
            data=_bundle(content.get("data")),
            metadata=_object(content.get("metadata", {})),
            display_id=_identifier(display_id),
            update=message.kind == "update_display_data",
            result=message.kind == "execute_result",
        )
    if message.kind == "clear_output":
        return Clear(wait=content.get("wait") is True)
    if message.kind == "error":
        return failure_from(content)
    return None


def failure_from(content: dict[str, Any]) -> Failure:
    """Return the exception in an `error` message or error reply. Raises WireError."""
    traceback = content.get("traceback", [])
    if not isinstance(traceback, list):
        raise WireError("traceback is not a list")
    if len(traceback) > MAX_FRAMES:
        traceback = traceback[: MAX_FRAMES // 2] + traceback[-MAX_FRAMES // 2 :]
    if not all(isinstance(line, str) for line in traceback):
        raise WireError("traceback is not a list of strings")
    name, value = text_of(content, "ename"), text_of(content, "evalue")
    name = name if name or traceback else UNNAMED
    return Failure(name, value, tuple(traceback), text_of(content, "lacks", "")[:MAX_ID_CHARS])


def whole_number(value: object) -> int | None:
    """Return `value` if it is a count from 0 to `MAX_COUNT`, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < MAX_COUNT else None


def packed(value: dict[str, Any]) -> bytes:
    """Return a message part as JSON; lone surrogates become question marks."""
    return _encode(value).encode("utf-8", "replace")


def _check_values(content: bytes) -> None:
    """Raise Overload for more than `MAX_VALUES` values; text of any length is accepted."""
    if len(content) <= UNSUSPICIOUS_BYTES or content.count(b",") <= MAX_VALUES:
        return  # values without commas are nested: the parser bounds that
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > MAX_VALUES or b"".join(plain.split(b'"')[::2]).count(b",") > MAX_VALUES:
        size = f"{len(content) / 1e6:.1f} MB"
        raise Overload(f"an output of {size} holds more than {MAX_VALUES:,} values")


def _identifier(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_ID_CHARS else None


def _stream_name(value: object) -> Literal["stdout", "stderr"]:
    if value == "stdout":
        return "stdout"
    if value == "stderr":
        return "stderr"
    raise WireError("unknown stream")


def text_of(content: dict[str, Any], field: str, default: str | None = None) -> str:
    """Return a field that must be text. Raises WireError."""
    value = content.get(field, default)
    if not isinstance(value, str):
        raise WireError(f"{field} is not a string")
    return value


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a part of a message. Raises WireError."""
    try:
        value = _decode(str(data, "utf-8"))
    except RecursionError as error:
        raise Overload("an output is nested too deeply") from error
    except ValueError as error:
        raise WireError("not JSON") from error
    return _object(value)


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("expected an object")
    return value


def _bundle(value: object) -> dict[str, Any]:
    """Return a MIME bundle. Raises WireError for entries that are neither text nor JSON."""
    bundle = _object(value)
    if len(bundle) > MAX_ENTRIES:
        raise WireError("too many entries in a MIME bundle")
    for mime, data in bundle.items():
        if not isinstance(data, str) and not mime.endswith(("/json", "+json", ".json")):
            raise WireError(f"data of type {mime[:80]!r} is not a string")
    return bundle
