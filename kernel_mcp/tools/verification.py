"""The tool that repeats cells and compares what they give."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import anyio
from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.errors import InputError, KernelMcpError
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.launch.base import DOORS
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import AnyContext, SessionArg, Toolbox, WaitArg
from kernel_mcp.tools.cells import check_seconds
from kernel_mcp.tools.hints import RUNS
from kernel_mcp.tools.results import notice_result
from kernel_mcp.verification import files
from kernel_mcp.verification.judge import Judge
from kernel_mcp.verification.replay import Replayer
from kernel_mcp.verification.report import Report, Verdict
from kernel_mcp.verification.steps import Log, Step, log_of, steps_of, steps_of_log

VERIFICATION_KEY = "kernel-mcp/verification"


class Verification:
    """One verification in the background; `stop` ends it, `done` is set at its end."""

    def __init__(self, path: str, cells: str, doors: frozenset[str]) -> None:
        self.about = path, cells
        self.doors = doors
        self.stop = anyio.Event()
        self.done = anyio.Event()
        self.doing = "Waiting for a kernel"
        self.report: Report | None = None
        self.failure: KernelMcpError | None = None
        self._news = anyio.Event()

    async def tell(self, text: str) -> None:
        """Note what is being done."""
        self.doing = text
        self._news.set()
        self._news = anyio.Event()

    async def run(self, manager: SessionManager, caller: Caller, session: Session) -> None:
        """Verify, until the end or `stop`. Raises nothing."""
        session.verification = self.stop
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancelled, tasks.cancel_scope)
                began = anyio.current_time()
                judge = await _judge(self, manager, caller, session)
                made = await judge.report()
                path, cells = self.about
                if cells == "all":
                    from kernel_mcp.verification.issue import issue  # builds models

                    keep = partial(issue, session, path, judge.steps, made, self.doors)
                    made = replace(made, receipt=await anyio.to_thread.run_sync(keep))
                self.report = replace(made, seconds=anyio.current_time() - began)
                tasks.cancel_scope.cancel()
        except KernelMcpError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001  # logged, and told to the caller
            log_failure(error, "verifying cells", session.handle)
            self.failure = explained(error, "verifying cells")
        finally:
            session.verification = None
            self.done.set()

    async def _cancelled(self, scope: anyio.CancelScope) -> None:
        await self.stop.wait()
        self.failure = InputError("The verification was stopped.")
        scope.cancel()

    async def follow(self, wait_s: float, call: AnyContext) -> None:
        """Wait for the end, at most `wait_s` seconds, and report progress."""
        with anyio.move_on_after(wait_s):
            async with anyio.create_task_group() as tasks:
                if call.progress is not None:
                    tasks.start_soon(self._narrate, call)
                await self.done.wait()
                tasks.cancel_scope.cancel()

    async def _narrate(self, call: AnyContext) -> None:
        assert call.progress is not None
        while True:
            news = self._news
            await call.progress(self.doing)
            await news.wait()


async def _judge(
    own: Verification, manager: SessionManager, caller: Caller, session: Session
) -> Judge:
    path, cells = own.about
    await session.notebooks.save()
    log = await anyio.to_thread.run_sync(log_of, session.cells)
    work = partial(_chosen, session, log, path, cells)
    steps, notebook = await anyio.to_thread.run_sync(work)
    if not steps:
        raise InputError("There is nothing to verify: no cell with code has run.")
    root = session.workspace.root
    born = await anyio.to_thread.run_sync(files.born_in, log, session.workspace)
    made = files.made_by(log) | born
    changed = await anyio.to_thread.run_sync(partial(files.changed, steps, made, root))
    repeat = Replayer(manager, caller, session, notebook, own.doors, own.tell, made)
    return Judge(steps, log, repeat, changed)


def _chosen(session: Session, log: Log, path: str, cells: str) -> tuple[list[Step], str]:
    """Return the cells to verify, and the path of their notebook. Blocking."""
    if not path:
        if cells != "all":
            raise InputError("cells is for a notebook: pass `path` too, or leave it out.")
        return steps_of_log(log), ""
    book = session.notebooks.book(path)
    document = book.read()
    book.check_language(document)
    return steps_of(document, log, cells), book.path


def register(box: Toolbox, services: ToolContext) -> None:
    """Add this tool to `box`."""
    tool, settings = box.tool, services.settings
    running: dict[str, Verification] = {}

    @tool(RUNS, "Verify cells")
    async def verify(
        ctx: AnyContext,
        session: SessionArg = "",
        path: Annotated[str, Field(description="A notebook; empty: the session's cells")] = "",
        cells: Annotated[str, Field(description='"all" or "to ID"')] = "all",
        wait: WaitArg = settings.wait_s,
        doors: Annotated[list[str], Field(description=f"To open: {', '.join(DOORS)}")] = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
    ) -> CallToolResult:
        """Run cells again in a fresh kernel without network, and compare what they give.

        Names the cause of a difference. After `wait` seconds, call it again to follow.
        """
        check_seconds("wait", wait, least=0)
        if unknown := [each for each in doors if each not in DOORS]:
            raise InputError(f"doors={unknown[0]!r} is no door: pass any of {', '.join(DOORS)}.")
        caller, found = await box.resolve(ctx, session)
        if found.request.interpreter is not PYTHON:
            raise InputError("verify repeats cells of Python alone, and this session has another.")
        present = running.get(found.handle)
        if present is None:
            if found.state == "busy":
                raise InputError("A cell or an install is under way: wait for its end first.")
            present = running[found.handle] = Verification(path, cells, frozenset(doors))
            services.manager.spawn(partial(present.run, services.manager, caller, found))
        elif present.about != (path, cells):
            raise InputError(
                f"Cells of this session are being verified ({present.about[0] or 'its own'}): wait "
                "for that with the same arguments, or interrupt it."
            )
        try:
            await present.follow(wait, ctx)
        except anyio.get_cancelled_exc_class():
            present.stop.set()
            raise
        if not present.done.is_set():
            return notice_result(f"{present.doing}. Call verify again to follow; interrupt stops.")
        running.pop(found.handle, None)  # another call may have followed it, too
        if present.failure is not None:
            raise present.failure
        assert present.report is not None
        return _answer(present.report)


def _answer(report: Report) -> CallToolResult:
    meta = {
        "verdict": report.verdict.value,
        "cause": report.cause.value,
        "cell": report.cell,
        "seconds": round(report.seconds, 3),
        "cells": [
            {"cell": each.name, "same": each.same, "note": each.note} for each in report.cells
        ],
    }
    text = f"{report.text}{report.receipt}"
    if report.verdict is Verdict.REPRODUCED:
        text = f"{text} ({report.seconds:.0f} s)"
    return notice_result(text, {VERIFICATION_KEY: meta})
