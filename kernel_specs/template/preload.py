"""Import modules and run first cells in a template; find state that its forks must not share.

A thread is gone in the child, with the locks it held. An open file has one offset for all children,
and shared memory stays shared: sessions would reach each other through them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import io
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_specs import linux
from kernel_specs.restricted import confine, host
from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.console.tracebacks import forgetting
from kernel_specs.restricted.wire.sockets import RouterSocket
from kernel_specs.restricted.wire.zmtp import encode, opening

LARGEST = 4
"""Most threads of a native pool in a kernel, as `confine.environment` sets it for a cold start."""
OPENBLAS = "openblas"
SETTERS = {
    OPENBLAS: (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libgomp": ("omp_set_num_threads",),
    "libiomp5": ("omp_set_num_threads",),
}
"""Functions that set the number of threads, by a part of the library's name."""


@dataclass(frozen=True)
class Pools:
    """Functions that set the number of threads, of the native libraries that are loaded.

    sized    of pools that start threads when needed; the number holds for the calling thread
    filled   of pools that start threads at once; each then spins for some 25 ms before it sleeps
    """

    sized: Sequence[Any] = ()
    filled: Sequence[Any] = ()


def find_pools() -> Pools:
    """Return the pools of the libraries that are loaded now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    sized: list[Any] = []
    filled: list[Any] = []
    for path in sorted(paths):
        for part, names in SETTERS.items():
            if part in Path(path).name:
                library = ctypes.CDLL(path)
                known = [getattr(library, name) for name in names if hasattr(library, name)]
                (filled if part == OPENBLAS else sized).extend(known[:1])
    return Pools(sized, filled)


def set_size(setters: Sequence[Any]) -> None:
    """Set the size of thread pools in a kernel, by its own set of processors."""
    threads = min(LARGEST, len(os.sched_getaffinity(0)))
    for setter in setters if threads > 1 else ():
        setter(ctypes.c_int(threads))


CELLS = ("1", "print('text')", "import math\nmath.pi", "def f(): return [1]\nf()")
FAILS = "1/0"
LIBRARY_CELLS = {
    "numpy": "import numpy\nnumpy.linspace(0, 1, 9).reshape(3, 3) @ numpy.eye(3)",
    "pandas": (
        "import pandas\n"
        "frame = pandas.DataFrame({'a': [1, 1, 2], 'b': [0.5, 1.5, 2.5], 'c': list('xyz')})\n"
        "print(frame.groupby('a').b.mean(), frame[frame.b > 1].sort_values('c'))\n"
        "frame.describe()"
    ),
    "matplotlib": "import matplotlib.pyplot\nmatplotlib.pyplot.plot([1, 2])",
}
"""A cell with a typical first use of each library."""


class _Nowhere:
    """A socket that drops every message."""

    def send_multipart(self, *_: Any, **__: Any) -> None:
        """Drop a message."""


def rehearse(app: Any) -> None:
    """Run cells in an unconnected kernel's shell, then restore its names and history.

    They fill caches that all children share: lazy imports, traits, bytecode.
    """
    _use_sockets()
    try:
        socket.socket(socket.AF_UNIX).close()
    except PermissionError:  # with mounted folders; kernels then change multiprocessing's default
        importlib.import_module("multiprocessing.connection")
    _use_loops()
    for result in _run_cells(app, (*CELLS, FAILS))[:-1]:
        result.raise_error()


def _run_cells(app: Any, cells: Sequence[str]) -> list[Any]:
    """Run cells as in a kernel, and return their results; no event loop is left."""
    shell = app.shell
    with forgetting(shell), _disconnected(shell):
        results = [
            shell.run_request(cell, silent=False, store_history=False, cell_id=None)
            for cell in cells
        ]
        shell.loop.close()
        asyncio.set_event_loop(None)
    return results


@contextlib.contextmanager
def _disconnected(shell: Any) -> Iterator[None]:
    hook, publisher = shell.displayhook, shell.display_pub
    streams = sys.stdout, sys.stderr
    sockets = hook.pub_socket, publisher.pub_socket
    hook.pub_socket = publisher.pub_socket = _Nowhere()
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        hook.pub_socket, publisher.pub_socket = sockets


def _use_sockets() -> None:
    """Send a message each way over a connection, then close it."""
    router = RouterSocket(None)
    client, end = socket.socketpair()
    with contextlib.closing(router), client:
        router.take_in(end)
        client.send(opening(b"DEALER") + encode([b"request", b""]))
        message = router.receive()
        if message is not None:
            router.send(message)


def _use_loops() -> None:
    from tornado.ioloop import IOLoop

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(asyncio.sleep(0))
    background = IOLoop(make_current=False)
    thread = threading.Thread(target=background.start)
    thread.start()
    background.add_callback(background.stop)
    thread.join()
    background.close()


@dataclass(frozen=True)
class Inherited:
    """Counts of threads, shared mappings and descriptors, which no fork may share."""

    threads: int
    mappings: int
    channels: int

    @classmethod
    def now(cls) -> Inherited:
        """Count threads, writable shared mappings, and descriptors other than regular files."""
        return cls(
            threads=len(list(Path("/proc/self/task").iterdir())),
            mappings=sum(
                line.split()[1][1::2] == "ws"
                for line in Path("/proc/self/maps").read_text().splitlines()
            ),
            channels=sum(not stat.S_ISREG(mode) for mode in _descriptors().values()),
        )

    def more_than(self, before: Inherited) -> bool:
        """Return True if any count is above that of `before`."""
        return (
            self.threads > before.threads
            or self.mappings > before.mappings
            or self.channels > before.channels
        )


def plain_files() -> dict[int, tuple[int, int]]:
    """Return device and inode by descriptor of files that packages keep open, such as fonts."""
    return {
        fd: _identity(fd)
        for fd, mode in sorted(_descriptors().items())
        if stat.S_ISREG(mode) and _access(fd) == os.O_RDONLY
    }


def own_files(files: Mapping[int, tuple[int, int]]) -> list[int]:
    """Reopen files at their descriptors after a fork, for this process alone; return those.

    Skips descriptors that a package has closed in the child or that refer to another file now.
    """
    kept: list[int] = []
    for fd, identity in files.items():
        with contextlib.suppress(OSError):
            if _identity(fd) == identity:
                _own(fd)
                kept.append(fd)
    return kept


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _own(fd: int) -> None:
    """Reopen a file at its descriptor, so that its offset is no longer shared."""
    fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(fresh, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(fresh, fd, inheritable=False)
    finally:
        os.close(fresh)


def _access(fd: int) -> int:
    content = Path(f"/proc/self/fdinfo/{fd}").read_text()
    flags = next(line.split()[1] for line in content.splitlines() if line.startswith("flags:"))
    return int(flags, 8) & (os.O_ACCMODE | os.O_PATH)


def _descriptors() -> dict[int, int]:
    """Return file modes by open descriptor, without the standard streams."""
    found: dict[int, int] = {}
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the one that was open to list them
            if fd >= linux.FIRST_FD:
                found[fd] = os.fstat(fd).st_mode
    return found


COMPANIONS = {
    "matplotlib": ("matplotlib.pyplot", "matplotlib_inline.backend_inline"),
    "plotly": ("plotly.express",),
    "sklearn": ("sklearn.linear_model",),
}
"""Modules to import along with another, because most code that uses that loads them."""


_REASON_CHARS = 300
FIRST = ("numpy", "pandas", "matplotlib")
"""Modules to import before all others: most analyses begin with them."""


@dataclass(frozen=True)
class PreloadResult:
    """Result of a template's imports.

    missing  reasons by module that could not be imported
    folders  hidden folders in /tmp that imports made and may refer to; each kernel gets them
    pools    native thread pools of the imported modules
    """

    missing: dict[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    pools: Pools = field(default_factory=Pools)


def ordered(names: Sequence[str]) -> list[str]:
    """Return modules in the order in which they are imported."""
    return sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def begin(kernel: host.KernelHost) -> PreloadResult:
    """Import the kernel itself, and limit thread pools of later modules to one thread.

    The operator's environment variables stay.
    """
    os.environ.update(
        confine.environment(BootConfig(workspace="/workspace", tmp="/tmp"), threads=1)
    )
    kernel.preload()
    missing: dict[str, str] = {}
    try:
        rehearse(kernel._app)
    except Exception as error:  # noqa: BLE001  # kernels are only a little slower
        missing["rehearsal"] = reason(error)
    return loaded(missing)


def reason(error: Exception) -> str:
    """Return type and text of an error, cut to `_REASON_CHARS`."""
    return f"{type(error).__name__}: {error}"[:_REASON_CHARS]


def add(name: str) -> str:
    """Import a module and its companions; return why that failed, or ""."""
    try:
        for module in (name, *COMPANIONS.get(name, ())):
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  # a cell that imports it will report the error
        return reason(error)
    return ""


def use(kernel: host.KernelHost, name: str) -> str:
    """Run the cell of a module in `LIBRARY_CELLS`; return why that failed, or ""."""
    try:
        _run_cells(kernel._app, [LIBRARY_CELLS[name]])[0].raise_error()
    except Exception as error:  # noqa: BLE001  # its first use in a kernel is only slower
        return f"its first use failed: {type(error).__name__}: {error}"[:_REASON_CHARS]
    if name == "matplotlib":
        _unload_backend()
    return ""


def _unload_backend() -> None:
    """Let the first figure of a kernel load the inline backend, which undoes an earlier `ioff`."""
    matplotlib: Any = sys.modules["matplotlib"]
    matplotlib.pyplot._backend_mod = None
    matplotlib.interactive(False)
    if sys.modules.pop("matplotlib_inline.backend_inline", None) is not None:
        del sys.modules["matplotlib_inline"].backend_inline


def loaded(missing: dict[str, str]) -> PreloadResult:
    """Return the result of the imports so far; `missing` are the modules that failed."""
    return PreloadResult(missing, _hidden_folders(), find_pools())


def _hidden_folders() -> tuple[str, ...]:
    """Return hidden folders in /tmp and all folders below them; parents come first."""
    found: list[str] = []
    for top in Path("/tmp").glob(".*"):
        found += [folder for folder, _, _ in os.walk(top)]
    return tuple(found)
