"""The application: IPKernelApp in two phases, with what this kernel does not need left out."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr"

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import cast

from ipykernel.kernelapp import IPKernelApp
from IPython.core import release
from IPython.core.profiledir import ProfileDir
from tornado.ioloop import IOLoop
from tornado.platform.asyncio import BaseAsyncIOLoop
from traitlets.config import Config

from kernel_specs.restricted import channel, interrupts, iopub, peers, session, zmtp
from kernel_specs.restricted import console as console_module
from kernel_specs.restricted.channel import Channel
from kernel_specs.restricted.config import BootConfig, BootError
from kernel_specs.restricted.console import Console
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.iopub import HIGH_WATER_BYTES, IOPub
from kernel_specs.restricted.kernel import SandboxKernel
from kernel_specs.restricted.peers import Publisher, Router, listen
from kernel_specs.restricted.recorder import Recorder
from kernel_specs.restricted.service import ServiceThread
from kernel_specs.restricted.session import LeanSession


class _ProfileDir(ProfileDir):
    """A profile folder without its five subfolders and README: nothing is ever stored there."""

    def _mkdir(self, path: str, mode: int | None = None) -> bool:
        return False


class KernelApp(IPKernelApp):
    """`prepare` makes the shell (before a fork), `connect` the sockets and the thread (after it).

    No config files are read: their folders belong to user code.
    """

    def prepare(self) -> None:
        """Create kernel and shell: no thread, no socket, no event loop."""
        self.gate = InterruptGate(
            module.__file__ or ""
            for module in (channel, interrupts, iopub, peers, session, zmtp, console_module)
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
        # Advice for people at a terminal, which IPython gives whenever a cell raises SystemExit.
        warnings.filterwarnings("ignore", message="To exit: use", module=r"IPython\.core")

    def connect(self, boot: BootConfig, connection_file: Path) -> None:
        """Bind the sockets, take over stdout and stderr, start the service thread."""
        self.connection_file = str(connection_file)
        self.load_connection_file()
        self.session.renew()
        if getattr(self, "curve_secretkey", None) is not None:  # since ipykernel 7.4
            raise BootError("this kernel does not encrypt its sockets: take a private folder (ipc)")
        loop = cast(BaseAsyncIOLoop, IOLoop.current())
        unbound = 0 in (self.shell_port, self.iopub_port, self.stdin_port, self.control_port)
        listening, self.iopub_port = self._listen(self.iopub_port)
        publisher = Publisher(listening, HIGH_WATER_BYTES)
        self.iopub = IOPub(
            publisher, self.session, boot.output, self.gate, Recorder(boot.recorder_fd)
        )
        self.console = Console(self.iopub)
        self._keep_stderr()
        self.console.redirect()
        self.console.install()
        self.service = ServiceThread(self.console, self.iopub, self.gate, boot.output.flush_seconds)
        self.service.watch_output(publisher)
        shell, self.shell_port = self._router(self.shell_port)
        control, self.control_port = self._router(self.control_port)
        stdin, self.stdin_port = self._router(self.stdin_port)
        heartbeat, self.hb_port = self._router(self.hb_port)
        self.service.watch_heartbeat(heartbeat)
        self.kernel.shell_stream = Channel(shell, loop, collects=True)
        self.kernel.control_stream = Channel(control, self.service.io_loop)
        self.kernel.stdin_socket = Channel(stdin, loop)
        if unbound:
            self.write_connection_file()
        self._wire()

    def run(self) -> None:
        """Serve until shutdown. An interrupt never ends the loop."""
        self.kernel.start()
        self.service.start()
        while self._interrupted_loop():
            if self.gate.cancel is not None:
                self.gate.cancel()
        self.service.main_ended.set()

    def _interrupted_loop(self) -> bool:
        """Run the loop; True when a task that user code had left on it ended the loop."""
        try:
            self.kernel.io_loop.asyncio_loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            return True
        return False

    def close(self) -> None:
        """Send what is left."""
        self.iopub.close()

    def _wire(self) -> None:
        kernel, shell, hook = self.kernel, self.shell, self.shell.displayhook
        kernel.iopub = kernel.iopub_socket = self.iopub
        kernel.console, kernel.service = self.console, self.service
        kernel.ident = os.urandom(16).hex()
        hook.pub_socket = shell.display_pub.pub_socket = self.iopub
        hook.topic = kernel._topic("execute_result")
        kernel.record_ports(
            {
                f"{name}_port": getattr(self, f"{name}_port")
                for name in ("shell", "iopub", "stdin", "hb", "control")
            }
        )

    def _listen(self, port: int) -> tuple[socket.socket, int]:
        return listen(self.transport, self.ip, port)

    def _router(self, port: int) -> tuple[Router, int]:
        listening, port = self._listen(port)
        return Router(listening), port

    def _keep_stderr(self) -> None:
        """Crash traces and the kernel's own log go where file descriptor 2 led at exec."""
        host = os.dup(2)
        faulthandler.enable(file=host, all_threads=False)
        handler = logging.StreamHandler(os.fdopen(host, "w", buffering=1, closefd=False))
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        self.log.handlers[:] = [handler]
        logging.getLogger("tornado").addHandler(handler)


def create() -> KernelApp:
    """The one application of this process, logging errors only."""
    log = logging.getLogger("kernel")
    log.propagate = False
    log.setLevel(logging.ERROR)
    log.addHandler(logging.StreamHandler(sys.stderr))
    config = Config()
    config.HistoryManager.enabled = False  # else a database and a thread
    config.InteractiveShell.colors = "nocolor" if release.version_info[0] >= 9 else "NoColor"
    config.IPKernelApp.kernel_class = "kernel_specs.restricted.kernel.SandboxKernel"
    return KernelApp.instance(config=config, log=log, session=LeanSession())
