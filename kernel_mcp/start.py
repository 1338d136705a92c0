"""Start a server: first a template for kernels, while everything else is imported."""

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
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import LEAST_MASKED
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
"""Of those that may be parts of cycles, so many more than before have the young ones looked at."""
SERVER = "kernel_mcp.server"
"""Imports all that has to do with sessions."""
DEFERRED = "kernel_mcp.deferred"
"""Has models of the MCP SDK be built when they are first used."""
PROTOCOL = "kernel_mcp.protocol"
"""Imports the MCP SDK."""
TOOLS = "kernel_mcp.tools.topics"
"""What the first request for tools needs besides."""
TEMPLATE_S = 0.2
"""Seconds that the start of a template has before the rest is imported: it takes longer than that
to build an environment."""


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
        )  # no sooner: settings that fail are reported
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
            refusal = error  # of a group of errors, it would not be told from others
        early.cancel_scope.cancel()
    if refusal is not None:
        raise refusal


@contextmanager
def _imports(*names: str) -> Iterator[dict[str, Future[ModuleType]]]:
    """Import these in a thread, in order; meanwhile other processes prepare a first kernel.

    Those that are not there by the end of this block never are: Python waits for the thread.
    """
    sysconfig.get_config_vars()  # Python does not bear that two threads are the first to ask
    halting = _StoppableImporter()
    executor = ThreadPoolExecutor(1, "import")
    try:
        yield {name: executor.submit(halting.imported, name) for name in names}
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        halting.stopped = True


class _StoppableImporter:
    """Imports a module until it has `stopped`: then no further one that it needs is looked for."""

    def __init__(self) -> None:
        self.stopped = False
        self._thread = 0

    def imported(self, name: str) -> ModuleType:
        """Import one. Raises SystemExit where it is halted, which no module takes for a lack."""
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
    """End the pause of the garbage collector, which looks at what was imported no more.

    Of many sessions it has much to look at: by its own measure it did so every few cells.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


async def proven(sandbox: Future[Sandbox]) -> Sandbox:
    """Return the sandbox that `begin_proof` has tried. Raises SandboxUnavailable."""
    return await asyncio.shield(asyncio.wrap_future(sandbox))


def _mask_log(settings: Settings) -> None:
    """Keep values of variables out of the log, and say which stay in outputs."""
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
    """Allow no core dump: a limit of 1 byte also holds for programs that dumps are piped to."""
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
    """Serve by `run` until the end has begun and is over; return the exit code."""
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
