"""Which answers have reached a living caller.

What an answer tells counts as told when its last byte was sent on a connection that was there, and
is taken back when that ends by a reset: the client had not read it. In the handshake era a client
may also say later that it had cancelled.
"""

from __future__ import annotations

from kernel_mcp.http.connections import Connection
from kernel_mcp.sessions.losses import Awaited, Outbox, Receipt, RequestId


class Delivery:
    """The delivery of the answer to one POST; `outbox` is that of its MCP session, if any."""

    def __init__(self, connection: Connection | None, outbox: Outbox | None = None) -> None:
        self._connection = connection
        self._outbox = outbox
        self._request: RequestId | None = None
        self._receipt: Awaited | None = None
        self._sent = False

    def expect(self, request: RequestId | None) -> Receipt:
        """The receipt of the answer to the call in it."""
        if self._outbox is not None:
            self._request = request
            return self._outbox.expect(request)
        if self._receipt is None:
            self._receipt = Awaited()
        return self._receipt

    def sent(self) -> None:
        """Its last byte was handed to the system."""
        if self._connection is None or not self._connection.alive:
            return
        self._sent = True
        self._connection.unread = self.revoke
        if self._outbox is not None:
            self._outbox.delivered(self._request)
        elif self._receipt is not None:
            self._receipt.confirm()

    def over(self) -> None:
        """Nothing is sent any more: without its last byte the answer has reached nobody."""
        if self._sent:
            return
        if self._outbox is not None:
            self._outbox.lost(self._request)
        elif self._receipt is not None:
            self._receipt.lose()

    def revoke(self) -> None:
        """The connection was reset after that."""
        if self._outbox is not None:
            self._outbox.given_up(self._request)
        elif self._receipt is not None:
            self._receipt.revoke()


class Later:
    """The delivery of answers that come on another connection, as those of HTTP+SSE do."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def expect(self, request: RequestId | None) -> Receipt:
        """The receipt of the answer to a call."""
        return self._outbox.expect(request)
