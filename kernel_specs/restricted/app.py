"""The application: IPKernelApp in two phases, without the parts that this kernel does not need."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr"

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any, TypeAlias

from ipykernel.kernelapp import IPKernelApp
from IPython.core import release
from IPython.core.profiledir import ProfileDir
from traitlets.config import Config

from kernel_specs.restricted import interrupts, service
from kernel_specs.restricted.config import ENDS, BootConfig, BootError
from kernel_specs.restricted.console import iopub
from kernel_specs.restricted.console import streams as console_module
from kernel_specs.restricted.console.iopub import HIGH_WATER_BYTES, IOPubPublisher, OutputRingWriter
from kernel_specs.restricted.console.streams import Console
from kernel_specs.restricted.display import bundles
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.kernel import SandboxKernel
from kernel_specs.restricted.policy import imports
from kernel_specs.restricted.service import Channel, ServiceThread
from kernel_specs.restricted.wire import session, sockets, zmtp
from kernel_specs.restricted.wire.session import LeanSession
from kernel_specs.restricted.wire.sockets import RouterSocket, XPubSocket, listen

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class _ProfileDir(ProfileDir):
    """A profile folder without its five subfolders and README."""

    def _mkdir(self, path: str, mode: int | None = None) -> bool:
        return False


class KernelApp(IPKernelApp):
    """`prepare` makes the shell (before a fork), `connect` the sockets and the thread (after it).

    No config files are read: their folders belong to user code.
    """

    stderr_fd = -1
    """Duplicate of file descriptor 2 as it was at exec: the host reads it."""

    def prepare(self) -> None:
        """Create kernel and shell: no thread, no socket, no event loop."""
        self.gate = InterruptGate(
            module.__file__ or ""
            for module in (
                *(service, interrupts, iopub, sockets, session, zmtp),
                console_module,
            )
        )
        profile = Path(os.environ.get("IPYTHONDIR") or Path(self.ipython_dir)) / "profile_default"
        self.profile_dir = _ProfileDir(location=str(profile), parent=self)
        self.kernel = SandboxKernel.instance(
            parent=self,
            session=self.session,
            gate=self.gate,
            log=self.log,
            profile_dir=self.profile_dir,
            user_ns=self.user_ns,
        )
        self.shell = self.kernel.shell
        self.shell.gate = self.gate
        self.shell.configurables.append(self)
        bundles.prepare(self.shell)
        # Advice for people at a terminal, which IPython gives whenever a cell raises SystemExit.
        warnings.filterwarnings("ignore", message="To exit: use", module=r"IPython\.core")

    def connect(self, boot: BootConfig, connection_file: Path) -> None:
        """Receive or bind the sockets, capture stdout and stderr, make the service thread."""
        self.connection_file = str(connection_file)
        info = json.loads(connection_file.read_bytes())
        if "curve_secretkey" in info:
            raise BootError("this kernel does not encrypt its sockets: take a private folder (ipc)")
        self.session.renew(info.get("key", "").encode(), info.get("signature_scheme"))
        loop = self.shell.loop
        if boot.sealed:
            _let_processes_meet_over_tcp()
        if boot.tools:
            self.kernel.tools_fd = _sent(boot, 1)[0].detach()
            imports.open_tools(self.kernel.tools_fd)
        ends, opened, ports = _sockets(info, boot)
        publisher = XPubSocket(opened.get("iopub"), HIGH_WATER_BYTES)
        self.iopub = IOPubPublisher(
            publisher, self.session, boot.output, self.gate, OutputRingWriter(boot.ring_fd)
        )
        self.console = Console(self.iopub)
        self._keep_stderr()
        self.console.install()
        self.console.redirect()
        self.service = ServiceThread(self.console, self.iopub, self.gate, boot.output.flush_seconds)
        self.service.watch_output(publisher)
        self.service.watch_heartbeat(RouterSocket(opened.get("hb")))
        shell = RouterSocket(opened.get("shell"), takes_descriptors=True)
        control = RouterSocket(opened.get("control"))
        self.kernel.shell_stream = Channel(shell, loop, collects=True)
        self.kernel.control_stream = Channel(control, self.service.io_loop, watched=True)
        self.kernel.stdin_socket = Channel(RouterSocket(opened.get("stdin")), loop)
        self.console.on_fork = self._leave_requests
        takers = (shell.take_in, control.take_in, publisher.take_in)
        for take_in, end in zip(takers, ends, strict=False):
            take_in(end)
        if not ports.items() <= info.items():
            info.update(ports)
            self.load_connection_info(info)
            self.write_connection_file()
        self._wire(ports)

    def run(self) -> None:
        """Serve until shutdown. An interrupt never ends the loop."""
        self.kernel.start()
        self.service.start()
        try:
            self.kernel.serve()
        finally:
            self.kernel.end_child()  # a forked child skips the exit steps of its parent
        self.service.main_ended.set()

    def _leave_requests(self) -> None:
        """Close the request channels in a forked child: further requests are for its parent."""
        for channel in (self.kernel.shell_stream, self.kernel.control_stream):
            channel.leave()

    def close(self) -> None:
        """Send the remaining output, and close iopub."""
        self.iopub.close()

    def _wire(self, ports: dict[str, int]) -> None:
        kernel, shell, hook = self.kernel, self.shell, self.shell.displayhook
        kernel.iopub = kernel.iopub_socket = self.iopub
        kernel.console, kernel.service = self.console, self.service
        kernel.ident = os.urandom(16).hex()
        hook.pub_socket = shell.display_pub.pub_socket = self.iopub
        hook.topic = kernel._topic("execute_result")
        kernel.record_ports(ports)

    def _keep_stderr(self) -> None:
        """Send crash traces and the kernel's log to file descriptor 2 as it was at exec."""
        host = self.stderr_fd = os.dup(2)
        faulthandler.enable(file=host, all_threads=False)
        handler = logging.StreamHandler(os.fdopen(host, "w", buffering=1, closefd=False))
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.log.handlers[:] = [handler]
        logging.getLogger("tornado").addHandler(handler)


_Sockets: TypeAlias = "tuple[list[socket.socket], dict[str, socket.socket], dict[str, int]]"


def _sockets(info: dict[str, Any], boot: BootConfig) -> _Sockets:
    """Return the sockets of `ENDS`, or listening sockets by channel, and the ports of all channels.

    Raises BootError, OSError.
    """
    ports = {f"{name}_port": int(info.get(f"{name}_port", 0)) for name in CHANNELS}
    if boot.connected:
        return _sent(boot, len(ENDS)), {}, ports
    if boot.sealed:
        return [], dict(zip(CHANNELS, _sent(boot, len(CHANNELS)), strict=True)), ports
    return [], *_listening(info)


def _listening(info: dict[str, Any]) -> tuple[dict[str, socket.socket], dict[str, int]]:
    """Return listening sockets by channel, as a connection file places them, and their ports.

    A port that the file leaves open (0) is chosen here. Raises OSError.
    """
    transport, ip = info.get("transport", "tcp"), info.get("ip", "127.0.0.1")
    opened, ports = {}, {}
    for name in CHANNELS:
        port = f"{name}_port"
        opened[name], ports[port] = listen(transport, ip, int(info.get(port, 0)))
    return opened, ports


def _let_processes_meet_over_tcp() -> None:
    """Set multiprocessing's default to TCP, for a process that cannot make Unix sockets."""
    from multiprocessing import connection  # costs 2 ms, unless the template has loaded it

    connection.default_family = "AF_INET"  # type: ignore[attr-defined]


def _sent(boot: BootConfig, count: int) -> list[socket.socket]:
    """Return the `count` sockets that the host sends before anything else. Raises BootError."""
    with socket.socket(fileno=os.dup(boot.ready_fd)) as host:
        _, fds, _, _ = socket.recv_fds(host, 16, count, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != count:
        raise BootError("the sockets of this kernel did not come from the host")
    return [socket.socket(fileno=fd) for fd in fds]


def create() -> KernelApp:
    """Return this process's only application, which logs errors alone."""
    log = logging.getLogger("kernel")
    log.propagate = False
    log.setLevel(logging.ERROR)
    log.addHandler(logging.StreamHandler(sys.stderr))
    config = Config()
    config.HistoryManager.enabled = False  # else a database and a thread
    config.InteractiveShell.colors = "nocolor" if release.version_info[0] >= 9 else "NoColor"
    config.IPKernelApp.kernel_class = "kernel_specs.restricted.kernel.SandboxKernel"
    return KernelApp.instance(config=config, log=log, session=LeanSession())
