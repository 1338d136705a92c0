"""Rate limits over all fronts of a fleet: each front counts the calls of the others, too."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from kernel_mcp.http.gate import Rates


class SharedRates:
    """Deducts calls that other fronts have answered from the rates at this front."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._front = secrets.token_hex(8)
        self._known: Mapping[str, Mapping[str, int]] = {}

    async def share(self, rates: Rates) -> None:
        """Report the calls at this front, and deduct new calls at the others.

        The first count received for a front and principal is the baseline, from which later ones
        are measured. Counts grow as long as a front runs. They reappear when a principal calls
        there again, or when the registry has restarted.
        """
        if not (own := rates.calls_made()):
            self._known = {}
            return
        others = await self._registry.spent.remote(self._front, own)
        for front, spent in others.items():
            before = self._known.get(front, {})
            for principal, calls in spent.items():
                if (more := calls - before.get(principal, calls)) > 0:
                    rates.made_elsewhere(principal, more)
        self._known = others
