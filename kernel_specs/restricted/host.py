"""KernelHost: one kernel that starts in two phases, so that a template can fork between them."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.policy import imports


class KernelHost:
    """`preload` once, then fork, then `serve` in the child; a cold start does both in one process.

    Nothing that a fork would break exists before `serve`: no thread, no socket, no event loop.
    """

    def __init__(self) -> None:
        self._app: Any = None

    def preload(self, modules: tuple[str, ...] = ()) -> None:
        """Import ipykernel, create the shell, then import `modules` (failures are ignored)."""
        gc.disable()  # nothing that is made here is garbage
        sys.modules["debugpy"] = None  # type: ignore[assignment]  # 70 ms and 10 MiB
        from kernel_specs.restricted import app

        self._app = app.create()
        self._app.prepare()
        for name in modules:
            with contextlib.suppress(Exception):  # a cell that imports it will report the error
                __import__(name)
        gc.freeze()
        gc.enable()

    def freeze(self, *, collect: bool = True) -> None:
        """Exempt existing objects from garbage collection, so that children share their memory.

        With `collect` garbage is freed first, of frozen objects too: 20 ms after importing pandas.
        """
        if collect:
            gc.unfreeze()
            gc.collect()
        gc.freeze()

    def serve(
        self,
        boot: BootConfig,
        connection_file: Path,
        at_work: Callable[[], None] = lambda: None,
    ) -> None:
        """Make sockets and the service thread, report readiness, serve until shutdown.

        `at_work` is called during the first cell that takes longer than a flush interval.
        """
        from kernel_specs.restricted.checkpoints.requests import Lifeline
        from kernel_specs.restricted.hibernation.process_state import ProcessState

        _reseed(boot.seed or None)
        _extend_path(boot)
        if boot.shuffle:
            from kernel_specs.restricted import listings

            listings.shuffle(boot.shuffle)
        if not boot.policy.allow_all:
            self._guard(boot)
        self._app.kernel.boot = boot
        self._app.shell.takes_packages = bool(boot.layers)
        if boot.start != boot.workspace:
            self._app.shell.mounted_start = boot.start
        self._app.shell.user_ns["_dh"][:] = [os.getcwd()]  # noqa: PTH109  # where `%cd -` returns
        self._app.connect(boot, connection_file)
        self._app.service.at_work = at_work
        self._app.shell.process_state = ProcessState(boot.layers)
        lifeline = os.dup(boot.ready_fd) if boot.lifeline and boot.ready_fd >= 0 else -1
        self._app.kernel.lifeline = Lifeline(lifeline)
        _send_ready(boot.ready_fd)
        self._app.run()
        self._app.close()

    def _guard(self, boot: BootConfig) -> None:
        from kernel_specs.restricted.policy.guard import ImportGuard

        import_guard = ImportGuard(boot)
        import_guard.install()
        self._app.kernel.allow_imports = import_guard.allow
        self._app.shell.commands_allowed = False
        if boot.policy.deny_builtins:
            from kernel_specs.restricted.policy import guard

            own = guard.without(boot.policy.deny_builtins, boot.policy.profile, import_guard)
            guard.give_to_modules(import_guard.owns, own)
            self._app.shell.take_builtins(own)


def send_packet(fd: int, packet: dict[str, Any]) -> None:
    """Send one packet to the host and close the socket; do nothing if `fd` is -1."""
    if fd >= 0:
        with socket.socket(fileno=fd) as channel:
            channel.send(json.dumps(packet).encode())


def _send_ready(fd: int) -> None:
    from ipykernel._version import __version__

    python = ".".join(str(part) for part in sys.version_info[:3])
    packet = {"ready": True, "pid": os.getpid(), "python": python}
    send_packet(fd, {**packet, "ipykernel": __version__})


def _extend_path(boot: BootConfig) -> None:
    """Put current folder, workspace and layers before site-packages, as IPython does.

    Child processes get the layers through the environment.
    """
    place = imports.before_sites(sys.path)
    workspace = [boot.workspace] if boot.workspace else []
    sys.path[place:place] = ["", *workspace, *imports.entries(boot.layers)]
    imports.export(boot.layers)


def _reseed(seed: int | None) -> None:
    """Reseed random generators after a fork: two sessions must not draw the same numbers.

    Without a `seed` they have the entropy of the system.
    """
    if seed is not None:  # those that a cell imports later would draw from the system's entropy
        with contextlib.suppress(ImportError):
            __import__("numpy.random")
    modules: dict[str, Any] = sys.modules
    if random := modules.get("random"):
        random.seed(seed)
    if numpy_random := modules.get("numpy.random"):
        numpy_random.seed(seed)
    if uuid := modules.get("uuid"):
        uuid._node = uuid._last_timestamp = None
    if tempfile := modules.get("tempfile"):
        tempfile._name_sequence = None
    if processes := modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)
