"""Whether an answer has reached its client, which a transport alone knows.

A request is known by its id. The transport that writes answers confirms one when the line is
written, and takes that back when the client says afterwards that it had given the request up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeAlias

from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

RequestId: TypeAlias = str | int

MOST_OPEN = 1000
"""Answers that are awaited; those of requests that were given up silently make room."""
MOST_RECENT = 32
"""Delivered answers that may still be taken back."""


class Receipt(Protocol):
    """The fate of one answer."""

    def then(
        self, delivered: Callable[[], object], revoked: Callable[[], object] | None = None
    ) -> None:
        """Have `delivered` called once the answer is with its client.

        `revoked` is called when it turns out afterwards that the client does not look at it.
        """


class Unread:
    """The receipt where nobody can tell: nothing is ever confirmed."""

    def then(
        self, delivered: Callable[[], object], revoked: Callable[[], object] | None = None
    ) -> None:
        """Do nothing."""


UNREAD = Unread()


class Awaited:
    """A receipt of the `Outbox`."""

    def __init__(self) -> None:
        self._delivered: list[Callable[[], object]] = []
        self._revoked: list[Callable[[], object]] = []

    def then(
        self, delivered: Callable[[], object], revoked: Callable[[], object] | None = None
    ) -> None:
        """See `Receipt`."""
        self._delivered.append(delivered)
        if revoked is not None:
            self._revoked.append(revoked)

    def confirm(self) -> None:
        """The answer is with its client; what it told of is needed no more."""
        delivered, self._delivered = self._delivered, []
        for call in delivered:
            call()

    @property
    def revocable(self) -> bool:
        """Whether `revoke` would do anything."""
        return bool(self._revoked)

    def revoke(self) -> None:
        """The client had stopped waiting for it."""
        for call in self._revoked:
            call()


class Outbox:
    """The receipts of one connection by request id."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Awaited] = OrderedDict()
        self._recent: OrderedDict[str, Awaited] = OrderedDict()

    def expect(self, request: RequestId | None) -> Receipt:
        """A new receipt for the answer to `request`."""
        receipt = Awaited()
        if request is not None:
            self._open[str(request)] = receipt
            self._open.move_to_end(str(request))
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return receipt

    def written(self, message: JSONRPCMessage) -> None:
        """Take note of a message that has been written in full."""
        if not isinstance(message, (JSONRPCResponse, JSONRPCError)):
            return
        receipt = self._open.pop(str(message.id), None)
        if receipt is None or isinstance(message, JSONRPCError):
            return
        receipt.confirm()
        self._recent.pop(str(message.id), None)
        if receipt.revocable:
            self._recent[str(message.id)] = receipt
        if len(self._recent) > MOST_RECENT:
            self._recent.popitem(last=False)

    def given_up(self, request: RequestId | None) -> None:
        """Take note that the client has cancelled a request."""
        self._open.pop(str(request), None)
        receipt = self._recent.pop(str(request), None)
        if receipt is not None:
            receipt.revoke()
