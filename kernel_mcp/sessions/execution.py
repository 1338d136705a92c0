"""One cell in a kernel: wait for its end, interrupt it, kill the kernel, probe a silent kernel.

User code may have broken the functions that receive and answer requests. But a kernel that does not
answer may also run C code that holds the GIL. So a cell is given up only if the kernel's main
thread is known to be idle. Either its state reply reports that, or it still reads requests, which
is impossible while code blocks it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import KernelGone, LaunchError
from kernel_mcp.kernels.run import CellUsage, InputRequest
from kernel_mcp.launch import silence
from kernel_mcp.linux.proc import ExitStatus, Usage, reset_peak_memory, waits_for_machine
from kernel_mcp.sessions.cell import AT_ONCE, Cell, CellOutcome, Phase, Status, StopReason
from kernel_mcp.sessions.words import usage_words
from kernel_mcp.units import MIB

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.kernels.run import Run


TICK_S = 0.25
LOOK_S = 2.0
"""Seconds of run time before the first probe of the kernel; later pauses double."""
MOST_PAUSE_S = 30.0
ASK_S = 2.0
AGAIN_S = 0.5
IDLE_LOOKS = 2
"""Number of probes that must find the main thread idle, before a cell without reply is given up."""
UNRESPONSIVE_LOOKS = 4
"""The same for probes that find requests read but not answered."""
BLOCKED_LOOKS = 2
"""Number of probes that find the kernel blocked, before the cell gets a notice."""
ASLEEP_CPU_S = 0.1
"""Processor seconds during `ASK_S` below which a process counts as asleep."""
BROKEN = "the kernel's own code no longer works; call reset"
NOT_RUN = f"this cell was not run: {BROKEN}"
ADVICE = (
    "The kernel's own code no longer works: every cell fails in it or gets no answer, as happens "
    "when code replaces a builtin or a part of IPython. Variables are probably still there, but "
    "cannot be reached. Call reset for a fresh kernel; files in the workspace are kept"
)
HELD = (
    "For some time the kernel has answered nothing while this cell ran: code waits in it without "
    "letting other threads run (it holds Python's lock), as C code of some packages does. The cell "
    "goes on; interrupt asks it to stop, and ends the kernel if it does not. If nothing in it "
    "should take so long, the kernel's own code may have been broken: call reset"
)


class _State(Enum):
    WORKS = auto()
    IDLE = auto()
    UNRESPONSIVE = auto()
    """The kernel reads requests and answers none."""
    BLOCKED = auto()
    """The kernel does not read requests and uses no processor time."""


async def wait_until_ended(
    kernel: Kernel, run: Run, tick: Callable[[], None] | None, tell: Callable[[str], None]
) -> bool:
    """Wait for the end of a cell; return False if the kernel is idle but sends no reply.

    Calls `tick` every `TICK_S` seconds, and `tell` with a notice if the kernel is blocked.
    """
    pause = LOOK_S
    found: list[_State] = []
    while True:
        left = pause
        while left > 0 and not run.finished.is_set():
            with anyio.move_on_after(left if tick is None else TICK_S):
                await run.finished.wait()
            left -= left if tick is None else TICK_S
            if tick is not None:
                tick()
        if run.finished.is_set():
            return True
        state = await _look(kernel, run)
        if state is _State.WORKS or run.status is not None or run.finished.is_set():
            found.clear()
        else:
            found.append(state)
        if (
            found.count(_State.IDLE) >= IDLE_LOOKS
            or found.count(_State.UNRESPONSIVE) >= UNRESPONSIVE_LOOKS
        ):
            kernel.broken = True
            return False
        if state is _State.BLOCKED and found.count(state) == BLOCKED_LOOKS:
            tell(HELD)
        unclear = found and state is not _State.BLOCKED
        pause = AGAIN_S if unclear else min(2 * max(pause, LOOK_S), MOST_PAUSE_S)


async def probe_broken(kernel: Kernel, run: Run) -> bool:
    """Run an empty cell, after `run` has failed; return True if it fails too.

    The kernel is then marked as broken. Nothing is run if the traceback of `run` has a line of a
    cell.
    """
    failure = run.failure
    if not kernel.extended:
        return False
    if failure is not None and any("Cell In[" in line for line in failure.traceback):
        return False
    kernel.broken = await _trial(kernel, ASK_S) == "error"
    return kernel.broken


async def still_broken(kernel: Kernel) -> bool:
    """Probe a kernel marked as broken, and return True if it still is."""
    if kernel.broken:
        kernel.broken = await _trial(kernel, AGAIN_S) != "ok"
    return kernel.broken


async def _trial(kernel: Kernel, timeout: float) -> str:
    """Run an empty cell and return its status; "" without a reply within `timeout` seconds."""
    content = {"code": "pass", "silent": True, "store_history": False, "allow_stdin": False}
    try:
        with kernel.asking("shell", "execute_request", content) as answer:
            with anyio.move_on_after(timeout):
                await answer.done.wait()
    except LaunchError:
        return ""
    return "" if answer.message is None else str(answer.message.content.get("status"))


async def _look(kernel: Kernel, run: Run) -> _State:
    if not kernel.extended:
        return _State.WORKS
    before, heard = kernel.handle.usage(), (run.outputs, kernel.rests)
    try:
        reply = await kernel.ask("kernel_mcp_state_request", {}, timeout=ASK_S)
    except LaunchError:
        after = kernel.handle.usage()
    else:
        waits = reply.get("idle") is True and not _has_to_wait(kernel)
        return _State.IDLE if waits else _State.WORKS
    if (run.outputs, kernel.rests) != heard:  # it sends output, or waits until output is read
        return _State.WORKS
    asleep = after.cpu_s - before.cpu_s < ASLEEP_CPU_S and not kernel.handle.stopped
    if not (asleep and before.measured and after.measured):
        return _State.WORKS
    return _State.UNRESPONSIVE if await _takes_requests(kernel) else _State.BLOCKED


def _has_to_wait(kernel: Kernel) -> bool:
    """Return True if the main thread waits for a processor: it may not have read the cell yet."""
    with suppress(ProcessLookupError):
        return waits_for_machine(kernel.handle.pid)
    return False


async def _takes_requests(kernel: Kernel) -> bool:
    """Return True if the main thread reads a request within `AGAIN_S` seconds."""
    try:
        if kernel.taken:
            kernel.send_probe()
    except LaunchError:
        return False
    await anyio.sleep(AGAIN_S)
    return kernel.taken


FAILED = 1
SIGNALLED = 128
"""Exit codes as in a shell: that of a failure, and the number added to that of a signal."""
INTERRUPT_EVERY_S = 0.5
"""Seconds between interrupts. Several are sent, as a kernel ignores one that arrives just before
the cell begins."""
RARELY_S = 2.0
"""The same for other kernels: many give no answer if the next one arrives while they handle one."""
AGAIN_AFTER_S = (0.0, 0.1, 0.2, 0.4)
"""Pauses before a dropped cell is sent again: after a failure tslab drops all cells for 0.2 s."""
DROPPED = "the kernel dropped the cell without running it; run it again"
DEATH_TIMEOUT_S = 5.0
NOTABLE_PEAK = 4 * MIB
"""Bytes by which a peak must exceed the memory after its cell to be reset for the next one."""
RESET_S = 0.2
GONE = "The kernel ended before it could take this cell. Run it again."


async def run_cell(kernel: Kernel, cell: Cell, *, grace_s: float, cpu_s: float) -> CellOutcome:
    """Run `cell` on `kernel` and return its outcome.

    The cell is interrupted by `cell.stop`, after `cell.timeout_s` seconds of wall-clock time, or
    after `cpu_s` seconds of processor time; 0 means no limit. If it does not stop within `grace_s`
    seconds, the kernel is killed.

    Raises LaunchError if the kernel accepts no requests, KernelGone if it ended before it read this
    one. Raises WorkspaceError if its disk quota is far exceeded.
    """
    limits = kernel.handle.limits

    def stop_it() -> None:
        cell.stop(StopReason.DISK)

    await limits.begin(stop_it)
    try:
        return await _run_to_end(kernel, cell, grace_s=grace_s, cpu_s=cpu_s)
    finally:
        notices = limits.end(stop_it)
        if kernel.exit is None:
            cell.notices += notices


async def _run_to_end(kernel: Kernel, cell: Cell, *, grace_s: float, cpu_s: float) -> CellOutcome:
    if await still_broken(kernel):
        cell.notice(ADVICE)
        return CellOutcome(Status.ERROR, cause=NOT_RUN)
    run = await _hand_over(kernel, cell)
    reason = await _end_or_stop(kernel, run, cell, cpu_s)
    if reason is None and kernel.missed(run):
        raise KernelGone(GONE)
    for pause in AGAIN_AFTER_S:
        if reason is not None or run.status != "aborted":
            break
        await anyio.sleep(pause)
        run = await _hand_over(kernel, cell)
        reason = await _end_or_stop(kernel, run, cell, cpu_s)
    killed = False
    if reason is not None:
        grace_s = min(grace_s, _MOST_GRACE_S.get(reason, grace_s))
        killed = await stop(kernel, run, grace_s, cell)
        reason = cell.stop_reason if cell.stop_reason in AT_ONCE else reason
    if reason is None and run.failure is not None and not cell.log.failures:
        run.sink(run.failure)  # some kernels report an error in their reply alone
    asked = cell.questions.words if cell.questions is not None else []
    for notice in (*run.notices, *asked, *kernel.tools.words()):
        cell.notice(notice)
    lost = reason is None and kernel.exit is None and run.status is None
    if lost or (reason is None and run.status == "error" and await probe_broken(kernel, run)):
        cell.notice(ADVICE)
        return CellOutcome(Status.ERROR, cause=BROKEN, exit_code=FAILED)
    wish = _wish(kernel, cell, reason, cpu_s)
    if killed or run.status is None:
        stubborn = f", and did not stop within {grace_s:g} s of being interrupted" if killed else ""
        return _death(kernel, run, wish, reason, stubborn)
    cell.removed, cell.usage = run.removed, await _usage(kernel, run)
    environment = kernel.environment
    cell.record = {**run.record, "env": environment.root.name, "python": environment.version}
    most = kernel.handle.limits.limits.memory_bytes
    cell.notices += usage_words(cell.usage, most, cpu_s if reason is None else 0)
    if not run.compiled:
        cell.phase = Phase.CHECK
    return _end(run, wish, reason)


async def _usage(kernel: Kernel, run: Run) -> CellUsage:
    """Return what a cell has used; a peak that may be that of an earlier cell is left out."""
    usage = run.usage
    if (peak := usage.peak_bytes) is None:
        return usage
    if peak <= kernel.known_peak:
        return replace(usage, peak_bytes=None)
    if peak - usage.memory_bytes >= NOTABLE_PEAK:
        reset = False
        with Barrier("measuring a kernel"), anyio.move_on_after(RESET_S):
            work = partial(reset_peak_memory, kernel.handle.pid)
            reset = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        kernel.known_peak = 0 if reset else peak
    return usage


async def _hand_over(kernel: Kernel, cell: Cell) -> Run:
    """Submit the cell. Raises LaunchError, or KernelGone when the kernel has ended."""
    cell.phase, cell.numbered = Phase.RUN, True
    try:
        return kernel.submit(
            cell.plain, cell.listen(), cell.number, cell.notebook, _questions(kernel, cell)
        )
    except LaunchError as error:
        with anyio.move_on_after(DEATH_TIMEOUT_S):
            await kernel.dead.wait()
        if kernel.exit is None:
            raise
        raise KernelGone(GONE) from error


def _questions(kernel: Kernel, cell: Cell) -> Callable[[InputRequest], None] | None:
    """Return the callback for questions of the cell; None if it may not ask."""
    if cell.questions is None:
        return None
    cell.questions.reply = kernel.answer
    return cell.questions.take


_MOST_GRACE_S = {**dict.fromkeys(AT_ONCE, 0.0), StopReason.DISK: 1.0}
"""Maximum grace period in seconds, by reason."""


async def _end_or_stop(kernel: Kernel, run: Run, cell: Cell, cpu_s: float) -> StopReason | None:
    """Wait for the end of a cell, and return the reason if it must be stopped.

    None if it has ended, or if its kernel sends no reply.
    """
    began = kernel.handle.usage() if cpu_s else Usage()

    def check_cpu() -> None:
        nonlocal began
        used = kernel.handle.usage()
        if not began.measured:  # count from the first measurement that succeeds
            began = used
        elif used.cpu_s - began.cpu_s > cpu_s:
            cell.stop(StopReason.CPU)

    try:
        with anyio.move_on_after(cell.timeout_s or None) as scope:
            cell.watch_stop(scope)
            await wait_until_ended(kernel, run, check_cpu if cpu_s else None, cell.notice)
            return None
    finally:
        cell.watch_stop(None)
    stopped = scope.cancelled_caught and not run.finished.is_set()
    return (cell.stop_reason or StopReason.TIMEOUT) if stopped else None


async def stop(kernel: Kernel, run: Run, grace_s: float, cell: Cell) -> bool:
    """Interrupt the cell for `grace_s` seconds, then kill its kernel; return True if killed.

    While the kernel waits for a processor, the period is counted in processor time of all its
    processes, which may be what it waits for. The wall-clock bound is `silence.PATIENCE` times
    `grace_s`. A reset or close ends the period at once.
    """
    pids = [kernel.handle.pid] if kernel.handle.pid > 0 else []  # an external one has none here
    every = INTERRUPT_EVERY_S if kernel.extended else RARELY_S
    left, latest = grace_s, anyio.current_time() + silence.PATIENCE * grace_s
    try:
        with anyio.CancelScope() as grace:
            cell.watch_stop(grace, cell.stop_reason)
            while left > 0 and anyio.current_time() < latest and not run.finished.is_set():
                kernel.interrupt()
                before, used = silence.computed_s(pids), _used_s(kernel)
                with anyio.move_on_after(min(every, max(left, TICK_S))):
                    await run.finished.wait()
                spent = silence.spent_s(before, silence.computed_s(pids), every)
                left -= max(spent, min(_used_s(kernel) - used, every))
    finally:
        cell.watch_stop(None)
    if run.finished.is_set():
        return False
    if (words := kernel.end_unresponsive(run)) is not None:
        if words:
            cell.notice(words)
        return False
    with anyio.move_on_after(DEATH_TIMEOUT_S):
        await kernel.dead.wait()
    return True


def _used_s(kernel: Kernel) -> float:
    """Return the processor seconds of all processes of a kernel; 0 if not measurable."""
    with Barrier("measuring a kernel"):
        return kernel.handle.usage().cpu_s
    return 0.0


def _wish(kernel: Kernel, cell: Cell, reason: StopReason | None, cpu_s: float) -> str:
    if reason is None:
        return ""
    return {
        StopReason.TIMEOUT: f"it reached its time limit of {cell.timeout_s:g} s",
        StopReason.CPU: f"it used up its {cpu_s:g} s of processor time",
        StopReason.DISK: f"{kernel.handle.limits.cause}; remove files before writing more",
        StopReason.INTERRUPT: "an interrupt was asked for",
        StopReason.CANCEL: "the call that started it was cancelled",
        StopReason.RESET: "the session was reset",
        StopReason.CLOSE: "the session was closed",
        StopReason.END: "the server ends",
    }[reason]


def _death(
    kernel: Kernel, run: Run, wish: str, reason: StopReason | None, stubborn: str
) -> CellOutcome:
    """Return the outcome of a cell whose kernel has ended.

    `stubborn` is the text for a kernel that was killed because interrupts did not stop the cell.
    It is empty if the kernel ended otherwise.
    """
    cause = kernel.exit.story("the kernel") if kernel.exit else "the kernel is gone"
    if reason in AT_ONCE:
        cause = wish
    elif reason is None and not run.begun:
        cause = f"{cause}, and the code of this cell may have begun to run"
    elif reason is not None and not (reason is StopReason.DISK and _has_cause(kernel)):
        cause = f"{wish}{stubborn or f'; {cause} when it was interrupted'}"
    return CellOutcome(
        Status.KILLED, state_kept=False, cause=cause, exit_code=_exit_code(kernel.exit)
    )


def _has_cause(kernel: Kernel) -> bool:
    return kernel.exit is not None and bool(kernel.exit.cause)


def _exit_code(ended: ExitStatus | None) -> int | None:
    if ended is None:
        return None
    return ended.code if ended.signal is None else SIGNALLED + ended.signal


def _end(run: Run, wish: str, reason: StopReason | None) -> CellOutcome:
    if reason is None and run.status == "aborted":
        return CellOutcome(Status.ERROR, cause=DROPPED)
    exit_code = SIGNALLED + signal.SIGINT
    if reason is None:
        status = Status.ERROR if run.status == "error" else Status.OK
        exit_code = 0 if status is Status.OK else run.exit_code or FAILED
    elif reason in (StopReason.TIMEOUT, StopReason.CPU):
        status = Status.TIMEOUT
    else:
        status = Status.INTERRUPTED
    return CellOutcome(
        status,
        state_kept=not run.renewed,
        cause=wish or None,
        exit_code=exit_code if run.compiled else None,
    )
