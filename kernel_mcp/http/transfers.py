"""Streamed bodies, in both directions: their number, threads and timeouts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kernel_mcp.barriers import log_failure
from kernel_mcp.output.text import Masks
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.units import KIB

PIECE_BYTES = 128 * KIB
"""Bytes read from a file at once, and buffered for a slow client."""
BATCH_BYTES = 512 * KIB
"""Bytes of a body that are collected before they are written."""
IDLE_S = 60.0
"""Seconds without progress after which a transfer is ended."""
LINGER_S = 2.0
"""Seconds for a client to notice that its body was refused."""
MOST = 256
MOST_OF_ONE = 16
"""Concurrent transfers of all principals, and of one."""
THREADS_OF_ONE = 4

T = TypeVar("T")
HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
}
FRESH = {"cache-control": "private, no-store"}


class RequestFailed(Exception):
    """A request fails with an HTTP status; the message is for the client."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = dict(headers or {})


class _PrincipalTransfers:
    """One principal's number of transfers, and the limit on their threads."""

    def __init__(self) -> None:
        self.count = 0
        self.threads = anyio.CapacityLimiter(THREADS_OF_ONE)


class Work:
    """Blocking work of one transfer, in threads of its principal."""

    def __init__(self, threads: anyio.CapacityLimiter) -> None:
        self._threads = threads

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a thread and return its result.

        It is awaited even if the request is cancelled meanwhile.
        """
        with anyio.CancelScope(shield=True):
            return await anyio.to_thread.run_sync(partial(function, *args), limiter=self._threads)
        raise AssertionError("nothing cancels what is shielded")


class Transfers:
    """Limits concurrent transfers, in all and for each principal."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._count = 0
        self._own: dict[str, _PrincipalTransfers] = {}

    @contextmanager
    def one(self, principal: str) -> Iterator[Work]:
        """Count one transfer inside this block.

        Raises RequestFailed (429, 503) if there are too many.
        """
        own = self._own.get(principal) or _PrincipalTransfers()
        if own.count >= self._most_of_one:
            raise RequestFailed(
                429,
                f"{own.count} transfers of this principal are under way: wait for one to end.",
                {"retry-after": "2"},
            )
        if self._count >= self._most:
            raise RequestFailed(
                503, f"{self._count} transfers are under way: try again.", {"retry-after": "5"}
            )
        self._own[principal] = own
        own.count += 1
        self._count += 1
        try:
            yield Work(own.threads)
        finally:
            own.count -= 1
            self._count -= 1
            if not own.count:
                del self._own[principal]


@dataclass(frozen=True, slots=True)
class RouteContext:
    """Context of the routes. A transfer without progress for `idle_s` seconds is ended."""

    manager: SessionManager
    caller_of: Callable[[Request], Caller]
    masks: Masks
    transfers: Transfers
    idle_s: float

    def begin(self, request: Request, stack: ExitStack) -> tuple[Caller, Work]:
        """Return the caller of a request, and a transfer that counts until `stack` is closed.

        Raises RequestFailed if there are too many.
        """
        caller = self.caller_of(request)
        return caller, stack.enter_context(self.transfers.one(caller.who.name))


class Json(Response):
    """A response with a JSON object."""

    def __init__(
        self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            json.dumps(value),
            status,
            {**HEADERS, **FRESH, **(headers or {})},
            "application/json",
        )


class ErrorResponse(Json):
    """An error response to a request whose body may still be arriving."""

    def __init__(self, failed: RequestFailed, linger_s: float) -> None:
        headers = {"connection": "close", **failed.headers}
        super().__init__(failed.status, {"error": str(failed)}, headers)
        self._linger_s = linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then read on: a client may read it only after sending its body."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with anyio.move_on_after(self._linger_s):
            while (message := await receive())["type"] != "http.disconnect":
                if not message.get("more_body", False):
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamedResponse(Response):
    """A response whose pieces `more` returns one by one, empty at the end.

    The connection is cut if `more` fails, or if there are fewer than `length` bytes. `done` is
    closed at the end.
    """

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        *,
        more: Callable[[], bytes],
        work: Work,
        done: ExitStack,
        length: int | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        super().__init__(None, status)
        given = {**HEADERS, **headers}
        if length is not None:
            given["content-length"] = str(length)
        self.init_headers(given)
        if length is None:
            del self.headers["content-length"]
        self._more = more
        self._work = work
        self._done = done
        self._left = length
        self._idle_s = idle_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; stop if the client disconnects."""
        whole = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                whole = await self._send(scope, send)
                tasks.cancel_scope.cancel()
            if not whole:
                await _cut(scope, receive)
        finally:
            await self._work.run(self._done.close)

    async def _send(self, scope: Scope, send: Send) -> bool:
        """Send the response. Return False if it is incomplete or the client stalled."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        while self._left is None or self._left > 0:
            try:
                data = await self._work.run(self._more)
            except Exception as error:  # noqa: BLE001  # the answer has begun: cut off, and logged
                log_failure(error, "sending a file")
                return False
            if self._left is not None:
                self._left -= len(data)
            if not data:
                break
            with anyio.move_on_after(self._idle_s) as waiting:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if waiting.cancelled_caught:
                return False
        if self._left:
            return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _cut(scope: Scope, receive: Receive) -> None:
    """Abort the connection of an incomplete response, and wait for its end."""
    connection = scope.get("state", {}).get("connection")
    if connection is None:
        raise ConnectionAbortedError("an answer cannot be sent to its end")
    connection.close()
    while (await receive())["type"] != "http.disconnect":
        pass


async def batches(request: Request, idle_s: float = IDLE_S) -> AsyncIterator[bytes]:
    """Yield a body in pieces of about `BATCH_BYTES`.

    `request.state.whole` is set to True when all of it was received. Raises RequestFailed if the
    body breaks off (400), or stalls for `idle_s` seconds (408).
    """
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        with anyio.move_on_after(idle_s) as waiting:
            message = await request.receive()
        if waiting.cancelled_caught:
            raise RequestFailed(
                408, f"Nothing of the body came for {idle_s:g} s: nothing was changed."
            )
        if message["type"] == "http.disconnect":
            raise RequestFailed(400, "The request ended before its body did: nothing was changed.")
        if part := message.get("body", b""):
            parts.append(part)
            size += len(part)
        more = message.get("more_body", False)
        request.state.whole = not more
        if size >= BATCH_BYTES or (parts and not more):
            whole, parts, size = b"".join(parts), [], 0
            yield whole


def of_text(pieces: Iterable[str]) -> Callable[[], bytes]:
    """Return a `more` for `StreamedResponse`: the text's next bytes, empty only at the end."""
    found = iter(pieces)

    def more() -> bytes:
        return next((data for each in found if (data := each.encode(errors=ERRORS))), b"")

    return more


ERRORS = "surrogateescape"
"""Codec error handler by which bytes that are not UTF-8 are preserved in a text."""

Endpoint = Callable[[Request], Awaitable[Response]]
