"""The event loop of a session."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from asyncio import _get_running_loop, all_tasks, new_event_loop, set_event_loop
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kernel_specs.restricted.originals import os, signal

_MISSING = object()


class Watched(Protocol):
    """A channel that the loop watches while the kernel waits."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message may have arrived."""

    def attend(self) -> None:
        """Read what has arrived."""


class SessionLoop:
    """The loop on which code of cells schedules; ipykernel calls it `io_loop`.

    It runs between cells, and while a cell awaits at top level. Requests are handled outside of it.
    A cell that awaits nothing therefore finds no running loop: `asyncio.run` and
    `run_until_complete` work there, and what the cell schedules begins when it has ended. Code may
    close the loop, or run it in a thread; another one then takes its place.
    """

    def __init__(self) -> None:
        self.interrupted: Callable[[], None] = lambda: None
        """Called when an interrupt cancels the tasks of a cell that awaits."""
        self.escaped: Callable[[], None] = lambda: None
        """Called when a task has raised SystemExit or KeyboardInterrupt, which ends no loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = 0
        """Id of the process that has entered the loop; 0 without a loop."""
        self._before: frozenset[asyncio.Task[Any]] = frozenset()
        self._create_task = asyncio.create_task
        asyncio.create_task = asyncio.tasks.create_task = self.create_task  # type: ignore[assignment]
        asyncio.set_event_loop = asyncio.events.set_event_loop = self.set_event_loop

    @property
    def asyncio_loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself."""
        if self._loop is None:
            self._loop = new_event_loop()
        return self._loop

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the loop, for the main thread while no loop runs in it."""
        self._process = os.getpid()
        loop = self.asyncio_loop
        if loop.is_closed() or loop.is_running():
            loop = self._loop = new_event_loop()
        set_event_loop(loop)
        if getattr(loop, "_signal_handlers", None):  # requests let signals wake something else
            signal.set_wakeup_fd(loop._csock.fileno())  # type: ignore[attr-defined]
        return loop

    def wait(self, first: Watched, *others: Watched) -> None:
        """Run the loop until the first channel is readable, or a callback stops the loop."""
        loop = self.enter()
        fds = [channel.fileno() for channel in (first, *others)]
        for fd, callback in zip(fds, (loop.stop, *(each.attend for each in others)), strict=True):
            loop.add_reader(fd, callback)
        try:
            self._run(loop)
        finally:
            for fd in fds:
                loop.remove_reader(fd)

    def turn(self) -> None:
        """Run the callbacks that are due."""
        loop = self.enter()
        loop.call_soon(loop.stop)
        self._run(loop)

    def begin_cell(self) -> None:
        """Count tasks that are scheduled from here on as those of the cell."""
        self._before = frozenset(all_tasks(self.enter()))

    def cancel_tasks(self) -> None:
        """Cancel the tasks of the cell, which an interrupt ends."""
        for task in all_tasks(self.asyncio_loop) - self._before:
            task.cancel()

    def run(self, coroutine: Coroutine[Any, Any, Any], at_start: Callable[..., None]) -> Any:
        """Run the coroutine of a cell; return its result, or raise its exception.

        `at_start` is called with a function that cancels the cell, for a signal handler. Context
        variables that the coroutine sets are set for later cells too. Raises RuntimeError if a loop
        runs already.
        """
        if _get_running_loop() is not None:
            coroutine.close()
            raise RuntimeError("this cell awaits itself: `%time await` needs a cell of its own")
        loop = self.enter()
        contexts: list[contextvars.Context] = []
        task = loop.create_task(_record_context(coroutine, contexts))
        task.add_done_callback(lambda _: loop.stop())

        def cancel() -> None:
            self.interrupted()
            self.cancel_tasks()
            loop.call_soon_threadsafe(lambda: None)  # the loop sleeps when the signal arrives

        at_start(cancel)
        while not task.done():
            if self._run(loop) and not task.done():
                cancel()
        for variable, value in (contexts[0] if contexts else contextvars.Context()).items():
            if variable.get(_MISSING) is not value:
                variable.set(value)
        return task.result()

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        """Schedule a coroutine, as asyncio.create_task; without a running loop, on this one."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and _get_running_loop() is None:
            return self.asyncio_loop.create_task(coro, **options)
        return self._create_task(coro, **options)

    def set_event_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Set the loop of this thread; after `asyncio.run`, which sets None, it is this one.

        Processes that are forked must not share its descriptors.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        own = in_main_thread and self._process == os.getpid() and _get_running_loop() is None
        if loop is None and own:
            self.enter()
        else:
            set_event_loop(loop)

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the loop, unless it is closed; safe in every thread."""
        with contextlib.suppress(RuntimeError):
            self.asyncio_loop.call_soon_threadsafe(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Run `callback` in the loop after a delay; safe in every thread."""
        self.add_callback(lambda: self.asyncio_loop.call_later(delay_s, callback))

    def stop(self) -> None:
        """End `wait`."""
        self.asyncio_loop.stop()

    def close(self) -> None:
        """Close the loop; another one is made when it is needed."""
        if self._loop is not None:
            self._loop.close()
            self._loop, self._process = None, 0

    def _run(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run the loop until it is stopped; return True if KeyboardInterrupt has ended it."""
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            self.escaped()
            return isinstance(error, KeyboardInterrupt)
        return False


async def _record_context(
    coroutine: Coroutine[Any, Any, Any], contexts: list[contextvars.Context]
) -> Any:
    """Await a coroutine, then record its context; a task has a context of its own."""
    try:
        return await coroutine
    finally:
        contexts.append(contextvars.copy_context())


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits; return its result. Raises RuntimeError if it waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("a request has waited outside of the event loop")
