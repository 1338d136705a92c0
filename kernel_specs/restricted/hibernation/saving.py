"""Save variables from a forked child, which writes them to a socket of the host while cells run.

It is forked twice, between two requests, so that user code does not see a child of the kernel. The
child writes blocks: a tag, the length of the content, the content.

    n   the name of the variable pickled next; empty in the first block
    r   the report, as the reply to a dump request
    d   the dump
"""

# The shell is a traitlets class.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import fcntl
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from resource import RLIMIT_CPU
from typing import Any, NoReturn

from kernel_specs.restricted.checkpoints.blockers import look
from kernel_specs.restricted.checkpoints.suspended import fork_apart, socket_of, undisturbed
from kernel_specs.restricted.hibernation.attempt_limits import (
    LAST_RESORT,
    PASSES,
    SHARE,
)
from kernel_specs.restricted.hibernation.dumps import TOO_LARGE, DumpBytes
from kernel_specs.restricted.originals import (
    io,
    json,
    math,
    os,
    resource,
    signal,
    socket,
    threading,
    time,
)

BLOCK = struct.Struct("<cQ")
NICENESS = 19
MORE_SECONDS = 5
"""CPU seconds of the child on top of those for its values; then Linux kills it."""
STUCK_SECONDS = 10
"""CPU seconds from the interrupt of one value's code until Linux kills the child.

For RLIMIT_CPU, Linux counts ticks in which the process ran. On a busy machine these add up to more
than the CPU clock, by which code is interrupted."""

Take = Callable[[Mapping[str, Any], Callable[[str], None]], tuple[DumpBytes, dict[str, Any]]]
"""Function that pickles variables; before each it calls back with the name."""


def unfit_to_fork(own: Iterable[threading.Thread]) -> str:
    """Return the reason why a forked child could not pickle, or ""; `own` are kernel threads."""
    try:
        return ", ".join(look(own).words)
    except OSError as error:
        return f"its threads and memory cannot be looked at ({error.strerror})"


def write_from_child(host: socket.socket, take: Take, content: Mapping[str, Any]) -> None:
    """Fork a child that writes the dump of `take` to the host; return at once. Raises OSError."""
    with undisturbed():
        if fork_apart() == 0:
            _be_child(host, take, content)


def _be_child(host: socket.socket, take: Take, content: Mapping[str, Any]) -> NoReturn:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])  # SIGINT is for cells
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        most = math.ceil(time.process_time() + PASSES * content["seconds"]) + MORE_SECONDS
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(RLIMIT_CPU, (most, most))
        if not content["hurry"]:
            with contextlib.suppress(OSError):
                os.nice(NICENESS)
        fd = _alone_with(host)
        with socket_of(fd) as kept:
            _write(kept, take, content)
    except BaseException:  # noqa: BLE001  # the host detects the missing blocks
        os._exit(1)
    os._exit(0)


def _alone_with(host: socket.socket) -> int:
    """Close every descriptor but that of the host, and return that.

    Peers of the kernel's connections must see them end with the kernel.
    """
    fd = fcntl.fcntl(host.detach(), fcntl.F_DUPFD_CLOEXEC, 3)  # code may have closed one below
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, fd)
    os.closerange(fd + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.stdout = sys.stderr = io.open(os.devnull, "w")
    return fd


def _end_after(seconds: float) -> None:
    """Set RLIMIT_CPU: Linux kills this process once it has used `seconds` more of CPU time."""
    limit, most = (
        math.ceil(time.process_time() + seconds),
        resource.getrlimit(RLIMIT_CPU)[1],
    )
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(RLIMIT_CPU, (limit, most))


def _write(host: socket.socket, take: Take, content: Mapping[str, Any]) -> None:
    def on_progress(name: str) -> None:
        text = name.encode("utf-8", "replace")
        host.sendall(BLOCK.pack(b"n", len(text)) + text)
        _end_after(content["seconds"] * SHARE * LAST_RESORT + STUCK_SECONDS)

    on_progress("")
    dump, report = take(content, on_progress)
    _end_after(content["seconds"] + MORE_SECONDS)
    if content["whole"] and any(why.startswith(TOO_LARGE) for why in report["lost"].values()):
        report = {"status": "error", "reason": TOO_LARGE}
    report["cpu_s"] = time.process_time()
    text = json.dumps(report).encode()
    host.sendall(BLOCK.pack(b"r", len(text)) + text)
    if report["status"] != "ok":
        return
    host.sendall(BLOCK.pack(b"d", dump.size))
    dump.write(host.fileno())
