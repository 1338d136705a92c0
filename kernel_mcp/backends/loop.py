"""The thread of a back-end: whatever its code does, the server and other sessions go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio

from kernel_mcp.errors import KernelMcpError, LaunchError
from kernel_mcp.output.text import one_line

T = TypeVar("T")

MOST_REASON_CHARS = 500
MOST_REASONS = 5


class BackendLoop:
    """An event loop in a thread of its own, which ends with the server's process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        threading.Thread(target=run, name=f"backend {name}", daemon=True).start()

    async def call(self, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Await `work` in that thread, and return its result.

        Raises LaunchError for whatever it raises, and after `timeout_s` seconds. It is cancelled
        then, and not awaited any longer.
        """
        future = asyncio.run_coroutine_threadsafe(_caught(work), self._loop)
        try:
            with anyio.fail_after(timeout_s):
                result, failure = await asyncio.wrap_future(future)
        except TimeoutError:
            raise LaunchError(f"It did not answer within {timeout_s:g} s.") from None
        if isinstance(failure, KernelMcpError):
            raise failure
        if failure is not None:
            raise LaunchError(said_by(failure)) from None
        return result  # type: ignore[no-any-return]  # without a failure

    def close(self) -> None:
        """Stop the thread, unless code blocks it."""
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _caught(work: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Return the result of `work` and None, or None and what it raised.

    SystemExit or KeyboardInterrupt would end the loop.
    """
    try:
        return await work(), None
    except BaseException as error:  # noqa: BLE001  # third-party code raises anything
        return None, error


def said_by(error: BaseException) -> str:
    """Return the type and text of an exception on one line; of a group, those of its parts."""
    parts = getattr(error, "exceptions", None)
    if isinstance(parts, tuple) and parts:
        return "; ".join(map(said_by, parts[:MOST_REASONS]))
    try:
        text = one_line(str(error))[:MOST_REASON_CHARS]
    except BaseException:  # noqa: BLE001  # its own method
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
