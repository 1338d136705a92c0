"""How much an installer has written, so that it can be stopped before a disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from kernel_mcp.environments.folder import tree_size
from kernel_mcp.linux.proc import tree

LOOK_S = 0.1
"""A disk of today takes some hundred MiB in this time."""
REST = 4
"""So many times as long as a look at the folders took, they are left alone."""
_WRITTEN = b"wchar:"


class Spending:
    """Bounds what one operation puts on the disk, by all the installers that it runs.

    What is downloaded goes to a cache that others fill at the same time, and from there into
    `folders`. So the folders are measured, and what is not in them is what the processes have
    written besides; each of the two may be `most_bytes`, 0 for no limit. What was written in the
    last `LOOK_S` of a process is not seen.
    """

    def __init__(
        self,
        most_bytes: int,
        folders: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self._clock = clock
        self._folders = [*folders]
        self._pid = 0
        self._ended = 0
        self._seen = 0

    def watch(self, folder: Path) -> None:
        """A further folder that the operation fills."""
        self._folders.append(folder)

    def started(self, pid: int) -> None:
        """The next process of the operation runs."""
        self._ended += self._seen
        self._pid, self._seen = pid, 0

    async def beyond(self) -> None:
        """Return when the operation has written too much."""
        if not self.most_bytes:
            await anyio.sleep_forever()
        while True:
            began = self._clock()
            if await anyio.to_thread.run_sync(self.exceeded):
                return
            rested = self._clock() + REST * (self._clock() - began)
            await anyio.sleep(LOOK_S)
            while self._clock() < rested:
                # no more than this can be in order, wherever it went
                if await anyio.to_thread.run_sync(self._written) > 2 * self.most_bytes:
                    return
                await anyio.sleep(LOOK_S)

    def exceeded(self) -> bool:
        """Whether it has; blocks."""
        if not self.most_bytes:
            return False
        written = self._written()
        # Linux does not count every copy as written, so folders are looked at in any case
        held = sum(map(tree_size, self._folders))
        return held > self.most_bytes or written - held > self.most_bytes

    def _written(self) -> int:
        """Bytes that the processes have written so far, those that have ended included."""
        if self._pid:
            self._seen = max(self._seen, sum(map(_written_by, tree(self._pid))))
        return self._ended + self._seen


def _written_by(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_bytes().splitlines():
            if line.startswith(_WRITTEN):
                return int(line.split()[1])
    return 0
