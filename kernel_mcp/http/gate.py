"""What every request passes first: which host was meant, who calls, how much, and whether still.

One ASGI application around all others. It reads the body of a call itself, so that nothing behind
it sees a request that is too long, too slow, one too many, or nobody's.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.values import KIB, MIB, Quotas, format_bytes
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.http.connections import state_of
from kernel_mcp.http.delivery import Delivery
from kernel_mcp.http.turns import BYTES_S, CALLS_S, Taken, Turns
from kernel_mcp.identity import (
    INSTALL,
    METRICS,
    OPERATOR,
    RUN,
    TOKEN_PREFIX,
    Principal,
    Unauthenticated,
    Verifier,
)
from kernel_mcp.sessions.losses import Outbox

logger = logging.getLogger(__name__)

MOST_BODY = 4 * MIB
"""Bytes of one MCP message: what is parsed at once keeps all others waiting, 20 ms a MiB."""
MOST_VALUES = 10_000
"""Items of lists and objects in one MCP message: a million take seconds to read, not 80 ms."""
BODY_S = 60.0
"""Seconds for the whole body of a call."""
MOST_SKIPPED = 16 * MIB
SKIP_S = 5.0
"""Bytes and seconds of a body that are still taken when its request has been refused."""
WRITE_S = 60.0
"""Seconds until a reader has taken the next piece of an answer."""
PRINCIPAL_BODY = 32 * MIB
"""Bytes of calls of one principal that are being read or answered, without a quota of its own."""
MOST_PRINCIPALS = 10_000
"""Principals whose rates are known."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MCP = "/mcp"
METRICS_PATH = "/metrics"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_METADATA = "/.well-known/oauth-protected-resource"


class Watch(Protocol):
    """Hears what the gate does."""

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """A request was refused: `unauthenticated`, `forbidden`, `rate`, `body`, `host`, `origin`,
        `draining`; `principal` is empty where it is not known.
        """

    def moved(self, received: int, sent: int) -> None:
        """So many bytes of bodies came in and went out with one request."""


class Unheard:
    """A `Watch` that hears nothing."""

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """See `Watch`."""

    def moved(self, received: int, sent: int) -> None:
        """See `Watch`."""


@dataclass(slots=True)
class Usage:
    """What one principal uses now: calls that it may still make, and bytes that are read for it."""

    tokens: float
    since: float
    held: int = 0
    user: AuthenticatedUser | None = None
    taken: Taken = field(default_factory=Taken)


class Refused(Exception):  # an answer
    """An answer in place of that of the application."""

    def __init__(
        self,
        status: int,
        reason: str,
        text: str,
        headers: Mapping[str, str] | None = None,
        who: str = "",
    ) -> None:
        """`who` is the principal, where it is known of no other request."""
        super().__init__(text)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})
        self.who = who


class Addresses:
    """Which hosts and origins requests may name; all hosts where `any_host`."""

    def __init__(self, hosts: Iterable[str], origins: Iterable[str], *, any_host: bool) -> None:
        self._hosts = frozenset(each.lower() for each in hosts)
        self._origins = frozenset(each.lower() for each in origins)
        self._any = any_host

    @classmethod
    def of(cls, host: str, public_url: str) -> Addresses:
        """Those of a server that is bound to `host`, and known by `public_url`."""
        own = f"[{host}]" if ":" in host else host
        loopback = host in ("127.0.0.1", "localhost", "::1")
        wild = host in ("0.0.0.0", "::")
        hosts = [own, *(_LOOPBACK if loopback or wild else ())]
        origins = [f"http://{each}" for each in hosts]
        if public_url:
            parts = urlsplit(public_url)
            hosts.append(parts.netloc)
            origins.append(f"{parts.scheme}://{parts.netloc}")
        return cls(hosts, origins, any_host=wild and not public_url)

    def host(self, given: str) -> bool:
        """Whether a `Host` header names this server."""
        given = given.lower().rstrip(".")
        return bool(given) and (self._any or given in self._hosts or _bare(given) in self._hosts)

    def origin(self, given: str) -> bool:
        """Whether a page of this `Origin` may call."""
        given = given.lower()
        scheme, _, netloc = given.partition("://")
        return given in self._origins or f"{scheme}://{_bare(netloc)}" in self._origins


def _bare(netloc: str) -> str:
    """A host without its port."""
    host, colon, port = netloc.rpartition(":")
    return host if colon and port.isdecimal() else netloc


class Gate:
    """The application around all others of an HTTP server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        addresses: Addresses,
        verifier: Verifier | None,
        quotas: Quotas,
        clock: Callable[[], float],
        outbox_of: Callable[[str], Outbox | None],
        metadata: Mapping[str, Any] | None = None,
        metadata_url: str = "",
        watch: Watch | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """Without a `verifier` everyone is the same principal.

        `outbox_of` has the outbox of an MCP session; `metadata` is the document of the protected
        resource, which is served at `metadata_url` of a client's view.
        """
        self._app = app
        self._addresses = addresses
        self._verifier = verifier
        self._quotas = quotas
        self._clock = clock
        self._outbox_of = outbox_of
        self._metadata = metadata
        self._metadata_url = metadata_url
        self.watch: Watch = watch or Unheard()
        self._usage: OrderedDict[str, Usage] = OrderedDict()
        self._turns = Turns(clock, sleep)
        self.draining = False
        self._calls = 0
        self._idle = anyio.Event()
        self._idle.set()

    @property
    def calls(self) -> int:
        """Calls and uploads that are being answered."""
        return self._calls

    async def drained(self) -> None:
        """Wait until none is."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        peer = scope["client"][0] if scope.get("client") else ""
        meter = _Meter(receive, send)
        try:
            await self._pass(scope, meter, send, peer)
        except Refused as refused:
            who = state_of(scope).get("principal")
            self.watch.refused(refused.reason, peer, who.name if who is not None else refused.who)
            headers = refused.headers
            if refused.status in (408, 413, 503):  # the rest of the request is not read
                headers["connection"] = "close"
            await _skip(scope["headers"], meter)
            await respond(send, refused.status, str(refused), headers)

    async def _pass(self, scope: Scope, meter: _Meter, send: Send, peer: str) -> None:
        path, method = scope["path"], scope["method"]
        headers = _needed(scope["headers"])
        if path in OPEN_PATHS:
            await self._app(scope, meter.receive, send)
            return
        if not self._addresses.host(headers.get(b"host", "")):
            raise Refused(421, "host", _NOT_HERE)
        origin = headers.get(b"origin", "")
        if origin and not self._addresses.origin(origin):
            raise Refused(403, "origin", "Pages of this origin may not call this server.")
        if self._metadata is not None and path in (_METADATA, _METADATA + MCP):
            await respond_json(send, 200, self._metadata)
            return
        if self.draining:
            raise Refused(503, "draining", _STOPPING, {"retry-after": "5"})
        state = state_of(scope)
        needed = METRICS if path == METRICS_PATH else RUN
        who = state["principal"] = await self._who(headers.get(b"authorization", ""), needed)
        usage = self._usage_of(who)
        if usage.user is None:
            token = AccessToken(token="", client_id=who.name, scopes=sorted(who.scopes))
            usage.user = AuthenticatedUser(token)
        scope["user"] = usage.user
        quotas = who.quotas.over(self._quotas)
        if method in ("POST", "PUT", "DELETE"):
            self._admit(usage, quotas)
        if wait_s := await self._turns.wait(who.name, usage.taken):
            after = {"retry-after": str(round(wait_s + 0.5))}
            raise Refused(429, "rate", _OTHERS_CALL, after)
        if self.draining:
            raise Refused(503, "draining", _STOPPING, {"retry-after": "5"})
        try:
            if method in ("PUT", "DELETE"):
                self._begin()
                try:
                    await self._app(scope, meter.receive, meter.send)
                finally:
                    self._end()
            elif method != "POST":
                await self._app(scope, meter.receive, meter.send)
            else:
                await self._call(scope, meter, usage, quotas, headers)
        finally:
            self.watch.moved(meter.received, meter.sent)

    async def _call(
        self,
        scope: Scope,
        meter: _Meter,
        usage: Usage,
        quotas: Quotas,
        headers: Mapping[bytes, str],
    ) -> None:
        """Pass on a POST whose body has been read."""
        most = PRINCIPAL_BODY if quotas.body is None else quotas.body
        room = MOST_BODY if not most else min(MOST_BODY, most)
        state = state_of(scope)
        held = _Held(usage, most)
        self._begin()
        try:
            body = await _read(meter.receive, headers.get(b"content-length", ""), room, held)
            usage.taken.read(len(body))
            if values_of(body) > MOST_VALUES:
                raise Refused(413, "body", _TOO_MANY)
            self._require_scopes(state["principal"], headers.get(b"authorization", ""), body)
            outbox = self._outbox_of(headers.get(b"mcp-session-id", ""))
            delivery = Delivery(state.get("connection"), outbox)
            state["delivery"] = delivery
            long = headers.get(b"mcp-method", "") == "subscriptions/listen"
            if long:  # goes on until its client ends it: nothing to wait for
                self._end()
            try:
                meter.at_end = delivery.sent
                await self._app(scope, _replay(body, meter.receive), meter.send)
            finally:
                with Barrier("taking note of an answer's delivery"):
                    delivery.over()
                if long:
                    self._begin()
        finally:
            held.release()
            self._end()

    def _begin(self) -> None:
        if not self._calls:
            self._idle = anyio.Event()
        self._calls += 1

    def _end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    async def _who(self, authorization: str, needed: str) -> Principal:
        """The principal of a request, who has the scope that it needs. Raises Refused."""
        if self._verifier is None:
            return Principal(scopes=OPERATOR, doors=())
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise Refused(
                401, "unauthenticated", _NO_TOKEN, {"www-authenticate": self._challenge("", needed)}
            )
        try:
            who = await self._verifier.verify(token.strip())
        except Unauthenticated as error:
            challenge = self._challenge("invalid_token", needed)
            raise Refused(
                401, "unauthenticated", str(error), {"www-authenticate": challenge}
            ) from None
        except KernelMcpError as error:
            raise Refused(503, "verifier", str(error), {"retry-after": "10"}) from None
        if needed not in who.scopes:
            challenge = self._challenge("insufficient_scope", needed)
            raise Refused(
                403,
                "forbidden",
                f"This token lacks the scope {needed}. Ask for one that has it.",
                {"www-authenticate": challenge},
                who.name,
            )
        return who

    def _require_scopes(self, who: Principal, authorization: str, body: bytes) -> None:
        """Have the client of an issuer's token log in again for what the call takes beyond RUN.

        Others cannot: the tool says to them what is lacking. Raises Refused.
        """
        if self._metadata is None or INSTALL in who.scopes or not installs(body):
            return
        if authorization.partition(" ")[2].strip().startswith(TOKEN_PREFIX):
            return
        raise Refused(
            403,
            "forbidden",
            f"This token lacks the scope {INSTALL}, which `install` takes.",
            {"www-authenticate": self._challenge("insufficient_scope", f"{RUN} {INSTALL}")},
            who.name,
        )

    def _challenge(self, error: str, scope: str) -> str:
        parts = ['realm="kernel-mcp"']
        if error:
            parts.append(f'error="{error}"')
        parts.append(f'scope="{scope}"')
        if self._metadata is not None:
            parts.append(f'resource_metadata="{self._metadata_url}"')
        return "Bearer " + ", ".join(parts)

    def _usage_of(self, who: Principal) -> Usage:
        usage = self._usage.get(who.name)
        if usage is None:
            usage = self._usage[who.name] = Usage(-1.0, self._clock())
            if len(self._usage) > MOST_PRINCIPALS:
                self._usage.popitem(last=False)
        else:
            self._usage.move_to_end(who.name)
        return usage

    def _admit(self, usage: Usage, quotas: Quotas) -> None:
        """Take one call from a principal's rate. Raises Refused."""
        if not quotas.rate:
            return
        now, most = self._clock(), max(1.0, quotas.rate)
        before = most if usage.tokens < 0 else usage.tokens
        usage.tokens = min(most, before + (now - usage.since) * quotas.rate)
        usage.since = now
        if usage.tokens < 1:
            wait_s = (1 - usage.tokens) / quotas.rate
            raise Refused(
                429,
                "rate",
                f"More than {quotas.rate:g} calls a second of one principal (its quota `rate`): "
                "wait a moment, then call again.",
                {"retry-after": str(max(1, round(wait_s + 0.5)))},
            )
        usage.tokens -= 1


class _Held:
    """The bytes of one request in memory, as part of what its principal may have there."""

    def __init__(self, usage: Usage, most: int) -> None:
        self._usage = usage
        self._most = most
        self._bytes = 0

    def take(self, count: int) -> None:
        """Hold so many more. Raises Refused."""
        if self._most and self._usage.held + count > self._most:
            raise Refused(
                429,
                "body",
                "The requests of this principal that are being read hold "
                f"{format_bytes(self._most)} together, its quota `body`: wait until some of them "
                "have been answered.",
                {"retry-after": "1", "connection": "close"},
            )
        self._usage.held += count
        self._bytes += count

    def release(self) -> None:
        """Hold none."""
        self._usage.held -= self._bytes
        self._bytes = 0


_ANSWER = b'data: {"jsonrpc":"2.0","id":'
"""How an event begins that is an answer: nothing follows it but the end of the stream."""
MOST_FIELDS = 200
"""Bytes of other fields before the data of an event."""


class _Meter:
    """Counts the bytes of a request and its answer; an answer that nobody reads is cut off."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.received = 0
        self.sent = 0
        self.whole = False
        """Whether no more of the body comes."""
        self.at_end: Callable[[], None] | None = None
        self._ended = False

    async def receive(self) -> Message:
        """The next message of the client."""
        message = await self._receive()
        self.received += len(message.get("body", b""))
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on a message of the answer. Raises OSError when its reader does not take it."""
        if message["type"] == "http.response.body":
            if self._ended:
                return
            body = message.get("body", b"")
            self.sent += len(body)
            if self.at_end is not None and _ANSWER in body[:MOST_FIELDS]:
                # in one piece with its end: who has read it leaves nothing unread, which is a reset
                message = {**message, "more_body": False}
            self._ended = not message.get("more_body", False)
            with anyio.move_on_after(WRITE_S) as waiting:
                await self._send(message)
            if waiting.cancelled_caught:
                raise ConnectionAbortedError("the client does not read its answer")
            if self._ended and self.at_end is not None:
                with Barrier("taking note of an answer's delivery"):
                    self.at_end()
            return
        await self._send(message)


async def _read(receive: Receive, declared: str, most: int, held: _Held) -> bytes:
    """The body of a call. Raises Refused."""
    if declared.isdecimal() and int(declared) > most:
        raise Refused(413, "body", _too_long(most))
    parts: list[bytes] = []
    total = 0
    with anyio.move_on_after(BODY_S) as reading:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(408, "body", "The request ended before its body did.")
            part = message.get("body", b"")
            total += len(part)
            if total > most:
                raise Refused(413, "body", _too_long(most))
            held.take(len(part))
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                break
    if reading.cancelled_caught:
        raise Refused(408, "body", f"The body did not arrive within {BODY_S:.0f} s.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _skip(headers: Iterable[tuple[bytes, bytes]], meter: _Meter) -> None:
    """Take what is left of a body: who still sends when a connection is closed hears no answer."""
    if any(name == b"expect" for name, _ in headers):  # who asks first sends nothing
        return
    most = meter.received + MOST_SKIPPED
    with anyio.move_on_after(SKIP_S):
        while not meter.whole and meter.received < most:
            await meter.receive()


def values_of(body: bytes) -> int:
    """How many values a message has at most, without reading it as JSON.

    Exact only where there are more than `MOST_VALUES`: texts, which may hold anything, do not
    count.
    """
    found = _separators(body)
    if found <= MOST_VALUES:
        return found
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # only quotes that begin or end a text
    if (quotes := plain.count(b'"')) > 4 * MOST_VALUES:
        return quotes // 2
    return sum(map(_separators, plain.split(b'"')[::2]))


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def installs(body: bytes) -> bool:
    """Whether a message calls the tool `install`."""
    if b'"install"' not in body:
        return False
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, dict) or message.get("method") != "tools/call":
        return False
    params = message.get("params")
    return isinstance(params, dict) and params.get("name") == "install"


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hands a body out that was read before, then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


_NAMES = frozenset(
    {
        b"host",
        b"origin",
        b"authorization",
        b"content-length",
        b"mcp-session-id",
        b"mcp-method",
    }
)


def _needed(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """The headers that the gate looks at. Raises Refused where one that decides comes twice."""
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in _NAMES:
            if name in found:
                raise Refused(400, "host", f"The header {name.decode()} is there twice.")
            found[name] = value.decode("latin-1")
    return found


async def respond(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    """An answer with a JSON object that says what happened."""
    await respond_json(send, status, {"error": text}, headers)


async def respond_json(
    send: Send, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """An answer that is a JSON object."""
    body = json.dumps(value).encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **(headers or {}),
    }
    start = [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _too_long(most: int) -> str:
    return (
        f"A message may have {most // KIB:,} KiB. Put files there with PUT "
        "/sessions/HANDLE/files/PATH, which takes any length, and read them from the code."
    )


_TOO_MANY = (
    f"A message may have {MOST_VALUES:,} values. Put large data there with PUT "
    "/sessions/HANDLE/files/PATH, and read them from the code."
)
_OTHERS_CALL = (
    f"Others call this server, too, and this principal makes more than {CALLS_S:.0f} calls or "
    f"{format_bytes(int(BYTES_S))} of them a second: its next ones wait."
)
_NOT_HERE = (
    "This server is not known by the host that the request names. Behind a proxy it takes "
    "--public-url."
)
_STOPPING = "The server is stopping. Call again when it is back."
_NO_TOKEN = (
    "A token is missing: send `Authorization: Bearer TOKEN`. `kernel-mcp token add NAME` makes one."
)
