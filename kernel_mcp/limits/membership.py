"""A kernel's way into its control group and out of it, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

from kernel_mcp.config.settings import Limits
from kernel_mcp.limits.group import KernelGroup
from kernel_mcp.limits.groups import GroupTree


class Membership:
    """One kernel's group: begun to be made at once, by a clerk that does one thing after the other.

    The system lets everything that changes groups wait for some 10 ms when the first process in a
    while moves from one to another.
    """

    def __init__(
        self,
        groups: GroupTree,
        name: str,
        limits: Limits,
        *,
        clerk: Executor,
        leave: Callable[[KernelGroup], None],
    ) -> None:
        """`leave` is called with the group when the last process has ended."""
        self.group = groups.kernel(name)
        self._clerk = clerk
        self._leave = leave
        self._made: Future[None] = clerk.submit(self.group.make, limits)
        self._tasks: list[Future[None]] = [self._made, clerk.submit(groups.expect)]

    def admit(self, pids: Iterable[int]) -> None:
        """Begin to take processes in, and with them all that they start from then on."""
        self._tasks.append(self._clerk.submit(self.group.admit, tuple(pids)))

    async def made(self) -> None:
        """Wait until processes can enter the group by themselves. Raises OSError."""
        await asyncio.shield(asyncio.wrap_future(self._made))

    async def settled(self) -> None:
        """Wait until what has been begun is done. Raises OSError."""
        while self._tasks:
            await asyncio.wrap_future(self._tasks.pop(0))

    def end(self) -> None:
        """Have the group removed; all processes have ended."""
        self._leave(self.group)
