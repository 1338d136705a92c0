"""Trials of the kernels that `--kernel` names, each in the sandbox that a server would use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from kernel_mcp.commands.doctor.trials import CELL_TIMEOUT_S, TrialKernel
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.uv import silence
from kernel_mcp.errors import KernelMcpError
from kernel_mcp.kernel_context import kernel_context
from kernel_mcp.kernel_sources import NamedSource, named_sources
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.kernels.interpreter import Interpreter
from kernel_mcp.output.items import DisplayItem
from kernel_mcp.output.outputs import OutputLog
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.select import proven_sandbox
from kernel_mcp.sandbox.self_test import Check
from kernel_mcp.sessions.cell import Cell, Status, StopReason

ERROR_CHARS = 600
END_S = 5.0
"""Seconds within which a killed kernel has to end."""
_REMEDY = (
    "see that `jupyter console --kernel` starts it without kernel-mcp; what it reads outside /usr "
    "is named after + in --kernel"
)


@dataclass(frozen=True, slots=True)
class _Code:
    """Cells of a language: they keep 42 in a variable, print that, draw, and run without end."""

    keep: str
    show: str
    endless: str
    plot: str = ""


_PYTHON = _Code("kept = 42", "print(kept)", "print('runs', flush=True)\nwhile True: pass")
_CODES: Mapping[str, _Code] = {
    "python": _PYTHON,
    "r": _Code("kept <- 42", "cat(kept)", "cat('runs\\n')\nSys.sleep(600)", "plot(1:10)"),
    "octave": _Code(
        "kept = 42;", "disp(kept)", "disp('runs'); fflush(stdout); pause(600)", "plot(1:10)"
    ),
    "bash": _Code("kept=42", "echo $kept", "echo runs; sleep 600"),
    "typescript": _Code(
        "var kept = 42",
        "console.log(kept)",
        "console.log('runs'); await new Promise((done) => setTimeout(done, 600000))",
    ),
}
"""By the lower-case name of the language."""


async def examine_kernels(settings: Settings, folder: Path) -> tuple[Check, ...]:
    """Start each named kernel, run cells, interrupt one, and kill the kernel.

    State is kept in `folder`. Raises KernelMcpError if a server would not start.
    """
    if not settings.kernels:
        return ()
    choose = partial(proven_sandbox, *settings.sandbox, container=ContainerOptions.of(settings))
    sandbox = await anyio.to_thread.run_sync(choose)
    alone = replace(
        settings, state_dir=folder, no_template=True, workspace=None, persist=None, audit_log=None
    )
    async with kernel_context(alone, sandbox) as context:
        sources = await anyio.to_thread.run_sync(named_sources, context)
        try:
            return tuple([await _examined(each, context.folders.workspaces) for each in sources])
        finally:
            for each in sources:
                await each.aclose()


async def _examined(source: NamedSource, folder: Path) -> Check:
    interpreter = source.interpreter
    name = f"kernel {interpreter.name}"
    workspace = folder / interpreter.name
    workspace.mkdir(mode=0o700)
    try:
        request = KernelRequest("doctor", workspace, interpreter=interpreter)
        kernel = await source.start(request, silence)
    except (KernelMcpError, OSError) as error:
        said = one_line(" ".join(str(error).split()), ERROR_CHARS)
        return Check(name, False, f"does not start: {said}", _REMEDY)
    held = [f"{interpreter.language} {kernel.environment.version}".rstrip()]
    failed: list[str] = []
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kernel.watch)
            trial = _Trial(TrialKernel(kernel, folder / f"{interpreter.name}.records"))
            for what, works in (await trial.perform(interpreter)).items():
                (held if works else failed).append(what)
            kernel.kill()
            with anyio.move_on_after(END_S):
                await kernel.dead.wait()
            (held if kernel.dead.is_set() else failed).append("ends when it is killed")
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await kernel.aclose()
    found = "; ".join([", ".join(held), *(f"NOT: {each}" for each in failed)])
    return Check(name, not failed, found, _REMEDY)


class _Trial:
    """Runs cells in one kernel."""

    def __init__(self, target: TrialKernel) -> None:
        self._target = target
        self._records = target.records
        self._count = 0

    async def perform(self, interpreter: Interpreter) -> dict[str, bool]:
        """Return what was tried, in words, and whether it held."""
        code = next((_CODES[each] for each in sorted(interpreter.names) if each in _CODES), None)
        if code is None:
            return {"runs an empty cell": (await self._run("")).status is Status.OK}
        await self._run(code.keep)
        found = {"runs cells": await self._shows(code)}
        if code.plot:
            drawn = await self._run(code.plot)
            items = [each for each in drawn.log.since() if isinstance(each, DisplayItem)]
            parts = [part.mime for each in items for part in each.parts]
            found["draws a plot"] = any(each.startswith("image/") for each in parts)
        if interpreter.offers("interrupt"):
            cell = self._cell(code.endless)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._target.run, cell)
                with anyio.move_on_after(CELL_TIMEOUT_S):
                    await cell.changed()
                cell.stop(StopReason.INTERRUPT)
            stopped = cell.status is Status.INTERRUPTED
            found["stops at an interrupt and keeps variables"] = stopped and await self._shows(code)
        else:
            found["is ended by an interrupt, which its sessions say"] = True
        return found

    async def _shows(self, code: _Code) -> bool:
        cell = await self._run(code.show)
        return cell.status is Status.OK and "42" in "".join(cell.log.text())

    async def _run(self, code: str) -> Cell:
        return await self._target.run(self._cell(code))

    def _cell(self, code: str) -> Cell:
        self._count += 1
        return Cell(self._count, code, CELL_TIMEOUT_S, OutputLog(self._records, self._count))
