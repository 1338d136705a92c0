"""Process attributes, environment and resource limits, set before other modules are imported."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

from kernel_specs import linux
from kernel_specs.landlock import calls
from kernel_specs.restricted.config import BootConfig, BootError, ProcessLimits

MIB = 1024 * 1024
SHIMS = Path(__file__).parents[1] / "shims"
"""Programs and modules for child processes alone."""
ADDRESS_SPACE_OVERHEAD = 768 * MIB
"""Bytes of address space that a kernel with numpy and pandas maps and never touches, at most."""
LEAST_ALLOWANCE, MOST_ALLOWANCE = 64 * MIB, 256 * MIB
"""Bytes of untouched address space that one cell may add, as imports do. They grow with the memory
budget, like the host's own limit, which must exceed what a cell can touch."""
LEAST_ROOM = 32 * MIB
"""Bytes of address space that a cell always gets: even deleting variables needs some."""
SMALL_ROOM = 2 * MIB
"""Bytes of address space of a cell when earlier cells have used up `LEAST_ROOM`."""
MEMORY_RESERVE = 128 * MIB
"""Bytes of address space that `Reserve.open` adds."""
RESERVED_ADDRESSES = 68 * 1024 * MIB
"""Bytes of address space beyond that, for programs that reserve it without access. V8, which draws
charts, reserves 64 GiB. RLIMIT_DATA limits writable memory and does not count reservations."""
SPIN = "18"
"""OPENBLAS_THREAD_TIMEOUT: idle threads spin for 2**18 cycles, 0.1 ms, before they sleep. Without
the variable it is 2**26: each new kernel kept a processor busy for some 25 ms."""
PENDING_SIGNALS = 1024
"""Limit of queued signals, timers included, so that enough are left for other kernels."""
MESSAGE_QUEUE_BYTES = 256 * 1024
"""Bytes of POSIX message queues: three of Linux's default size, of which a user may have nine."""


def confine(config: BootConfig) -> None:
    """Apply the host's limits, environment and folders.

    Without boot.json only unblock signals and start a session.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the server's parent may have blocked some
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(PermissionError):  # leads a process group already
            os.setsid()
    if not config.confined:
        return
    if config.strict:  # before threads exist and code of packages runs
        _read_no_more(config)
    os.umask(0o077)
    apply_limits(config.limits)
    os.environ.clear()
    os.environ.update(environment(config) | config.variables)
    if "TZ" in config.variables:
        time.tzset()
    if config.start:
        os.chdir(config.start)


def _read_no_more(config: BootConfig) -> None:
    """Enter the Landlock rules of strict mounts. Raises BootError, OSError."""
    with socket.socket(fileno=os.dup(config.ready_fd)) as channel:
        _, fds, _, _ = socket.recv_fds(channel, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise BootError("the rules about strict mounts did not come from the host")
    try:
        calls.read_no_more(fds[0], config.strict)
    finally:
        os.close(fds[0])


def environment(config: BootConfig, *, threads: int | None = None) -> dict[str, str]:
    """Return the fixed environment of a kernel, without any variable of the server.

    `threads` is the size of native thread pools. By default it is the number of usable processors,
    at most 4: each thread costs address space.
    """
    at_hand = min(len(os.sched_getaffinity(0)), config.limits.cpus or 4)
    pool = str(threads or min(4, at_hand))
    tmp = Path(config.tmp)
    names = {
        "HOME": config.workspace or config.tmp,
        "USER": "kernel",  # the kernel's uid may be missing in the host's list of users
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TMPDIR": config.tmp,
        "TERM": "dumb",
        "NO_COLOR": "1",
        "PAGER": "cat",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # the default pool reserves 1 GB of addresses
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
        "MALLOC_ARENA_MAX": "2",
        "OPENBLAS_THREAD_TIMEOUT": SPIN,
    }
    if config.layers:  # the server's tool installs packages
        names |= {"PATH": f"{SHIMS}/bin:{names['PATH']}", "PYTHONPATH": str(SHIMS)}
    for name in ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "RAYON"):
        names[f"{name}_NUM_THREADS"] = pool
    names["POLARS_MAX_THREADS"] = pool
    folders = {
        "MPLCONFIGDIR": "matplotlib",
        "XDG_CACHE_HOME": "cache",
        "XDG_CONFIG_HOME": "config",
        "XDG_DATA_HOME": "data",
        "IPYTHONDIR": "ipython",
        "JUPYTER_CONFIG_DIR": "jupyter",
        "JUPYTER_DATA_DIR": "jupyter",
        "JUPYTER_RUNTIME_DIR": "jupyter",
    }
    names.update({name: str(tmp / f".{folder}") for name, folder in folders.items()})
    return names


def apply_limits(limits: ProcessLimits) -> None:
    """Set the resource limits, none above what the host has set."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_SIGPENDING, PENDING_SIGNALS)
    _lower(resource.RLIMIT_MSGQUEUE, MESSAGE_QUEUE_BYTES)
    for kind, value in (
        (resource.RLIMIT_NPROC, limits.pids),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
    ):
        if value > 0:
            _lower(kind, value)
    # A second malloc arena reserves 64 MiB of address space. Once its own heap is at the limit, the
    # main thread would fill that reserve, which RLIMIT_AS has counted already.
    linux.mallopt(linux.M_ARENA_MAX, 1)
    if limits.memory_bytes > 0:
        soft = limits.memory_bytes + ADDRESS_SPACE_OVERHEAD
        most = soft + MEMORY_RESERVE
        _lower(resource.RLIMIT_DATA, most)
        _lower(resource.RLIMIT_AS, soft, most + RESERVED_ADDRESSES)


def most_memory() -> int:
    """Return the most bytes of address space of this kernel, reserve included; -1 for no limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY:
        return hard
    data = resource.getrlimit(resource.RLIMIT_DATA)[1]
    return hard if data == resource.RLIM_INFINITY else min(hard, data)


def renew_memory_budget() -> None:
    """Set the soft RLIMIT_AS to the memory budget plus untouched mappings.

    It never exceeds the ceiling of `apply_limits`. One call costs some 15 µs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most_memory()
    if most == resource.RLIM_INFINITY:
        return
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        size, resident, shared = (
            int(pages) * resource.getpagesize() for pages in os.read(statm, 256).split()[:3]
        )
    finally:
        os.close(statm)
    ceiling = most - MEMORY_RESERVE
    budget = ceiling - ADDRESS_SPACE_OVERHEAD
    allowance = min(max(budget // 5 - 2 * LEAST_ALLOWANCE, LEAST_ALLOWANCE), MOST_ALLOWANCE)
    untouched = size - (resident - shared)
    wanted = budget + untouched + allowance
    least = max(min(size, wanted) + LEAST_ROOM, size + SMALL_ROOM)  # not LEAST_ROOM more each time
    wanted = min(max(wanted, least), ceiling)
    if wanted != soft and wanted > 0:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


BALLAST_BYTES = 4 * 1024 * 1024
"""Bytes of memory that is unmapped before a call of setrlimit, which allocates."""


class Reserve:
    """Address space to report a MemoryError in: opened by the error, closed by the reply."""

    def __init__(self) -> None:
        self._ballast: mmap.mmap | None = None
        self._opened = False

    def renew(self) -> None:
        """Renew the budget for the next cell."""
        self._opened = False
        if self._ballast is None:  # before the limit is lowered again
            with contextlib.suppress(MemoryError, OSError):
                self._ballast = mmap.mmap(-1, BALLAST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        renew_memory_budget()

    def open(self) -> None:
        """Raise the soft RLIMIT_AS to `most_memory`."""
        self._opened = True
        self._ballast = None  # first: this frees memory for small objects
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        if soft != (most := most_memory()):
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def close(self) -> None:
        """Renew the budget if the reserve was opened."""
        if self._opened:
            self.renew()


def _lower(kind: int, soft: int, hard: int | None = None) -> None:
    ceiling = resource.getrlimit(kind)[1]
    wanted = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        wanted = min(wanted, ceiling)
    resource.setrlimit(kind, (min(soft, wanted), wanted))
