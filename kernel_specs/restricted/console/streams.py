"""stdout and stderr of the kernel: two text streams and two pipes, in one order.

`print` stays as fast as C makes it: the streams are plain `io.TextIOWrapper`s that collect a chunk
before they call Python. Only the stream written to last collects; the other is write-through, so
its first write announces the switch. File descriptors 1 and 2 become pipes, for output of child
processes and C libraries.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import io
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, cast

from kernel_specs.restricted.console.iopub import IOPubPublisher
from kernel_specs.restricted.originals import os

CHUNK_BYTES = 64 * 1024
SLICE_BYTES = 16 * CHUNK_BYTES
PIPE_BYTES = 256 * 1024
"""Pipe size; a C library that prints more without releasing the GIL would block for ever."""
QUIET_SECONDS = 0.002
"""Seconds without a message after which a line is sent at once; in bursts the flush timer sends."""
LINES_PER_TICK = 500
"""Lines between two ticks of the flush timer above which text is collected in chunks."""
DRAIN_BYTES = 1024 * 1024
"""Most bytes read from a pipe at once: a child may write without end."""
_SPAWNS = frozenset(
    {"subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
)


def _decoded(data: bytes) -> Iterator[str]:
    """Yield the text of UTF-8 bytes, in slices of `SLICE_BYTES`."""
    if len(data) <= SLICE_BYTES:
        yield str(data, "utf-8", "replace")
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    view = memoryview(data)
    for start in range(0, len(view), SLICE_BYTES):
        end = start + SLICE_BYTES
        yield decoder.decode(view[start:end], final=end >= len(view))


class _Sink(io.RawIOBase):
    """The raw end of a text stream; user code cannot close it."""

    def __init__(self, console: Console, name: str, fd: int) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._console = console
        self.stream = name
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        self._console.take(self.stream, self._fd, data)
        return len(data)

    def flush(self) -> None:
        self._console.flushed()

    def close(self) -> None:
        """Stay open: the next cell prints again."""


def standard_name(stream: object) -> str:
    """Return `stdout` or `stderr` for a text stream of this process's console, else ""."""
    if type(stream) is io.TextIOWrapper:
        with suppress(ValueError):  # user code has detached it
            sink: object = stream.buffer
            return sink.stream if type(sink) is _Sink else ""
    return ""


class Console:
    """Collects everything the kernel and its children print and hands it to iopub in order."""

    def __init__(self, iopub: IOPubPublisher) -> None:
        self._iopub = iopub
        self._current = "stdout"
        self._inside = False
        self._draining = False
        self._forked = False
        self.parking = False
        """True while a checkpoint is forked: that child later runs as this kernel."""
        self.on_fork: Callable[[], None] = lambda: None
        """Called in every child that user code forks."""
        self._line_by_line = False
        self._lines = 0
        self._sent = 0.0
        self.text_waits: Callable[[], None] = lambda: None
        self._pipes: dict[int, tuple[str, codecs.IncrementalDecoder]] = {}
        self._poll = select.poll()
        self._streams = {
            "stdout": self._new_stream("stdout", 1),
            "stderr": self._new_stream("stderr", 2),
        }
        self._streams["stderr"].reconfigure(write_through=True)
        iopub.flush_text = self.hand_over

    @property
    def pipes(self) -> list[int]:
        """Read ends of the pipes that stand for file descriptors 1 and 2."""
        return list(self._pipes)

    def install(self) -> None:
        """Install the streams as sys.stdout and sys.stderr, also under their `__…__` names."""
        sys.stdout = sys.__stdout__ = self._streams["stdout"]  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = self._streams["stderr"]  # type: ignore[misc]
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._after_fork,
        )
        sys.addaudithook(self._audit)

    def repair(self) -> None:
        """Put sys.stdout and sys.stderr back where code has set them to None."""
        sys.stdout = sys.stdout or self._streams["stdout"]
        sys.stderr = sys.stderr or self._streams["stderr"]

    def redirect(self) -> None:
        """Replace file descriptors 1 and 2 by pipes."""
        for name, fd in (("stdout", 1), ("stderr", 2)):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # the user's limit of pipe memory is reached
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            os.dup2(writer, fd)
            os.close(writer)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._pipes[reader] = (name, decoder)
            self._poll.register(reader, select.POLLIN)

    def leave(self) -> None:
        """Close the pipes in a checkpoint."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        self._poll = select.poll()

    def renew(self) -> None:
        """Make new pipes for descriptors 1 and 2, in a kernel forked from a checkpoint."""
        self._inside = self._draining = False
        self.redirect()

    def hand_over(self) -> None:
        """Pass all text printed so far to iopub."""
        with self._iopub.lock:
            if self._inside or self._forked:
                return
            self._inside = True
            try:
                self._drain()
                self._flush(self._current)
            finally:
                self._inside = False

    def flush(self) -> bool:
        """Send all text printed so far, waiting for a slow reader; return True if there was any."""
        self.hand_over()
        if not self._iopub.waiting:
            return False
        self._iopub.pump()
        self._iopub.wait()
        return True

    def take(self, name: str, fd: int, data: Any) -> None:
        """Pass on bytes of a text stream; called by C code in the middle of a write."""
        if self._forked:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            return
        for text in _decoded(data):
            with self._iopub.lock:
                if name != self._current:
                    self._switch(name)
                elif not self._inside:
                    self._drain()
                self._iopub.put_text(name, text)
                inside = self._inside
            if not inside:
                self._iopub.wait()

    def flushed(self) -> None:
        """Send text after a flush, at most once in `QUIET_SECONDS`; the flush timer sends the rest.

        Called at the end of a line, and by code that flushes.
        """
        if self._inside or self._forked or not self._iopub.waiting:
            return
        self._lines += 1
        now = time.monotonic()
        if now - self._sent > QUIET_SECONDS:
            self._sent = now
            self._iopub.pump()
            self._iopub.wait()
        else:
            self.text_waits()

    def by_line(self) -> None:
        """Collect text line by line from now on: none is lost if code crashes or hangs next."""
        self._lines = 0
        self._set_pace(line_by_line=True)

    def choose_pace(self) -> None:
        """Collect text in chunks if many lines came since the last call, else line by line."""
        if self._lines > LINES_PER_TICK:
            self._set_pace(line_by_line=False)
        self._lines = 0

    def _set_pace(self, *, line_by_line: bool) -> None:
        if line_by_line == self._line_by_line:
            return
        # Under the lock: reconfigure flushes, and no other text may be sent before that text.
        with self._iopub.lock:
            self._line_by_line = line_by_line
            self._streams[self._current].reconfigure(line_buffering=line_by_line)

    def _switch(self, name: str) -> None:
        """Flush the current stream, then make `name` the one that collects."""
        nested, self._inside = self._inside, True
        try:
            self._drain()
            self._flush(self._current)
            self._streams[self._current].reconfigure(write_through=True)
            self._streams[name].reconfigure(write_through=False, line_buffering=self._line_by_line)
            self._current = name
        finally:
            self._inside = nested

    def _flush(self, name: str) -> None:
        try:
            self._streams[name].flush()
        except ValueError:  # user code has detached it
            self._streams[name] = stream = self._new_stream(name, 1 if name == "stdout" else 2)
            setattr(sys, name, stream)

    def _drain(self) -> None:
        """Read the pipes: output of children precedes the text that follows."""
        if self._draining:  # called from a signal handler of user code that prints
            return
        self._draining = True
        try:
            self._drain_pipes()
        finally:
            self._draining = False

    def _drain_pipes(self) -> None:
        for fd, _ in self._poll.poll(0):
            name, decoder = self._pipes[fd]
            taken = 0
            while taken < DRAIN_BYTES:
                try:
                    data = os.read(fd, CHUNK_BYTES)
                except BlockingIOError:
                    break
                text = decoder.decode(data)
                if text:
                    self._iopub.put_text(name, text)
                if len(data) < CHUNK_BYTES:
                    break
                taken += len(data)

    def _new_stream(self, name: str, fd: int) -> io.TextIOWrapper:
        stream: Any = io.TextIOWrapper(
            _Sink(self, name, fd),
            encoding="utf-8",
            errors="backslashreplace",
            newline="\n",
        )
        stream._CHUNK_SIZE = CHUNK_BYTES
        stream.mode = "w"
        return cast(io.TextIOWrapper, stream)

    def _audit(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event in _SPAWNS:
            self.hand_over()

    def _before_fork(self) -> None:
        self.hand_over()
        self._iopub.lock.acquire()

    def _after_fork_in_parent(self) -> None:
        self._iopub.lock.release()  # forked children have a lock of their own, see `forget`

    def _after_fork(self) -> None:
        """Make a forked child write lines to the inherited file descriptors."""
        if self.parking:
            self._iopub.lock.release()
            return
        self._forked = True
        self._iopub.forget()
        self.on_fork()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream in self._streams.values():
            stream.reconfigure(write_through=False, line_buffering=True)


class CStdout:
    """C's `stdout`, flushed alone: fflush(NULL) would wait for a thread that reads stdin."""

    def __init__(self) -> None:
        """Find `stdout` in the C library; some export no such name."""
        library = ctypes.CDLL(None)
        self._flush = library.fflush
        self._stream: ctypes.c_void_p | None = None
        with suppress(ValueError):
            self._stream = ctypes.c_void_p.in_dll(library, "stdout")

    def flush(self) -> None:
        """Write the buffer to file descriptor 1, unless the C library exports no `stdout`."""
        if self._stream is not None:
            self._flush(self._stream)
