"""Pooled kernels: started ahead of need, so that a new session gets one without waiting.

A pooled kernel runs in its sandbox with its channels connected. It has an empty workspace and an
empty package layer. The session that takes it gets these folders, too: they are renamed. The kernel
is not affected, as it refers to the folders themselves and not to their names. No user code runs
before that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.environments.layer import Layer
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import ConfigError
from kernel_mcp.kernels.factory import KernelRequest, KernelSource, log_progress
from kernel_mcp.linux.safe_tree import give_tree, make_private, remove_tree, take_place
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.capacity import Capacity

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel


logger = logging.getLogger(__name__)

NAME_BYTES = 8
"""Random bytes in the name of a pooled kernel."""
_HIDDEN = ".kernel-mcp-"
_OURS = re.compile(rf"{re.escape(_HIDDEN)}[0-9a-f]{{8}}")
_LOCK = "lock"
_POOLED_NAME = re.compile(rf"\.?[0-9a-f]{{{2 * NAME_BYTES}}}(-\d+)?")
"""Names of pooled kernels, and names that an unfinished removal has given to files."""


@contextlib.contextmanager
def pool_folder_in(parent: Path) -> Iterator[Path]:
    """Create a hidden folder for pooled kernels in the operator's `parent`, and yield it.

    It is on the file system of the workspaces, so that rename(2) works. It is removed at the end of
    the block. If the server is killed, the next one removes it. Raises ConfigError.
    """
    path = parent / f"{_HIDDEN}{secrets.token_hex(4)}"
    try:
        sweep_pools(parent)
        path.mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        lock = os.open(path / _LOCK, flags, 0o600)
    except OSError as reason:
        raise ConfigError(
            f"cannot keep files in {parent}: {reason}; choose another folder with --workspace"
        ) from reason
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        _remove_pooled(path)
        os.close(lock)


def sweep_pools(parent: Path) -> None:
    """Remove folders of killed servers from `parent` that have only a lock and pooled kernels."""
    for path in parent.glob(f"{_HIDDEN}*"):
        if _OURS.fullmatch(path.name):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    try:
        if _is_pool_folder(path):
            _remove_unlocked(path)
    except OSError as reason:
        logger.warning("could not look at %s: %s", path, reason)


def _is_pool_folder(path: Path) -> bool:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    names = {entry.name for entry in path.iterdir()}
    return _LOCK in names and all(_POOLED_NAME.fullmatch(name) for name in names - {_LOCK})


def _remove_unlocked(path: Path) -> None:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # its server is running
    else:
        _remove_pooled(path)
    finally:
        os.close(lock)


def _remove_pooled(path: Path) -> None:
    try:
        remove_tree(path)
    except OSError as reason:
        logger.warning("could not remove %s: %s", path, reason)


REFILL_DELAY_S = 0.02
"""Seconds until a taken kernel is replaced, so that the first cell in it runs undisturbed."""
RETRY_S = 30.0
REHEARSAL_S = 5.0


@dataclass(frozen=True, slots=True)
class _PooledKernel:
    kernel: Kernel
    workspace: Path
    layer: Path
    mark: object


class WarmPool:
    """A `KernelSource` in front of another one, which keeps `size` kernels ready.

    Their folders are created below `folder` and `layers`, on the file systems of the workspaces and
    package layers of sessions.
    """

    def __init__(
        self,
        source: KernelSource,
        *,
        size: int,
        folder: Path,
        layers: Path,
        capacity: Capacity | None = None,
        mark: Callable[[], object] = lambda: None,
        at_first: int | None = None,
    ) -> None:
        """A pooled kernel is started only if `capacity` leaves room for one further session.

        With `at_first`, the pool keeps that number of kernels until sessions have requested one,
        and none until they have requested two. A pooled kernel is not used if the value of `mark`
        has changed since its start.
        """
        self._mark = mark
        self._source = source
        self._capacity = capacity or Capacity()
        self._size = size
        self._at_first = at_first
        self._folder = folder
        self._layers = layers
        self._pooled: deque[_PooledKernel] = deque()
        self._replaced: list[tuple[Path, Path]] = []
        """Replaced folders of sessions, each as its new path and its former path."""
        self._taken = anyio.Event()
        self._begun = 0
        """Number of kernels that sessions have requested."""

    @property
    def _wanted(self) -> int:
        if self._begun > 1 or self._at_first is None:
            return self._size
        return 0 if self._begun else min(self._size, self._at_first)

    @property
    def ready(self) -> int:
        """Number of pooled kernels that can be taken now."""
        return len(self._pooled)

    async def fill(self) -> None:
        """Keep the pool filled until cancelled."""
        while self._size:
            self._taken = anyio.Event()
            with Barrier("keeping kernels in reserve") as barrier:
                while len(self._pooled) < self._wanted and not self._capacity.shortage(2):
                    self._pooled.append(await self._make())
            if barrier.failure is not None or len(self._pooled) < self._wanted:
                await anyio.sleep(RETRY_S)
                continue
            await self._taken.wait()
            await anyio.sleep(REFILL_DELAY_S)
            await self._tidy()

    async def aclose(self) -> None:
        """End the pooled kernels."""
        with anyio.CancelScope(shield=True):
            await self._tidy()
            while self._pooled:
                await self._drop(self._pooled.popleft())

    async def start(self, request: KernelRequest, progress: ProgressCallback) -> Kernel:
        """Return a suitable pooled kernel, else start a kernel. Raises KernelMcpError."""
        self._begun += 1
        if len(self._pooled) < self._wanted:
            self._taken.set()
        while request.ordinary and _adds_nothing(request.layer) and self._pooled:
            pooled = self._pooled.popleft()
            self._taken.set()
            fits = False
            try:
                with Barrier("handing a kernel in reserve over", request.session):
                    fits = await self._hand_over(pooled, request)
            finally:
                if not fits:
                    await self._drop(pooled)
            if fits:
                pooled.kernel.handle.limits.session = request.session
                pooled.kernel.handle.report.kind = "pooled"
                return pooled.kernel
        return await self._source.start(request, progress)

    async def _make(self) -> _PooledKernel:
        mark, name = self._mark(), secrets.token_hex(NAME_BYTES)
        workspace, layer = self._folder / name, self._layers / name
        make_private(workspace)
        Layer(layer).make()
        async with AsyncExitStack() as undo:
            undo.push_async_callback(_remove, workspace, layer)
            kernel = await self._source.start(
                KernelRequest(name, workspace, layer=layer), log_progress
            )
            undo.push_async_callback(kernel.aclose)
            await _prewarm(kernel)
            await kernel.handle.limits.survey()
            undo.pop_all()
        return _PooledKernel(kernel, workspace, layer, mark)

    async def _hand_over(self, pooled: _PooledKernel, request: KernelRequest) -> bool:
        """Rename a pooled kernel's folders to the session's; return False if it cannot be used."""
        handle = pooled.kernel.handle
        if handle.exit is not None or handle.stopped or pooled.mark != self._mark():
            return False
        if not self._hand_over_layer(pooled, request.layer):
            return False
        await self._hand_over_workspace(pooled, request.workspace)
        return True

    def _hand_over_layer(self, pooled: _PooledKernel, layer: Path | None) -> bool:
        """Rename the pooled kernel's layer to the session's; return False if that is not empty."""
        if layer is None:
            return True
        try:
            old = take_place(pooled.layer, layer)
        except OSError:
            return False
        if old is None:
            return True
        if any(old.iterdir()):
            take_place(old, layer)
            return False
        self._replaced.append((old, layer))
        return True

    async def _hand_over_workspace(self, pooled: _PooledKernel, workspace: Path) -> None:
        """Move the session's files to the pooled kernel's workspace, and give that its name."""
        filled = any(workspace.iterdir())
        try:
            if filled:
                await anyio.to_thread.run_sync(_move_content, workspace, pooled.workspace)
                await pooled.kernel.handle.limits.survey()
            old = take_place(pooled.workspace, workspace)
        except BaseException:
            if filled:
                await run_in_thread(_move_content, pooled.workspace, workspace)
            raise
        if old is not None:
            self._replaced.append((old, workspace))

    async def _tidy(self) -> None:
        while self._replaced:
            with Barrier("removing the folder of a kernel in reserve"):
                await run_in_thread(_dissolve, *self._replaced.pop())

    async def _drop(self, pooled: _PooledKernel) -> None:
        with anyio.CancelScope(shield=True), Barrier("ending a kernel in reserve"):
            async with AsyncExitStack() as undo:
                undo.push_async_callback(_remove, pooled.workspace, pooled.layer)
                await pooled.kernel.aclose()


async def _remove(*folders: Path) -> None:
    for folder in folders:
        with Barrier("removing the folder of a kernel in reserve"):
            await run_in_thread(remove_tree, folder)


def _adds_nothing(layer: Path | None) -> bool:
    return layer is None or not any(layer.iterdir())


async def _prewarm(kernel: Kernel) -> None:
    """Run a cell that leaves no trace, so that the pages for a first cell are in memory."""
    run = kernel.prewarm("print(1)\n1")
    with anyio.move_on_after(REHEARSAL_S):
        await run.finished.wait()


def _dissolve(old: Path, place: Path) -> None:
    """Remove a replaced folder; move files that were written to it in the meantime to `place`."""
    with contextlib.suppress(FileNotFoundError):  # already removed
        if any(old.iterdir()) and place.is_dir():
            _move_content(old, place)
    remove_tree(old)


def _move_content(source: Path, target: Path) -> None:
    owner = target.stat()
    if os.geteuid() == 0:
        give_tree(source, uid=owner.st_uid, gid=owner.st_gid)
    for entry in list(source.iterdir()):
        entry.rename(target / entry.name)
