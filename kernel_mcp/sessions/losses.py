"""What a session has to tell: each notice until an answer that carries it was delivered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_mcp.sessions.delivery import UNREAD, Receipt

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
