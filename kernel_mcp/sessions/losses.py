"""What a session has to tell: each notice until an answer that carries it was delivered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

# Whether an answer has reached its client, which a transport alone knows.
#
# A request is known by its id. The transport that writes answers confirms one when the line is
# written, and takes that back when the client says afterwards that it had given the request up.

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


MOST_NAMES = 500
"""Names of lost variables that are kept; the rest is counted."""
MOST_PENDING = 16
"""Notices that wait to be told; of more, the oldest give way to the count of them."""
MOST_LOSSES = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """Variables that are gone: why, in a few words, and their names as far as they are known.

    `more` counts those without a name here.
    """

    cause: str
    names: tuple[str, ...] = ()
    more: int = 0

    @classmethod
    def of(cls, cause: str, names: Iterable[str], more: int = 0) -> Loss:
        """A loss with no more than `MOST_NAMES` names."""
        known = tuple(names)
        return cls(cause, known[:MOST_NAMES], more + max(0, len(known) - MOST_NAMES))


@dataclass(frozen=True, slots=True, eq=False)
class Notice:
    """Something to tell, once; `number` counts the notices of a session."""

    number: int
    text: str
    loss: Loss | None = None


class Ledger:
    """The notices of one session."""

    def __init__(self) -> None:
        self.number = 0
        self._pending: list[Notice] = []
        self._losses: list[Notice] = []
        self._placed = self._settled = 0
        self._again: Notice | None = None
        self._forgotten = 0

    @property
    def pending(self) -> tuple[Notice, ...]:
        """What no delivered answer has told, oldest first."""
        if not self._forgotten:
            return tuple(self._pending)
        text = f"{self._forgotten} earlier notices of this session were never delivered"
        return (Notice(0, text), *self._pending)

    @property
    def again(self) -> Notice | None:
        """The loss that was told last, for a list of what there is, once."""
        return self._again

    def with_pending(self, loss: Loss) -> Loss:
        """`loss` and, before it, what is still to be told: for an answer that tells all of it."""
        losses = [*(notice.loss for notice in self._pending if notice.loss is not None), loss]
        names = dict.fromkeys(name for each in losses for name in each.names)
        return Loss.of(loss.cause, names, sum(each.more for each in losses))

    def add(self, text: str, loss: Loss | None = None) -> Notice:
        """Have the next answer tell this."""
        self.number += 1
        notice = Notice(self.number, text, loss)
        self._pending.append(notice)
        if len(self._pending) > MOST_PENDING:
            del self._pending[0]
            self._forgotten += 1
        if loss is not None:
            self._losses = [*self._losses, notice][-MOST_LOSSES:]
        return notice

    def place(self, since: int) -> list[Notice]:
        """The losses that a cell which begins now runs after.

        Those that no cell has run after yet and that were not told by the cell whose doing they
        were, and all since the notice `since`, the last one when the cell was handed in.
        """
        first = min(since, max(self._placed, self._settled))
        self._placed = self.number
        return [notice for notice in self._losses if notice.number > first]

    def told(self, notices: Iterable[Notice]) -> None:
        """Note that an answer which carries these was delivered."""
        for notice in notices:
            if notice is self._again:
                self._again = None
            if notice.number == 0:
                self._forgotten = 0
            if notice in self._pending:
                self._pending.remove(notice)
                self._again = notice if notice.loss is not None else self._again

    def untold(self, notices: Sequence[Notice]) -> None:
        """Note that nobody has read the answer with these after all."""
        back = [notice for notice in notices if notice.number and notice not in self._pending]
        self._pending = sorted([*self._pending, *back], key=lambda notice: notice.number)

    def told_by_its_cell(self, notice: Notice) -> None:
        """Note that the cell whose doing it was has told it: those handed in from now on do not."""
        self._settled = max(self._settled, notice.number)

    def withdraw(self, notice: Notice | None) -> None:
        """Tell something no more, because a later notice says it better."""
        self._pending = [each for each in self._pending if each is not notice]
        self._losses = [each for each in self._losses if each is not notice]

    def forgive(self) -> None:
        """No later cell runs after what was lost so far: all has been given up on request."""
        self._placed = self.number


# The answer to one request in the making: what it carries is told once it has been delivered.


class Reply:
    """What one answer tells. `receipt` learns whether it was delivered."""

    def __init__(self, receipt: Receipt = UNREAD) -> None:
        self.receipt = receipt
        self._carried: list[Notice] = []

    def carry(self, ledger: Ledger, notices: Sequence[Notice]) -> None:
        """Count `notices` as told when this answer is delivered."""
        if notices:
            self._carried += notices
            self.receipt.then(lambda: ledger.told(notices), lambda: ledger.untold(notices))

    def carries(self, notice: Notice) -> bool:
        """Whether this answer tells `notice` already."""
        return notice in self._carried
