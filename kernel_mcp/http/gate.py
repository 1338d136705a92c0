"""ASGI middleware that every request passes first: host, origin, authentication, rate, and body.

It reads the body of a call itself. So the applications behind it see no request that is too long,
too slow, over the rate, or not authenticated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import field
from typing import Any, Protocol

import anyio
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.types import ASGIApp, Receive, Scope, Send

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.http.addresses import Addresses
from kernel_mcp.http.admission import Admission
from kernel_mcp.http.bodies import (
    MOST_BODY,
    MOST_VALUES,
    TOO_MANY,
    BufferedBytes,
    TrafficMeter,
    read_body,
    replayed,
    skip_body,
    values_of,
)
from kernel_mcp.http.connections import ClientConnection, peer_of, state_of
from kernel_mcp.http.delivery import Delivery
from kernel_mcp.http.fair_queue import BYTES_S, CALLS_S, FairQueue, TokenBucket
from kernel_mcp.http.refusals import RequestRefused, respond, respond_json
from kernel_mcp.identity import METRICS, RUN, Principal
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.notifications import DeliveryTracker
from kernel_mcp.units import MIB, format_bytes

PRINCIPAL_BODY = 32 * MIB
"""Default limit on the bytes of one principal's calls that are being read or answered."""
REFUSED_S = 0.5
"""Delay before a call over the rate is refused, which slows clients that retry at once."""
MOST_PRINCIPALS = 10_000
"""Most principals whose rates are kept."""
LATELY_S = 60.0
"""Seconds after its last call for which a principal is active; its rate has recovered by then."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
MCP = "/mcp"
METRICS_PATH = "/metrics"
ANSWERS = "/answers/"
"""Below it are pages for browsers, which log in by HTTP's basic scheme."""
NOTHING = f"There is nothing here. MCP is served at {MCP}."
_WELL_KNOWN = "/.well-known/"
_METADATA = f"{_WELL_KNOWN}oauth-protected-resource"
_WITHOUT_SLASH = {f"{MCP}/": MCP, "/sse/": "/sse"}
"""Paths that are served as another, without a redirect, which would lose or leak the token."""


class GateObserver(Protocol):
    """Observer of what the gate does."""

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """Note a refused request; `principal` is empty if it is not known.

        `reason` is one of `unauthenticated`, `verifier`, `forbidden`, `rate`, `body`, `host`,
        `origin` and `draining`.
        """

    def moved(self, received: int, sent: int) -> None:
        """Note the bytes of one request's body and of its response's body."""


class NullObserver:
    """A `GateObserver` that does nothing."""

    def refused(self, reason: str, peer: str, principal: str) -> None:
        """See `GateObserver`."""

    def moved(self, received: int, sent: int) -> None:
        """See `GateObserver`."""


@dataclass(slots=True)
class PrincipalUsage:
    """Current usage of one principal.

    tokens    calls that its rate limit still permits
    since     when `tokens` was computed
    calls     calls deducted from the rate limit in all
    buffered  bytes of its calls in memory
    user      the principal as the SDK's user; None before its first call
    bucket    its use of the fair share, for `FairQueue`
    """

    tokens: float
    since: float
    calls: int = 0
    buffered: int = 0
    user: AuthenticatedUser | None = None
    bucket: TokenBucket = field(default_factory=TokenBucket)


class Rates(Protocol):
    """Rate-limit counters of principals, shared between the servers of one deployment."""

    def calls_made(self) -> dict[str, int]:
        """Return the calls of each recently active principal since this process began."""

    def made_elsewhere(self, principal: str, calls: int) -> None:
        """Deduct calls that another server has answered from a principal's rate."""


class Gate:
    """ASGI middleware around the application of an HTTP server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        addresses: Addresses,
        admission: Admission,
        quotas: Quotas,
        clock: Callable[[], float],
        deliveries_of: Callable[[str], DeliveryTracker | None],
        observer: GateObserver | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        """Wrap `app`. `deliveries_of` returns the delivery tracker of an MCP session, or None."""
        self._app = app
        self._addresses = addresses
        self._admission = admission
        self._quotas = quotas
        self._clock = clock
        self._deliveries_of = deliveries_of
        self.observer: GateObserver = observer or NullObserver()
        self._usage: OrderedDict[str, PrincipalUsage] = OrderedDict()
        self._sleep = sleep
        self._queue = FairQueue(clock, sleep)
        self.draining = False
        self._calls = 0
        self._transfers: set[anyio.CancelScope] = set()
        self._streams: dict[object, tuple[ClientConnection, str, str]] = {}
        """Long-lived responses: their connection, `Authorization` header and needed scope.

        A connection may have two, when the next request arrives before the last is cleaned up.
        """
        self._idle = anyio.Event()
        self._idle.set()

    @property
    def calls(self) -> int:
        """Number of calls and transfers in progress."""
        return self._calls

    async def drained(self) -> None:
        """Wait until no call or transfer is in progress."""
        await self._idle.wait()

    def cancel_transfers(self) -> int:
        """Cancel uploads and removals in progress, which are then answered with 503.

        Returns their number.
        """
        given_up = len(self._transfers)
        for each in self._transfers:
            each.cancel()
        return given_up

    async def recheck(self) -> None:
        """Cut streams and downloads whose token has expired or been revoked since they began."""
        for connection, authorization, needed in list(self._streams.values()):
            with Barrier("checking the token of a stream"):
                try:
                    await self._admission.authenticate(authorization, needed)
                except RequestRefused as refused:
                    if refused.status in (401, 403):
                        connection.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, and pass it on or refuse it."""
        if scope["type"] != "http":
            return
        peer = peer_of(scope)
        meter = TrafficMeter(receive, send)
        try:
            await self._pass(scope, meter, send, peer)
        except RequestRefused as refused:
            who = state_of(scope).get("principal")
            self.observer.refused(
                refused.reason, peer, who.name if who is not None else refused.principal
            )
            headers = refused.headers
            if refused.status in (408, 413, 503):  # the rest of the request is not read
                headers["connection"] = "close"
            await skip_body(scope["headers"], meter)
            await respond_json(send, refused.status, refused.body, headers)

    async def _pass(self, scope: Scope, meter: TrafficMeter, send: Send, peer: str) -> None:
        path, method = scope["path"], scope["method"]
        if path in _WITHOUT_SLASH:
            path = scope["path"] = _WITHOUT_SLASH[path]
        headers = _needed(scope["headers"])
        if path in OPEN_PATHS:
            await self._app(scope, meter.receive, send)
            return
        if not self._addresses.host(headers.get(b"host", "")):
            raise RequestRefused(421, "host", _NOT_HERE)
        origin = headers.get(b"origin", "")
        if origin and not self._addresses.origin(origin):
            raise RequestRefused(403, "origin", "Pages of this origin may not call this server.")
        metadata = self._admission.metadata
        if metadata is not None and path in (_METADATA, _METADATA + MCP):
            await respond_json(send, 200, metadata)
            return
        if path.startswith(_WELL_KNOWN):  # clients look here for an issuer before they have a token
            await respond(send, 404, NOTHING, {})
            return
        if method == "OPTIONS":
            raise RequestRefused(405, "origin", _NO_PAGES, {"allow": "GET, POST, PUT, DELETE"})
        if self.draining:
            raise RequestRefused(503, "draining", _STOPPING, {"retry-after": "5"})
        state = state_of(scope)
        needed = METRICS if path == METRICS_PATH else RUN
        if path.startswith(ANSWERS):
            login = headers.get(b"authorization", "")
            headers[b"authorization"] = await self._admission.login(login)
        who = state["principal"] = await self._admission.authenticate(
            headers.get(b"authorization", ""), needed
        )
        usage = self._usage_of(who)
        if usage.user is None:
            token = AccessToken(token="", client_id=who.name, scopes=sorted(who.scopes))
            usage.user = AuthenticatedUser(token)
        scope["user"] = usage.user
        quotas = who.quotas.over(self._quotas)
        if method in ("POST", "PUT", "DELETE"):
            try:
                self._admit(usage, quotas)
            except RequestRefused:
                await self._sleep(REFUSED_S)
                raise
        if wait_s := await self._queue.wait(who.name, usage.bucket):
            after = {"retry-after": str(round(wait_s + 0.5))}
            raise RequestRefused(429, "rate", _OTHERS_CALL, after)
        if self.draining:
            raise RequestRefused(503, "draining", _STOPPING, {"retry-after": "5"})
        try:
            if method in ("PUT", "DELETE"):
                await self._transfer(scope, meter)
            elif method != "POST":
                with self._register_stream(state, headers, needed):
                    await self._app(scope, meter.receive, meter.send)
            else:
                await self._call(scope, meter, usage, quotas, headers)
        finally:
            self.observer.moved(meter.received, meter.sent)

    async def _transfer(self, scope: Scope, meter: TrafficMeter) -> None:
        """Pass on an upload or removal, which `cancel_transfers` can cancel."""
        self._begin()
        try:
            with anyio.CancelScope() as transfer:
                self._transfers.add(transfer)
                try:
                    await self._app(scope, meter.receive, meter.send)
                finally:
                    self._transfers.discard(transfer)
            if transfer.cancelled_caught and not meter.begun:
                await respond(meter.send, 503, _GIVEN_UP, {"connection": "close"})
        finally:
            self._end()

    async def _call(
        self,
        scope: Scope,
        meter: TrafficMeter,
        usage: PrincipalUsage,
        quotas: Quotas,
        headers: Mapping[bytes, str],
    ) -> None:
        """Read the body of a POST, then pass it on. Raises RequestRefused."""
        most = PRINCIPAL_BODY if quotas.body is None else quotas.body
        room = MOST_BODY if not most else min(MOST_BODY, most)
        state = state_of(scope)
        held = BufferedBytes(usage, most)
        self._begin()
        try:
            body = await read_body(meter.receive, headers.get(b"content-length", ""), room, held)
            usage.bucket.read(len(body))
            if values_of(body) > MOST_VALUES:
                raise RequestRefused(413, "body", TOO_MANY)
            self._admission.require_scopes(
                state["principal"], headers.get(b"authorization", ""), body
            )
            mcp_session = headers.get(b"mcp-session-id", "")
            deliveries = self._deliveries_of(mcp_session)
            delivery = Delivery(state.get("connection"), deliveries)
            state["delivery"] = delivery
            # for handshake clients the header is not compared with the body
            long = not mcp_session and headers.get(b"mcp-method", "") == "subscriptions/listen"
            if long:  # lasts until its client ends it: a drain does not wait
                self._end()
            try:
                meter.at_end = delivery.sent
                with self._register_stream(state, headers, RUN) if long else nullcontext():
                    await self._app(scope, replayed(body, meter.receive), meter.send)
            finally:
                with Barrier("taking note of an answer's delivery"):
                    delivery.over()
                if long:
                    self._begin()
        finally:
            held.release()
            self._end()

    @contextmanager
    def _register_stream(
        self, state: Mapping[str, Any], headers: Mapping[bytes, str], needed: str
    ) -> Iterator[None]:
        """Register a long-lived response inside this block: `recheck` verifies its token."""
        connection: ClientConnection | None = state.get("connection")
        if connection is None or self._admission.verifier is None:
            yield
            return
        answer = object()
        self._streams[answer] = connection, headers.get(b"authorization", ""), needed
        try:
            yield
        finally:
            del self._streams[answer]

    def _begin(self) -> None:
        if not self._calls:
            self._idle = anyio.Event()
        self._calls += 1

    def _end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._idle.set()

    def _usage_of(self, who: Principal) -> PrincipalUsage:
        usage = self._usage.get(who.name)
        if usage is None:
            usage = self._usage[who.name] = PrincipalUsage(math.inf, self._clock())
            if len(self._usage) > MOST_PRINCIPALS:
                self._usage.popitem(last=False)
        else:
            self._usage.move_to_end(who.name)
        return usage

    def _admit(self, usage: PrincipalUsage, quotas: Quotas) -> None:
        """Deduct one call from a principal's rate.

        Raises RequestRefused (429) if there is none left.
        """
        if not quotas.rate:
            return
        now, most = self._clock(), max(1.0, quotas.rate)
        usage.tokens = min(most, usage.tokens + (now - usage.since) * quotas.rate)
        usage.since = now
        if usage.tokens < 1:
            wait_s = (1 - usage.tokens) / quotas.rate
            raise RequestRefused(
                429,
                "rate",
                f"More than {quotas.rate:g} calls a second of one principal (its quota `rate`): "
                "wait a moment, then call again.",
                {"retry-after": str(max(1, round(wait_s + 0.5)))},
            )
        usage.tokens -= 1
        usage.calls += 1

    def calls_made(self) -> dict[str, int]:
        """See `Rates`."""
        last = self._clock() - LATELY_S
        found = self._usage.items()
        return {name: each.calls for name, each in found if each.calls and each.since > last}

    def made_elsewhere(self, principal: str, calls: int) -> None:
        """See `Rates`."""
        if (usage := self._usage.get(principal)) is not None:
            usage.tokens -= calls


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
    """Return the headers that the gate uses.

    Raises RequestRefused (400) if one of them occurs twice.
    """
    found: dict[bytes, str] = {}
    for name, value in headers:
        if name in _NAMES:
            if name in found:
                raise RequestRefused(400, "host", f"The header {name.decode()} is there twice.")
            found[name] = value.decode("latin-1")
    return found


_OTHERS_CALL = (
    f"Others call this server, too, and this principal makes more than {CALLS_S:.0f} calls or "
    f"{format_bytes(int(BYTES_S))} of them a second: its next ones wait."
)
_NOT_HERE = (
    "This server is not known by the host that the request names. Behind a proxy it takes "
    "--public-url."
)
_NO_PAGES = (
    "Pages in a browser may not call this server: it answers no preflight and sends no CORS "
    "headers (docs/http.md)."
)
_STOPPING = "The server is stopping. Call again when it is back."
_GIVEN_UP = (
    "The server is stopping, so this was given up before its end: the file is as it was. Send it "
    "again when the server is back."
)
