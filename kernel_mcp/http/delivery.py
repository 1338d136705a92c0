"""Tracking of which responses were delivered.

A response counts as delivered when its last byte was sent on an open connection. This is revoked if
the connection is reset afterwards, as the client had not read it. With an MCP session (handshake
era) a client may also report later that it had cancelled the request.
"""

from __future__ import annotations

from kernel_mcp.http.connections import ClientConnection
from kernel_mcp.sessions.notifications import DeliveryTracker, PendingReceipt, Receipt, RequestId


class Delivery:
    """Delivery of the response to one POST; `deliveries` is that of its MCP session, if any."""

    def __init__(
        self, connection: ClientConnection | None, deliveries: DeliveryTracker | None = None
    ) -> None:
        self._connection = connection
        self._deliveries = deliveries
        self._request: RequestId | None = None
        self._receipt: PendingReceipt | None = None
        self._sent = False

    def expect(self, request: RequestId | None) -> Receipt:
        """Return the receipt of the response to this call, which is settled later."""
        if self._deliveries is not None:
            self._request = request
            return self._deliveries.expect(request)
        if self._receipt is None:
            self._receipt = PendingReceipt()
        return self._receipt

    def sent(self) -> None:
        """Mark the response as delivered, as its last byte was handed to the system.

        On a connection that has ended, nothing is marked.
        """
        if self._connection is None or not self._connection.alive:
            return
        self._sent = True
        self._connection.unread = self.revoke
        if self._deliveries is not None:
            self._deliveries.delivered(self._request)
        elif self._receipt is not None:
            self._receipt.confirm()

    def over(self) -> None:
        """Mark the response as lost if its last byte was not sent. The request is finished.

        Without a connection nothing is known of it.
        """
        if self._sent or self._connection is None:
            return
        if self._deliveries is not None:
            self._deliveries.lost(self._request)
        elif self._receipt is not None:
            self._receipt.lose()

    def revoke(self) -> None:
        """Revoke the delivery, as the connection was reset."""
        if self._deliveries is not None:
            self._deliveries.given_up(self._request)
        elif self._receipt is not None:
            self._receipt.revoke()


class SseDelivery:
    """Delivery of responses on another connection, as with HTTP+SSE."""

    def __init__(self, deliveries: DeliveryTracker) -> None:
        self._deliveries = deliveries

    def expect(self, request: RequestId | None) -> Receipt:
        """Return the receipt of the response to a call, which is settled later."""
        return self._deliveries.expect(request)
