"""The service thread: it answers control requests and sends output while a cell runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import zmq
from ipykernel.thread import CONTROL_THREAD_NAME
from tornado.ioloop import IOLoop
from tornado.platform.asyncio import BaseAsyncIOLoop

from kernel_specs import linux
from kernel_specs.restricted.console.iopub import IOPubPublisher
from kernel_specs.restricted.console.streams import Console
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.wire.sockets import RouterSocket, XPubSocket

_poll = select.poll
"""The original: user code may replace it."""


class Channel:
    """A ROUTER socket: what ipykernel calls a stream."""

    def __init__(
        self, router: RouterSocket, io_loop: Any, *, collects: bool = False, watched: bool = False
    ) -> None:
        """With `collects`, replies are kept until `push`. With `watched`, `io_loop` reads it."""
        self.io_loop = io_loop
        self._collects = collects
        self.held: deque[list[bytes]] = deque()
        self._router = router
        self._replies: list[list[Any]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._lock = threading.RLock()
        """A thread of user code may wait for input while the loop runs."""
        self._always_readable = -1
        if watched:
            io_loop.asyncio_loop.add_reader(router, self.attend)

    def leave(self) -> None:
        """Close the descriptors in a forked process."""
        self._router.leave()
        if self._always_readable >= 0:
            os.close(self._always_readable)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message may have arrived."""
        if not self.held:
            return self._router.fileno()
        if self._always_readable < 0:
            self._always_readable = os.eventfd(1)
        return self._always_readable

    def receive(self) -> list[bytes] | None:
        """Return the next message or None; those that `hold` has read come first."""
        with self._lock:
            return self.held.popleft() if self.held else self._router.receive()

    def hold(self) -> None:
        """Read all messages that have arrived by now."""
        while (message := self._router.receive()) is not None:
            self.held.append(message)

    def pause(self, seconds: float) -> None:
        """Wait without a loop until a message may have arrived, and read it; raises OSError.

        The host detects by its requests being read that the main thread does not hang.
        """
        poller = _poll()
        poller.register(self._router.fileno(), select.POLLIN)
        poller.poll(seconds * 1000)
        self.hold()

    async def readable(self) -> None:
        """Return when a message may have arrived, after `receive` found none; if watched."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[bytes]:
        """Return the next message, for ipykernel's input(). Raises zmq.Again if there is none."""
        message = self.receive()
        if message is None:
            raise zmq.Again
        return message

    def send_multipart(
        self, parts: list[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> None:
        """Send one reply; with `collects`, keep it for `push`."""
        self._replies.append(parts)
        if not self._collects:
            self.push()

    def descriptors(self) -> list[int]:
        """Return the descriptors that came with messages, and forget them."""
        given = self._router.given
        found = given[:]
        given.clear()
        return found

    def push(self) -> None:
        """Send the replies that were collected."""
        while self._replies:
            self._router.send(self._replies[0])
            del self._replies[0]

    def flush(self, *_: Any) -> None:
        """Do nothing; ipykernel calls it after each reply."""

    def attend(self) -> None:
        """Read what has arrived; `receive` returns it."""
        with contextlib.suppress(MemoryError), self._lock:  # the waiting task reads it later
            message = self._router.receive()
            if message is None:
                return
            self.held.append(message)
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)


LINGER_SECONDS = 0.2
"""Seconds from the end of a cell, or from text after it, to one more flush. It sends text of
threads: Python's streams give no notice of text without a line end."""


class Ticker:
    """A timerfd that is readable every `seconds`: setting it wakes no thread."""

    def __init__(self, seconds: float) -> None:
        """Make a stopped timer. Raises OSError."""
        self.fd = linux.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        self._on = linux.timerfd_spec(seconds, seconds)
        self._once, self._off = linux.timerfd_spec(LINGER_SECONDS), linux.timerfd_spec(0.0)

    def start(self) -> None:
        """Start the timer: the first tick comes `seconds` from now."""
        self._set(self._on)

    def start_once(self) -> None:
        """Set the timer to a single tick, `LINGER_SECONDS` from now."""
        self._set(self._once)

    def stop(self) -> None:
        """Stop the timer."""
        self._set(self._off)

    def _set(self, spec: bytes) -> None:
        with contextlib.suppress(OSError):  # user code has closed it
            linux.timerfd_settime(self.fd, spec)

    def take(self) -> None:
        """Consume a tick: the descriptor is readable again at the next one."""
        with contextlib.suppress(BlockingIOError):  # it was stopped meanwhile
            os.read(self.fd, 8)


RETRY_SECONDS = 0.002
UNSEEN_SECONDS = 0.05
"""Seconds until SIGINT is sent again if a system call still keeps Python from handling it."""
EXIT_SECONDS = 1.0
"""Seconds that a shutdown waits for a main thread that is busy with user code."""
_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)


OS_NAME = "kernel-service"
"""Thread name, by which the host recognises that it runs no user code; at most 15 bytes."""


class ServiceThread(threading.Thread):
    """Runs the control channel, iopub subscriptions, the pipes, heartbeat and the flush timer.

    Idle, it sleeps in one epoll call without a timeout. Its name is ipykernel's: by that,
    ipykernel distinguishes control messages from shell messages.
    """

    def __init__(
        self, console: Console, iopub: IOPubPublisher, gate: InterruptGate, flush_seconds: float
    ) -> None:
        super().__init__(name=CONTROL_THREAD_NAME, daemon=True)
        self.io_loop = cast(BaseAsyncIOLoop, IOLoop(make_current=False))
        self.main_ended = threading.Event()
        self.at_work: Callable[[], None] | None = None
        """Called once, on this thread, when a cell has not ended within a flush interval."""
        self._loop: asyncio.AbstractEventLoop = self.io_loop.asyncio_loop
        self._console = console
        self._iopub = iopub
        self._gate = gate
        self._flush_seconds = flush_seconds
        self._ticker = Ticker(flush_seconds)
        self._ticking = False
        self._running = False
        self._began = 0.0
        self._watching_pipes = False
        iopub.service_thread = self
        gate.retry = self._retry_interrupt
        self._loop.add_reader(gate.watch(), self._look_for_interrupt)
        self._loop.add_reader(self._ticker.fd, self._tick)
        console.text_waits = self.tick_soon

    def leave(self) -> None:
        """Close the timer in a forked process: it is the parent's."""
        with contextlib.suppress(OSError):  # user code has closed it
            os.close(self._ticker.fd)

    def watch_output(self, publisher: XPubSocket) -> None:
        """Handle subscriptions, slow readers, and output of children while nothing runs."""
        self._loop.add_reader(publisher, self._iopub.attend)
        self._watch_pipes()

    def watch_heartbeat(self, router: RouterSocket) -> None:
        """Echo what arrives on the heartbeat socket."""

        def echo() -> None:
            while (message := router.receive()) is not None:
                router.send(message)

        self._loop.add_reader(router, echo)

    def run(self) -> None:
        """Serve until the loop is stopped; then make sure that the process ends."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        with contextlib.suppress(OSError):  # denied by the filter of a foreign sandbox
            linux.set_name(OS_NAME)
        while self._out_of_memory():
            time.sleep(self._flush_seconds)
        self.main_ended.wait(EXIT_SECONDS)
        threading.Event().wait(EXIT_SECONDS)
        os._exit(0)  # user code still runs: a cell, or a thread that does not end

    def _out_of_memory(self) -> bool:
        """Run the loop; return True if a MemoryError ended it."""
        try:
            self.io_loop.start()
        except MemoryError:
            return True
        return False

    def cell_started(self) -> None:
        """Note that a cell runs: its text is sent every `flush_seconds` (main thread)."""
        self._began = time.monotonic()
        self._running = True
        self._console.by_line()
        self.tick_soon()

    def cell_ended(self) -> None:
        """Note that the cell has ended (main thread)."""
        self._running = False
        self._rest(lingers=True)

    def tick_soon(self) -> None:
        """Start the flush timer unless it runs; safe from any thread."""
        if not self._ticking:
            self._ticking = True
            self._ticker.start()

    def _rest(self, *, lingers: bool) -> None:
        """Stop the flush timer unless it has work to do; with `lingers`, after one more tick."""
        self._console.by_line()  # from here on each line announces itself
        if lingers:
            self._ticker.start_once()
        else:
            self._ticker.stop()
        self._ticking = False
        if self._running or self._iopub.waiting:  # text may have come since the timer was stopped
            self.tick_soon()

    def _later(self, seconds: float, callback: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, callback)

    def _look_for_interrupt(self) -> None:
        if (handled := self._gate.waiting()) is not None:
            self._loop.call_later(UNSEEN_SECONDS, self._gate.wake, handled)

    def _retry_interrupt(self) -> None:
        self._later(RETRY_SECONDS, self._gate.redeliver)

    def _tick(self) -> None:
        try:
            self._ticker.take()
            came = self._send_text()
            if self.at_work is not None and self._works_long():
                at_work, self.at_work = self.at_work, None
                at_work()
            if not self._running:
                self._rest(lingers=came)
        except MemoryError:
            pass  # user code has used up the memory: the next tick sends the rest

    def _works_long(self) -> bool:
        return self._running and time.monotonic() - self._began >= self._flush_seconds

    def _send_text(self) -> bool:
        """Send the text printed so far; return True if there was any."""
        came = self._iopub.waiting
        if self._iopub.pump():
            self._console.choose_pace()
            came |= self._console.flush()
            self._watch_pipes()
        return came

    def _watch_pipes(self) -> None:
        if not self._watching_pipes:
            self._watching_pipes = True
            for fd in self._console.pipes:
                self._loop.add_reader(fd, self._on_pipe)

    def _on_pipe(self) -> None:
        """Read output of children; leave it in the pipe while iopub is blocked."""
        if self._iopub.blocked:
            self._watching_pipes = False
            for fd in self._console.pipes:
                self._loop.remove_reader(fd)
        else:
            self._console.hand_over()
        self.tick_soon()
