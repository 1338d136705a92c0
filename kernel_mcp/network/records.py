"""Reports of ended connections to the server, one by one or, in a flood, summed up."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernel_mcp.network.http import ProxyRefusal
from kernel_specs.template import packets


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received, and duration, of a connection or of one request on it."""

    up: int
    down: int
    seconds: float


class Records:
    """Reports to the server how connections ended: at once, or summed up during a flood."""

    _BURST, _RATE = 40, 10.0
    """Token bucket of one listener: reports at once, and reports per second."""
    _KINDS = 16
    """Distinct sums kept for one listener; further ones are added to a sum without a host."""
    _FLUSHED = 100
    """Sums sent in one flush."""

    def __init__(self, control: socket.socket, clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock
        self._allowed: dict[int, tuple[float, float]] = {}
        self._kept: dict[tuple[int, str, int, str, str], list[float]] = {}

    def add(
        self, number: int, target: tuple[str, int], refusal: ProxyRefusal | None, used: Traffic
    ) -> None:
        """Report an ended connection of listener `number`; a `refusal` of None means success."""
        verdict, words = ("ok", "") if refusal is None else (refusal.verdict, refusal.message[:300])
        key = (number, *target, verdict, words)
        once = [1, used.up, used.down, used.seconds]
        if key not in self._kept and self._may_send(number) and self._send(key, once):
            return
        if key not in self._kept and sum(each[0] == number for each in self._kept) >= self._KINDS:
            key = (number, "…", 0, verdict, "")
        sums = self._kept.setdefault(key, [0, 0, 0, 0.0])
        for index, value in enumerate(once):
            sums[index] += value

    def flush(self, number: int | None = None) -> None:
        """Send sums that were collected, at most `_FLUSHED` a call.

        With `number`, only those of that listener, which has closed: its state is removed.
        """
        for key in [key for key in self._kept if number in (None, key[0])][: self._FLUSHED]:
            if not self._send(key, self._kept[key]):
                return
            del self._kept[key]
        if number is not None:
            self._allowed.pop(number, None)

    def _may_send(self, number: int) -> bool:
        now = self._clock()
        left, since = self._allowed.get(number, (self._BURST, now))
        left = min(left + (now - since) * self._RATE, self._BURST)
        self._allowed[number] = (max(left - 1, 0.0), now)
        return left >= 1

    def _send(self, key: tuple[int, str, int, str, str], sums: Sequence[float]) -> bool:
        number, host, port, verdict, words = key
        count, up, down, seconds = sums
        told = {"end": number, "host": host, "port": port, "verdict": verdict, "why": words}
        told |= {"up": up, "down": down, "seconds": round(seconds, 3), "count": count}
        try:
            packets.send(self._control, told)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the server has gone, and this process exits
        return True
