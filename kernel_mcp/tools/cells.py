"""The tools that run code: execute, wait, interrupt, check_syntax, reset, run_script."""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from typing import Annotated, TypeAlias

import anyio
from mcp_types import CallToolResult
from pydantic import Field

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import (
    EnvironmentBuildError,
    InputError,
    KernelMcpError,
)
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.output.outputs import Position
from kernel_mcp.packages.requirements import plain
from kernel_mcp.sessions.cell import Cell, Phase
from kernel_mcp.sessions.losses import lost_names
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.session import Session
from kernel_mcp.sessions.storage import SCRIPT
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools import (
    ALWAYS_LOADED,
    AnyContext,
    CpuArg,
    LimitArg,
    MemoryArg,
    PackagesArg,
    PythonArg,
    SessionArg,
    TimeoutArg,
    Toolbox,
    WaitArg,
    Whole,
    progress_of,
)
from kernel_mcp.tools.arguments import unfenced
from kernel_mcp.tools.asking import WAITS, followed, may_ask, with_question
from kernel_mcp.tools.calls import ANSWERED_KEY, LASTING_KEY, Call
from kernel_mcp.tools.hints import ENDS, READS, REPEATS, RUNS, RUNS_SCRIPTS
from kernel_mcp.tools.models import SyntaxReport
from kernel_mcp.tools.own_limits import own_limits, own_timeout
from kernel_mcp.tools.resources import cell_of
from kernel_mcp.tools.results import (
    LOST_KEY,
    answer,
    lost_meta,
    not_begun,
    notice_block,
    notice_result,
)
from kernel_mcp.tools.scripts import run_once
from kernel_mcp.tools.sessions import interpreter_named, open_session, open_with_kernel
from kernel_mcp.tools.syntax import checked_by_kernel, judged, syntax_report

NumberArg: TypeAlias = Whole
"""Number of a cell; 0 for the running one, or the last."""
MAX_CODE_CHARS = 1_000_000
MAX_SECONDS = 7 * 24 * 3600.0
ONLY_PYTHON = (
    "dependencies and python are for Python alone: leave them out. Code of other languages has "
    "what the operator has installed."
)
MOST_LOOKED_AT = 1000
"""Number of cells, from the end, in which the agent's last one is searched."""


def register(box: Toolbox, services: ToolContext) -> None:
    """Add these tools to `box`."""
    tool, settings = box.tool, services.settings
    told = partial(answer, settings=settings)

    @tool(RUNS, "Run code", meta=ALWAYS_LOADED)
    async def execute(
        code: str,
        ctx: AnyContext,
        session: Annotated[SessionArg, Field(description="Handle or name; empty: default")] = "",
        timeout: TimeoutArg = None,
        wait: WaitArg = settings.wait_s,
        checkpoint: Annotated[bool, Field(description="Let undo go back to before it")] = False,
    ) -> CallToolResult:
        """Run code, by default Python, in a persistent notebook session and return its output.

        Variables stay for the next call; the last value and plots are shown. After `wait` seconds
        it answers `running` and the cell goes on: wait follows it, interrupt stops it.
        """
        check_code(code)
        limit_s = own_timeout(settings, timeout)
        check_seconds("wait", wait, least=0)
        caller, found = await box.resolve(ctx, session)
        code = unfenced("code", code, found.request.interpreter, caller.response)
        check_code(code)
        services.manager.check_cells(caller)
        cell = found.submit(code, limit_s or found.timeout_s, checkpoint=checkpoint)
        cell.who = caller.who
        may_ask(found, cell, ctx, settings)
        services.manager.directory.note_overlap(caller, found, cell)
        with found.queue.attending(cell):
            try:
                await followed(found, cell, wait, ctx)
            except anyio.get_cancelled_exc_class():
                found.queue.abandon(cell)
                raise
            result = await told(found, cell, caller.response, since=Position())
        return _of_running(found, cell, ctx, result)

    @tool(READS, "Wait for a cell", meta=ALWAYS_LOADED)
    async def wait(
        ctx: AnyContext,
        session: SessionArg = "",
        wait: WaitArg = settings.wait_s,
        cell: NumberArg = 0,
    ) -> CallToolResult:
        """Return a running cell's output since the last answer, or an ended one's result.

        Answers after `wait` seconds at the latest.
        """
        check_seconds("wait", wait, least=0)
        caller, found = await box.resolve(ctx, session)
        chosen = cell_of(found.cells, cell) if cell else _next_to_tell(found)
        if chosen is None:
            return await _said_again(found, caller.response, settings)
        took = chosen.questions is not None and chosen.questions.answer(ctx.answer)
        with found.queue.attending(chosen):
            try:
                await followed(found, chosen, wait, ctx)
            except anyio.get_cancelled_exc_class():
                if ctx.repeats and not chosen.finished.is_set():
                    found.queue.abandon(chosen)
                raise
            since = Position() if chosen.end_reported else chosen.reported
            result = await told(found, chosen, caller.response, since=since)
        if not cell and chosen is not _last(found):
            result.content.insert(0, notice_block(_earlier(found, chosen)))
        if took:
            result = result.model_copy(update={"meta": {**(result.meta or {}), ANSWERED_KEY: True}})
        return _of_running(found, chosen, ctx, result)

    @tool(REPEATS, "Interrupt a cell")
    async def interrupt(
        ctx: AnyContext, session: SessionArg = "", cell: NumberArg = 0
    ) -> CallToolResult:
        """Stop the running cell and return its output; variables stay, or the answer says so."""
        caller, found = await box.resolve(ctx, session)
        chosen = cell_of(found.cells, cell) if cell else found.queue.of_agent
        if chosen is None and found.installation is not None:
            found.installation.set()
            return notice_result(
                "The installation is being stopped; its call says what came of it."
            )
        if chosen is None and found.verification is not None:
            found.verification.set()
            return notice_result("The verification is being stopped.")
        if chosen is None:
            return notice_result(_nothing_runs(found))
        if chosen.finished.is_set():
            return notice_result(
                f"Cell {cell} is not running: it ended with {chosen.status.value}."
            )
        with found.queue.attending(chosen):
            running = found.queue.current
            if running is chosen:
                found.request.interpreter.require("interrupt")
            theirs = running is not None and running is not chosen
            stopped = await found.scheduler.interrupt(chosen if cell or theirs else None)
            if stopped is None:
                return notice_result(_nothing_runs(found))
            if ctx.of_view:
                return notice_result(f"Cell {stopped.number} was stopped.")
            return await told(found, stopped, caller.response, since=stopped.reported)

    @tool(READS, "Check code without running it", computes=True)
    async def check_syntax(
        code: str,
        ctx: AnyContext,
        session: SessionArg = "",
        dependencies: PackagesArg = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
        python: PythonArg = "",
    ) -> SyntaxReport:
        """Find syntax errors, refused imports and unknown names without running the code.

        With `dependencies` or `python` it is checked as for run_script.
        """
        caller, found = await box.resolve(ctx, session)
        interpreter = found.request.interpreter
        interpreter.require("check_syntax")
        code = unfenced("code", code, interpreter, caller.response)
        if not interpreter.checks:
            return syntax_report(found, await judged(services, found, code, dependencies, python))
        if dependencies or python:
            raise InputError(ONLY_PYTHON)
        return syntax_report(found, await checked_by_kernel(found, code))

    @tool(ENDS, "Reset a session")
    async def reset(
        ctx: AnyContext,
        session: SessionArg = "",
        packages: Annotated[bool, Field(description="Drop installed ones too")] = False,
        files: Annotated[bool, Field(description="Empty the workspace too")] = False,
    ) -> CallToolResult:
        """Start a fresh kernel: all variables are lost."""
        caller, found = await box.resolve(ctx, session)
        lost = await found.reset(
            packages=packages, files=files, progress=progress_of(ctx) or silence
        )
        if lost is not None:
            caller.response.attach(found.notifications, [lost])
        loss = lost.loss if lost is not None else None
        names = lost_names(loss) if loss is not None else ""
        place = "is now empty" if files else "is as it was"
        dropped = " The packages that had been installed are gone too." if packages else ""
        if packages and (step := found.request.interpreter.lacking.get("install")):
            dropped = f" Packages are as they were. {step}"
        return notice_result(
            f"Session {found.handle} has a fresh kernel: all {found.kernel_state.contents} are "
            f"gone.{names} The workspace {place}.{dropped}",
            meta={} if loss is None else {LOST_KEY: lost_meta(found.handle, [loss])},
        )

    @tool(RUNS_SCRIPTS, "Run a script")
    async def run_script(
        script: Annotated[str, Field(description="May begin with a PEP 723 block")],
        ctx: AnyContext,
        dependencies: Annotated[PackagesArg, Field(description="Further ones (PEP 508)")] = [],  # noqa: B006 - becomes the default in the JSON schema, is never changed
        python: Annotated[PythonArg, Field(description="Such as 3.12")] = "",
        memory: Annotated[MemoryArg, Field(description="Such as 2G")] = None,
        cpu: Annotated[CpuArg, Field(description="Processors (1.5) or their time (30s)")] = None,
        timeout: Annotated[LimitArg, Field(description="Such as 30s")] = None,
        language: Annotated[str, Field(description="If not Python, see info")] = "",
    ) -> CallToolResult:
        """Run a script once in a fresh session, of which nothing stays."""
        caller, report = box.caller(ctx), progress_of(ctx) or silence
        try:
            other = interpreter_named(services, language)
            script = plain(unfenced("script", script, other, caller.response))
            check_code(script)
            services.manager.check_cells(caller)
            limits, limit_s = own_limits(services, memory, cpu), own_timeout(settings, timeout)
            if other is PYTHON:
                needs = await services.scripts.needs(script, dependencies, python, report)
                opening = open_session(
                    services, caller, SCRIPT, needs, report, limits=limits, timeout_s=limit_s
                )
            elif dependencies or python:
                raise InputError(ONLY_PYTHON)
            else:
                opening = open_with_kernel(services, caller, SCRIPT, other, report, limit_s, limits)
        except KernelMcpError as error:
            return not_begun(error, Phase.CHECK)
        try:
            opened = await opening
            return await run_once(services, opened, script, ctx, report)
        except EnvironmentBuildError as error:
            return not_begun(error, Phase.INSTALL)
        except KernelMcpError as error:
            return not_begun(error, Phase.START)


def _of_running(session: Session, cell: Cell, call: Call, result: CallToolResult) -> CallToolResult:
    """Return an answer with its question, and for tasks with the session's name in later servers.

    With a task its end is saved at once.
    """
    ahead = session.queue.current
    if ahead not in (None, cell) and ahead.questions is not None and ahead.questions.open:
        result.content.append(notice_block(WAITS.format(ahead.number)))
    result = with_question(cell, call, result)
    if not call.task:
        return result
    session.queue.news.poll(cell)
    if not cell.finished.is_set() and not cell.lasting:
        cell.lasting = True
        session.persistence.log_cell(cell)  # else a later server could give its number away
    entry = session.persistence.entry
    lasting = "" if entry is None else entry.key.name
    return result.model_copy(update={"meta": {**(result.meta or {}), LASTING_KEY: lasting}})


def check_code(code: str) -> None:
    """Raise InputError for code that is empty or too long."""
    if not code.strip():
        raise InputError("The code is empty. Pass at least one statement or expression.")
    if len(code) > MAX_CODE_CHARS:
        raise InputError(
            f"The code has {len(code):,} characters; a cell takes at most {MAX_CODE_CHARS:,}. Put "
            "data into a file and read it from the code."
        )


def check_seconds(name: str, value: float, *, least: float) -> None:
    """Raise InputError for a time that cannot be used."""
    if not math.isfinite(value) or not least <= value <= MAX_SECONDS:
        raise InputError(
            f"{name}={value:g} is not usable: pass seconds from {least:g} to {MAX_SECONDS:,.0f}."
        )


def _earlier(session: Session, cell: Cell) -> str:
    """Return a heading for an answer about a cell other than the last one started."""
    later = [other for other in session.cells.unreported if other.number > cell.number]
    others = [f"cell {other.number}" for other in later]
    more = f". Call wait again for {', '.join(others)}" if others else ""
    return f"This is cell {cell.number}, which an earlier call had started{more}"


def _next_to_tell(session: Session) -> Cell | None:
    """Return the running cell, else the next one, else the last whose end was not reported.

    A cell whose call was cancelled comes after those that a call has left running.
    """
    unreported = session.cells.unreported
    going = (cell for cell in unreported if not cell.finished.is_set())
    followed = (cell for cell in reversed(unreported) if not cell.abandoned)
    return next(going, None) or next(followed, None) or next(reversed(unreported), None)


async def _said_again(
    session: Session, response: ResponseContext, settings: Settings
) -> CallToolResult:
    """Return a notice that nothing runs, with the last answer again: it may not have arrived."""
    last = _last(session)
    if last is None or last.outcome is None:
        return notice_result(_nothing_runs(session))
    result = await answer(session, last, response, since=Position(), settings=settings)
    return CallToolResult(content=[notice_block(_nothing_runs(session)), *result.content])


def _last(session: Session) -> Cell | None:
    """Return the last cell of the agent; None if it is not among the last `MOST_LOOKED_AT`."""
    last = islice(reversed(session.cells), MOST_LOOKED_AT)
    return next((cell for cell in last if not cell.author), None)


def _nothing_runs(session: Session) -> str:
    running, last = session.queue.current, _last(session)
    if running is not None and running.author:
        return (
            f"Nothing of yours is running: cell {running.number} is, which a {running.author} has "
            f"started. Pass cell={running.number} to follow or stop that one."
        )
    if last is None:
        return "Nothing is running: no cell has been executed in this session."
    if last.outcome is None:
        return f"Nothing is left to tell: cell {last.number} was cancelled and is being stopped."
    return (
        f"Nothing is running. Cell {last.number} was the last; it ended with {last.status.value}."
    )
