"""The answer to one request in the making: what it carries is told once it has been delivered."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_mcp.delivery import UNREAD, Receipt
from kernel_mcp.sessions.ledger import Ledger, Notice


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
