"""Start a server: first a template for kernels; meanwhile everything else is imported."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType

import anyio

from kernel_mcp.barriers import Barrier, in_full, refusal_of
from kernel_mcp.config.secrets import LEAST_MASKED
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.kernel_context import kernel_context
from kernel_mcp.linux.process import allow_many_files
from kernel_mcp.linux.shutdown import Shutdown
from kernel_mcp.output.text import Masks
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.stdio_lines import StdioLines, stdio_lines
from kernel_mcp.telemetry.logs import LogFormatter

logger = logging.getLogger(__name__)

NEW_OBJECTS = 20_000
"""Threshold of the garbage collector: new containers until the youngest generation is collected."""
SERVER = "kernel_mcp.server"
"""Module that imports everything for sessions."""
DEFERRED = "kernel_mcp.deferred"
"""Module that defers building the models of the MCP SDK until their first use."""
PROTOCOL = "kernel_mcp.protocol"
"""Module that imports the MCP SDK."""
TOOLS = "kernel_mcp.tools.topics"
"""Module that imports the rest of what the first request for tools needs."""
TEMPLATE_S = 0.2
"""Seconds to wait for the start of a template before the rest is imported.

If an environment has to be built first, which takes longer, the imports do not wait for it.
"""


async def run_stdio(settings: Settings, sandbox: Future[Sandbox], shutdown: Shutdown) -> None:
    """Serve one client on stdin and stdout until it closes them or a signal arrives."""
    async with stdio_lines() as lines:
        with anyio.CancelScope() as proving:
            shutdown.on_begin(proving.cancel)
            proved = await proven(sandbox)
        if not proving.cancel_called:
            await _serve_lines(settings, proved, lines, shutdown)


async def _serve_lines(
    settings: Settings, sandbox: Sandbox, lines: StdioLines, shutdown: Shutdown
) -> None:
    refusal: KernelMcpError | None = None
    async with kernel_context(settings, sandbox) as kernels, anyio.create_task_group() as early:
        scopes = [early.cancel_scope]
        shutdown.on_begin(lambda: scopes[-1].cancel())
        early.start_soon(
            lines.read_early, shutdown.begin
        )  # not before: an end of input would hide errors in the settings
        early.start_soon(kernels.prepare)
        with anyio.move_on_after(TEMPLATE_S):
            await kernels.factory.begun.wait()
        try:
            with _imports(SERVER, DEFERRED, PROTOCOL, TOOLS) as rest:
                server = await asyncio.wrap_future(rest[SERVER])
                async with server.with_sessions(kernels) as app, anyio.create_task_group() as tasks:
                    scopes.append(tasks.cancel_scope)
                    tasks.start_soon(server.warm_up, app)
                    protocol = await asyncio.wrap_future(rest[PROTOCOL])
                    collect_seldom()
                    tasks.start_soon(server.attend, app)
                    await protocol.serve_stdio(app, lines, shutdown.begin)
                    tasks.cancel_scope.cancel()
        except KernelMcpError as error:
            refusal = error  # raised after the task group, which would put it into a group
        early.cancel_scope.cancel()
    if refusal is not None:
        raise refusal


@contextmanager
def _imports(*names: str) -> Iterator[dict[str, Future[ModuleType]]]:
    """Import modules in a thread, in order; yield a future for each.

    Meanwhile other processes prepare a first kernel. Imports that have not finished by the end of
    the block are stopped, as Python waits for the thread at its exit.
    """
    sysconfig.get_config_vars()  # its first call is not thread-safe
    halting = _StoppableImporter()
    executor = ThreadPoolExecutor(1, "import")
    try:
        yield {name: executor.submit(halting.imported, name) for name in names}
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        halting.stopped = True


class _StoppableImporter:
    """Imports modules in one thread. Once `stopped` is True, the next import there fails."""

    def __init__(self) -> None:
        self.stopped = False
        self._thread = 0

    def imported(self, name: str) -> ModuleType:
        """Import a module. Raises SystemExit if stopped, which no module catches as ImportError."""
        self._thread = threading.get_ident()
        sys.meta_path.insert(0, self)
        try:
            return import_module(name)
        finally:
            sys.meta_path.remove(self)

    def find_spec(self, *_: object) -> None:
        """Find nothing; see `importlib.abc.MetaPathFinder`."""
        if self.stopped and threading.get_ident() == self._thread:
            raise SystemExit


def collect_seldom() -> None:
    """Enable the garbage collector, with a high threshold and without the imported objects.

    With many sessions a collection takes long; by the default threshold there was one every few
    cells.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


async def proven(sandbox: Future[Sandbox]) -> Sandbox:
    """Return the sandbox that `begin_proof` has tested. Raises SandboxUnavailable."""
    return await asyncio.shield(asyncio.wrap_future(sandbox))


def _mask_log(settings: Settings) -> None:
    """Mask secret values in the log; warn of variables too short to be masked in outputs."""
    if masks := Masks(settings.masked_values):
        for handler in logging.getLogger().handlers:
            if isinstance(handler.formatter, LogFormatter):
                handler.formatter.hide = masks.anywhere
    for each in settings.variables:
        if each.short:
            logger.warning(
                "--env %s: outputs show its value: one of less than %d characters cannot be masked "
                "without masking ordinary text.",
                each.name,
                LEAST_MASKED,
            )


def _leave_no_core() -> None:
    """Disable core dumps: with a limit of 1 byte, Linux also skips those to a pipe (core(5))."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard:
        resource.setrlimit(resource.RLIMIT_CORE, (1, hard))


def prepare_process(settings: Settings) -> None:
    """Prepare this process for sessions: its log, core dumps and limit of open files."""
    _mask_log(settings)
    if settings.secrets:
        _leave_no_core()
    allow_many_files()


def serve(
    settings: Settings,
    sandbox: Future[Sandbox],
    shutdown: Shutdown,
    run: Callable[[Settings, Future[Sandbox], Shutdown], Awaitable[None]] = run_stdio,
) -> int:
    """Serve by `run` until the shutdown is complete; return the exit code."""
    prepare_process(settings)
    with Barrier("serving") as barrier:
        try:
            anyio.run(shutdown.run, partial(run, settings, sandbox, shutdown))
        except Exception as error:
            if (refusal := refusal_of(error)) is None:
                raise
            print(f"kernel-mcp: {refusal}", file=sys.stderr)
            return 1
    if barrier.failure is not None:
        print(f"kernel-mcp: the server has ended: {in_full(barrier.failure)}", file=sys.stderr)
        return 1
    return shutdown.code
