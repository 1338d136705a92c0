"""The request for a checkpoint, and how a copy of the kernel becomes the kernel."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr, attr-defined"

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from kernel_specs.restricted.checkpoints import after_fork, blockers, suspended
from kernel_specs.restricted.config import ENDS
from kernel_specs.restricted.console.iopub import OutputRingWriter
from kernel_specs.restricted.originals import os, resource, socket
from kernel_specs.restricted.service import Channel, ServiceThread
from kernel_specs.restricted.wire.sockets import RouterSocket, XPubSocket

MOST_CLOSED = 20
"""Paths in one packet, each of 4 KiB at most."""


class Lifeline:
    """The control socket; for each checkpoint the host sends a socket over it to wait at."""

    def __init__(self, fd: int) -> None:
        """Take over a descriptor; -1 for a kernel without checkpoints."""
        self.fd = fd
        self.loops = after_fork.LoopRegistry() if fd >= 0 else None

    def take(self) -> socket.socket:
        """Return the socket that was sent last, for the current request; close earlier ones.

        Raises ValueError if there is none, OSError.
        """
        with suspended.socket_of(os.dup(self.fd)) as line:
            received = suspended.receive(line, socket.MSG_DONTWAIT)
            while received is not None:  # the last one is for this request, earlier ones timed out
                try:
                    later = suspended.receive(line, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                for fd in received[1]:
                    os.close(fd)
                received = later
        if received is None or len(received[1]) != 1:
            raise ValueError("the host has sent no place to wait at")
        return suspended.socket_of(received[1][0])


class CheckpointRequests:
    """Mixin of the kernel class: handlers of requests for checkpoints and branches."""

    CHECKPOINT_REQUESTS: ClassVar = ("kernel_mcp_checkpoint_request", "kernel_mcp_branch_request")
    lifeline: Any

    async def kernel_mcp_checkpoint_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Park a copy of this kernel; reply with the CPU seconds it took, or the hindrances."""
        content: dict[str, Any] | None
        try:
            content = take(self, self.lifeline)
        except (OSError, ValueError, MemoryError) as error:
            content = {"status": "error", "reason": f"{type(error).__name__}: {error}"}
        if content is not None:
            self.session.send(stream, "kernel_mcp_checkpoint_reply", content, parent, ident)

    async def kernel_mcp_branch_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Prepare this fresh kernel for a branch: set `BRANCH_DIR` and make that folder."""
        content = {"status": "ok"}
        try:
            _settle(self, parent["content"])
        except OSError as error:  # the folder is named; code that writes to it gets the error
            content = {"status": "error", "reason": str(error)}
        self.session.send(stream, "kernel_mcp_branch_reply", content, parent, ident)


def take(kernel: Any, lifeline: Lifeline) -> dict[str, Any] | None:
    """Park a copy of this process; return the reply's content.

    None in a copy that has become the kernel. Raises OSError, ValueError.
    """
    began = _processor_s()
    with lifeline.take() as wake:
        found = blockers.look([kernel.service])
        if found.words:
            return {"status": "refused", "hindrances": list(found.words)}
        kernel.console.flush()
        state, arrivals = after_fork.ForkState.now(found.shared), kernel.gate.arrivals
        with suspended.undisturbed():
            kernel.console.parking = True
            try:
                parent = suspended.fork_apart() != 0
                if not parent:
                    os.setsid()
                    _close_own(kernel, (lifeline.fd, *arrivals))
                    suspended.let_go({wake.fileno(), kernel.parent.stderr_fd})
                    state.part_files()
                    order, fds = suspended.park(wake)
            except BaseException as error:  # a failed copy must not run on as this kernel
                if os.getpid() == kernel._pid:
                    raise
                _give_up(wake, error)
            finally:
                kernel.console.parking = False
            if parent:
                return {"status": "ok", "seconds": _processor_s() - began}
            try:
                branch = bool(order.get("folder"))
                closed = state.restore(branch=branch)
                _connect(kernel, lifeline, order, fds)
                if branch:
                    after_fork.vary(kernel.shell.user_ns.values())
                    _settle(kernel, order)
            except BaseException as error:  # noqa: BLE001  # any error is reported to the host
                _give_up(wake, error)
        kernel.service.start()
        suspended.send(wake, alive=order["id"], closed=closed[:MOST_CLOSED])
    return None


def _processor_s() -> float:
    """Return the CPU seconds of this process and its children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _give_up(wake: socket.socket, error: BaseException) -> None:
    try:
        suspended.send(wake, error=f"{type(error).__name__}: {error}"[:2000])
    finally:
        os._exit(70)


def _settle(kernel: Any, order: dict[str, Any]) -> None:
    """Make the folder of a branch, and name it in `BRANCH_DIR`. Raises OSError."""
    folder = os.path.join(kernel.boot.workspace or ".", str(order.get("folder", "")))
    os.environ["BRANCH_DIR"] = folder
    os.makedirs(folder, exist_ok=True)


def _close_own(kernel: Any, fds: Sequence[int]) -> None:
    """Close the kernel's connections in the copy, so that they end for the host with the kernel."""
    for channel in (kernel.shell_stream, kernel.control_stream, kernel.stdin_socket):
        channel.leave()
    kernel.iopub.leave()
    kernel.console.leave()
    kernel.service.leave()
    for fd in fds:
        with contextlib.suppress(OSError):  # user code has closed it
            os.close(fd)


def _connect(kernel: Any, lifeline: Lifeline, order: dict[str, Any], fds: list[int]) -> None:
    """Serve the connections that the host has sent, with a service thread of this process.

    `fds` are those of `ENDS`, then the control socket and the output ring. Where tools are open the
    socket for their calls follows. It takes the place of the earlier one.
    """
    ends = {name: socket.socket(fileno=fd) for name, fd in zip(ENDS, fds, strict=False)}
    lifeline.fd, ring, *tools = fds[len(ENDS) :]
    for fd in tools:
        os.dup2(fd, kernel.tools_fd, inheritable=False)
        os.close(fd)
    before = kernel.service
    after_fork.close_loop(before.io_loop.asyncio_loop)
    assert lifeline.loops is not None
    lifeline.loops.renew([kernel.io_loop.asyncio_loop])
    kernel.session.renew(str(order["key"]).encode())
    kernel._pid = os.getpid()
    kernel._control_lock = asyncio.Lock()
    kernel._unanswered = None
    kernel._answers = set()
    publisher = XPubSocket(None, kernel.iopub.high_water)
    kernel.iopub.renew(publisher, OutputRingWriter(ring))
    publisher.take_in(ends["iopub"])
    kernel.console.renew()
    service = ServiceThread(
        kernel.console, kernel.iopub, kernel.gate, kernel.boot.output.flush_seconds
    )
    service.at_work = before.at_work
    kernel.service = kernel.parent.service = service
    service.watch_output(publisher)
    shell, control = RouterSocket(None, takes_descriptors=True), RouterSocket(None)
    kernel.shell_stream = Channel(shell, kernel.io_loop, collects=True)
    kernel.control_stream = Channel(control, service.io_loop, watched=True)
    kernel.stdin_socket = Channel(RouterSocket(None), kernel.io_loop)
    shell.take_in(ends["shell"])
    control.take_in(ends["control"])
    kernel._control = service.io_loop.asyncio_loop.create_task(kernel._serve_control())
