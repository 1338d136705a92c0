"""Rates of principals over all fronts of a fleet: each counts what the others have answered."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from kernel_mcp.http.gate import Rates


class SharedRates:
    """Takes calls that other fronts have answered from the rates of principals at one front."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._front = secrets.token_hex(8)
        self._known: Mapping[str, Mapping[str, int]] = {}

    async def share(self, rates: Rates) -> None:
        """Tell the registry, and hear of it, what principals that call here have called.

        What is heard of first is what counts begin with: those of a front go on as long as it runs,
        and come again when a principal calls there again, or the registry has started again.
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
