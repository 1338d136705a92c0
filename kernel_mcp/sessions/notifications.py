"""Notices of a session, each pending until an answer that includes it was delivered.

Only the transport can confirm a delivery. It confirms the receipt for a request id once the answer
is written. It revokes the receipt if the client reports that it had cancelled the request.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kernel_mcp.records import dataclass

if TYPE_CHECKING:
    from mcp_types import JSONRPCMessage

RequestId: TypeAlias = str | int

MOST_OPEN = 1000
"""Maximum number of open receipts; beyond it the oldest are dropped."""
MOST_RECENT = 32
"""Maximum number of delivered answers that can still be revoked."""


class Receipt(Protocol):
    """A delivery receipt of one answer."""

    def then(
        self,
        delivered: Callable[[], object],
        revoked: Callable[[], object] | None = None,
        cancelled: Callable[[], object] | None = None,
    ) -> None:
        """Call `delivered` once the answer is written, and `revoked` if it never arrived.

        `cancelled` is called instead if the client cancels a call whose answer was written.
        """


class NoReceipt:
    """A receipt without a transport: nothing is ever confirmed."""

    def then(
        self,
        delivered: Callable[[], object],
        revoked: Callable[[], object] | None = None,
        cancelled: Callable[[], object] | None = None,
    ) -> None:
        """Do nothing."""


NO_RECEIPT = NoReceipt()


class PendingReceipt:
    """A receipt of the `DeliveryTracker`."""

    def __init__(self) -> None:
        self._delivered: list[Callable[[], object]] = []
        self._revoked: list[Callable[[], object]] = []
        self._cancelled: list[Callable[[], object]] = []
        self._lost = False

    def then(
        self,
        delivered: Callable[[], object],
        revoked: Callable[[], object] | None = None,
        cancelled: Callable[[], object] | None = None,
    ) -> None:
        """See `Receipt`."""
        if self._lost:
            if revoked is not None:
                revoked()
            return
        self._delivered.append(delivered)
        if revoked is not None:
            self._revoked.append(revoked)
        if cancelled is not None:
            self._cancelled.append(cancelled)

    def confirm(self) -> None:
        """Call the `delivered` callbacks, once."""
        delivered, self._delivered = self._delivered, []
        for call in delivered:
            call()

    @property
    def revocable(self) -> bool:
        """True if `revoke` would call anything."""
        return bool(self._revoked)

    def revoke(self) -> None:
        """Call the `revoked` callbacks."""
        for call in self._revoked:
            call()

    def cancel(self) -> None:
        """Call the `cancelled` callbacks."""
        for call in self._cancelled:
            call()

    def lose(self) -> None:
        """Call the `revoked` callbacks, now and when added later: the client has disconnected."""
        self._delivered, self._lost = [], True
        self.revoke()


class DeliveryTracker:
    """The receipts of one connection, by request id."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, PendingReceipt] = OrderedDict()
        self._recent: OrderedDict[str, PendingReceipt] = OrderedDict()

    def expect(self, request: RequestId | None) -> Receipt:
        """Return a new receipt for the answer to `request`; without an id it is never confirmed."""
        receipt = PendingReceipt()
        if request is not None:
            self._open[str(request)] = receipt
            self._open.move_to_end(str(request))
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        return receipt

    def written(self, message: JSONRPCMessage) -> None:
        """Confirm the receipt of an answer that was written in full."""
        from mcp_types import JSONRPCError, JSONRPCResponse  # part of the SDK: deferred import

        if isinstance(message, JSONRPCResponse):
            self.delivered(message.id)
        elif isinstance(message, JSONRPCError):
            self._open.pop(str(message.id), None)

    def delivered(self, request: RequestId | None) -> None:
        """Confirm the receipt of the answer to `request`."""
        receipt = self._open.pop(str(request), None)
        if receipt is None:
            return
        receipt.confirm()
        self._recent.pop(str(request), None)
        if receipt.revocable:
            self._recent[str(request)] = receipt
        if len(self._recent) > MOST_RECENT:
            self._recent.popitem(last=False)

    def lost(self, request: RequestId | None) -> None:
        """Note that the client disconnected before the answer to `request` was written."""
        receipt = self._open.pop(str(request), None)
        if receipt is not None:
            receipt.lose()

    def given_up(self, request: RequestId | None) -> None:
        """Revoke the receipt of a request whose answer cannot have arrived."""
        self._open.pop(str(request), None)
        receipt = self._recent.pop(str(request), None)
        if receipt is not None:
            receipt.revoke()

    def cancelled(self, request: RequestId | None) -> None:
        """Note that the client cancelled a request, perhaps after its answer has arrived.

        Clients cancel answered requests too, so only losses of variables are reported again.
        """
        self._open.pop(str(request), None)
        receipt = self._recent.pop(str(request), None)
        if receipt is not None:
            receipt.cancel()


MOST_NAMES = 500
"""Maximum number of names in one loss; further ones are counted."""
MOST_PENDING = 16
"""Maximum number of pending notices; beyond it the oldest are replaced by their count."""
MOST_LOSSES = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """Lost variables: the cause, known names, and in `more` the number of further ones.

    With `kept` the other variables exist, in an earlier state.
    """

    cause: str
    names: tuple[str, ...] = ()
    more: int = 0
    kept: bool = False

    @classmethod
    def of(cls, cause: str, names: Iterable[str], more: int = 0) -> Loss:
        """Return a loss with at most `MOST_NAMES` names; further ones are counted."""
        known = tuple(names)
        return cls(cause, known[:MOST_NAMES], more + max(0, len(known) - MOST_NAMES))


def together(losses: Iterable[Loss | None]) -> Loss | None:
    """Return one loss with the cause of the last one and the names of all; None without losses."""
    found = [each for each in losses if each is not None]
    if not found:
        return None
    names = dict.fromkeys(name for each in found for name in each.names)
    loss = Loss.of(found[-1].cause, names, sum(each.more for each in found))
    return replace(loss, kept=all(each.kept for each in found))


@dataclass(frozen=True, slots=True, eq=False)
class Notice:
    """A sentence for one answer. `number` is its position among a session's notices, from 1."""

    number: int
    text: str
    loss: Loss | None = None


class NotificationQueue:
    """The notices of one session. `last_loss` is the last loss that was delivered."""

    def __init__(self) -> None:
        self.number = 0
        self._pending: list[Notice] = []
        self._losses: list[Notice] = []
        self._delivered: deque[Notice] = deque(maxlen=MOST_RECENT * MOST_PENDING)
        self._taken = self._settled = 0
        self.last_loss: Notice | None = None
        self._forgotten = 0

    @property
    def pending(self) -> tuple[Notice, ...]:
        """Notices that no delivered answer has included, oldest first."""
        if not self._forgotten:
            return tuple(self._pending)
        text = f"{self._forgotten} earlier notices of this session were never delivered"
        return (Notice(0, text), *self._pending)

    def with_pending(self, loss: Loss) -> Loss:
        """Return `loss` with the names of all pending losses before it."""
        losses = [*(notice.loss for notice in self._pending if notice.loss is not None), loss]
        names = dict.fromkeys(name for each in losses for name in each.names)
        return Loss.of(loss.cause, names, sum(each.more for each in losses))

    def add(self, text: str, loss: Loss | None = None) -> Notice:
        """Add a pending notice."""
        self.number += 1
        notice = Notice(self.number, text, loss)
        self._pending.append(notice)
        if len(self._pending) > MOST_PENDING:
            del self._pending[0]
            self._forgotten += 1
        if loss is not None:
            self._losses = [*self._losses, notice][-MOST_LOSSES:]
        return notice

    def take_losses(self, since: int) -> list[Notice]:
        """Return the losses that the answer to a cell which begins now must report.

        `since` is the number of the last notice when the cell was submitted. All later losses are
        included. Earlier ones are included too, unless a cell has begun since or the answer of the
        cell that caused them has reported them.
        """
        first = min(since, max(self._taken, self._settled))
        self._taken = self.number
        return [notice for notice in self._losses if notice.number > first]

    def losses_after(self, number: int) -> list[Notice]:
        """Return the losses after notice `number`, delivered or not."""
        return [notice for notice in self._losses if notice.number > number]

    def mark_delivered(self, notices: Iterable[Notice]) -> None:
        """Remove notices that a delivered answer has included."""
        for notice in notices:
            if notice is self.last_loss:
                self.last_loss = None
            if notice.number == 0:
                self._forgotten = 0
            if notice in self._pending:
                self._pending.remove(notice)
                self._delivered.append(notice)
                self.last_loss = notice if notice.loss is not None else self.last_loss

    def mark_undelivered(self, notices: Sequence[Notice]) -> None:
        """Make notices of a revoked answer pending again, but for those withdrawn meanwhile."""
        told = [notice for notice in notices if notice in self._delivered]
        back = [notice for notice in told if notice not in self._pending]
        self._pending = sorted([*self._pending, *back], key=lambda notice: notice.number)

    def mark_reported_by_cell(self, notice: Notice) -> None:
        """Note that the cell which caused a loss has reported it: later cells do not."""
        self._settled = max(self._settled, notice.number)

    def withdraw(self, notice: Notice | None) -> None:
        """Remove a notice that a later one replaces."""
        self._pending = [each for each in self._pending if each is not notice]
        self._losses = [each for each in self._losses if each is not notice]

    def take_over(self, by: NotificationQueue, name: str) -> None:
        """Drop pending losses, and add the notices of `by`, whose variables are used from now on.

        Each added notice begins with `name`, which describes the origin.
        """
        self._pending = [each for each in self._pending if each.loss is None]
        self.accept_losses()
        for notice in by.pending:
            by.withdraw(notice)
            self.add(f"Of {name}: {notice.text}", notice.loss)

    def accept_losses(self) -> None:
        """Note that the losses so far were requested: later cells do not report them."""
        self._taken = self.number


class ResponseContext:
    """The notices that one answer includes; `receipt` reports its delivery."""

    def __init__(self, receipt: Receipt = NO_RECEIPT) -> None:
        self.receipt = receipt
        self.preamble = ""
        """Text before the answer; empty for none."""
        self.remarks: list[str] = []
        """Sentences after the answer that are about the caller, not about the session."""
        self._attached: list[Notice] = []
        self._claimed: list[object] = []

    def claim(self, part: object) -> bool:
        """Return True unless this answer includes `part` already."""
        new = part not in self._claimed
        self._claimed.append(part)
        return new

    def attach(self, notifications: NotificationQueue, notices: Sequence[Notice]) -> None:
        """Attach notices of a session; they count as delivered once this answer is."""
        if notices:
            self._attached += notices
            losses = [each for each in notices if each.loss is not None]
            self.receipt.then(
                lambda: notifications.mark_delivered(notices),
                lambda: notifications.mark_undelivered(notices),
                lambda: notifications.mark_undelivered(losses),
            )

    def includes(self, notice: Notice) -> bool:
        """Return True if this answer includes `notice`."""
        return notice in self._attached
