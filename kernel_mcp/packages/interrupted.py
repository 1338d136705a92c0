"""Work that something else may end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def unless(
    event: Callable[[], Awaitable[object]], work: Callable[[], Awaitable[T]]
) -> T | None:
    """The result of `work`, or None when `event` comes first. Raises what `work` raises."""
    result: T | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def stop() -> None:
            await event()
            tasks.cancel_scope.cancel()

        tasks.start_soon(stop)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001  # raised again, outside of the task group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
