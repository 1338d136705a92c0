"""Grow a template in stages: a forked successor imports more modules, then replaces its parent.

Meanwhile the parent forks kernels with the modules that it has. A module that starts threads, exits
or hangs costs only the successor; the next one leaves that module out.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from kernel_specs import linux
from kernel_specs.restricted import host
from kernel_specs.template import immortal, packets, preload

STAGE_S = 0.15
"""Seconds of imports after which a successor takes over, once the current module is imported."""
IMPORT_S = 60.0
"""Upper bound in seconds for one module with its companions, on a busy machine."""
UNFIT = "it starts threads or holds what kernels must not share"
_ENDED = "it ended the process that imported it"
_LATE = f"it was not imported within {IMPORT_S:g} s"


@dataclass
class Stage:
    """A stage of a template: its imports (`loaded`) and the modules still to be imported.

    `unused` modules are imported, but their first cell has not run; those in `left` were not tried.
    A `bare` stage has the kernel alone. The one after it is `awaited`, as kernels may wait for it:
    modules that it imports run their first cell in the next stage.
    """

    loaded: preload.PreloadResult
    left: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    bare: bool = False
    awaited: bool = False

    @property
    def to_come(self) -> list[str]:
        """Modules that a successor runs a cell of or imports, in order."""
        return [*self.unused, *self.left]

    def without(self, name: str, why: str) -> None:
        """Give up a module: the one that a successor was importing, or without `name` the next."""
        name = name or self.to_come[0]
        self.loaded.missing[name] = why
        (self.unused if name in self.unused else self.left).remove(name)

    def over(self) -> None:
        """Clear the modules to come: a successor has imported them or has them to come."""
        self.unused.clear()
        self.left.clear()

    def message(self) -> dict[str, Any]:
        """Return the message about this stage for init and server."""
        return {"op": "ready", "missing": self.loaded.missing, "left": len(self.to_come)}


class NextZygote:
    """A forked child of a zygote that imports more modules, as its parent sees it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link = link
        self.pid = pid
        self.taking = ""
        self.why = _ENDED
        self.deadline = time.monotonic() + IMPORT_S

    @classmethod
    def begin(cls) -> NextZygote | socket.socket:
        """Fork; return a NextZygote in the parent, and in the child its socket to the parent.

        Raises OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        try:
            pid = os.fork()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        if pid:
            theirs.close()
            return cls(ours, pid)
        ours.close()
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        return theirs

    @property
    def left_ms(self) -> int:
        """Milliseconds until the successor's deadline; 0 after that."""
        return max(0, round(1000 * (self.deadline - time.monotonic())))

    def heard(self) -> dict[str, Any] | None:
        """Receive a message; return it if it reports a complete stage, else None.

        Raises EOFError if the successor has ended.
        """
        try:
            received = packets.receive(self.link, wait=False)
        except BlockingIOError:
            return None
        if received is None:
            raise EOFError
        message, fds = received
        linux.close_all(fds)
        if message["op"] == "ready":
            return message
        if message["op"] == "unfit":
            self.why = UNFIT
        else:
            self.taking = str(message["name"])
            self.deadline = time.monotonic() + IMPORT_S
        return None

    def over(self, *, late: bool = False) -> None:
        """Kill the successor and close the socket; `late` if its deadline has passed."""
        if late:
            self.why = _LATE
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        self.link.close()


def grow(kernel: host.KernelHost, link: socket.socket, before: Stage) -> Stage:
    """Run cells and import modules in the successor for `STAGE_S`; return its stage.

    Exits if a module starts threads or opens what forks must not share. After the last module,
    objects are made immortal where that is possible.
    """
    missing = dict(before.loaded.missing)
    held = preload.Inherited.now()
    end = time.monotonic() + STAGE_S
    done = 0
    gc.disable()
    unused: list[str] = []
    for name in before.to_come:
        packets.send(link, {"op": "takes", "name": name})
        why = "" if name in before.unused else preload.add(name)
        if not why and name in preload.LIBRARY_CELLS:
            if before.bare:
                unused.append(name)
            else:
                why = preload.use(kernel, name)
        if why:
            missing[name] = why
        if preload.Inherited.now().more_than(held):
            packets.send(link, {"op": "unfit"})
            os._exit(0)
        done += 1
        if time.monotonic() >= end:
            break
    left = [name for name in before.to_come[done:] if name in before.left]
    stage = Stage(
        preload.loaded(missing), left, [*before.unused[done:], *unused], awaited=before.bare
    )
    if not stage.to_come:
        immortal.keep()
    gc.enable()
    linux.prctl(linux.PR_SET_PDEATHSIG, 0)
    return stage
