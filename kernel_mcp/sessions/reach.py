"""Whether a kernel can still be reached: code may have replaced what takes and answers requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.errors import LaunchError

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel, Run

TICK_S = 0.25
LOOK_S = 2.0
"""How long a cell runs before the kernel is asked about it; the pauses double from there."""
MOST_PAUSE_S = 30.0
ASK_S = 2.0
AGAIN_S = 0.5
IDLE_LOOKS = 2
"""Looks that find the main thread waiting for requests, though it has not answered this one."""
SILENT_LOOKS = 4
"""Looks without an answer and with the process asleep. C code that sleeps with the GIL is rare."""
ASLEEP_CPU_S = 0.1
"""Processor time of a process that sleeps for `ASK_S`."""
BROKEN = "the kernel's own code no longer works; call reset"
ADVICE = (
    "The kernel's own code no longer works: every cell fails in it or gets no answer, as happens "
    "when code replaces a builtin or a part of IPython. Variables are probably still there, but "
    "cannot be reached. Call reset for a fresh kernel; files in the workspace are kept"
)


async def ended(kernel: Kernel, run: Run, tick: Callable[[], None] | None) -> bool:
    """Wait for the end of a cell; False when the kernel has nothing in hand and will not answer.

    `tick` is called every `TICK_S` meanwhile.
    """
    pause = LOOK_S
    idle = silent = 0
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
        found = await _idle(kernel)
        if found is False or run.status is not None or run.finished.is_set():
            idle = silent = 0
            pause = min(2 * max(pause, LOOK_S), MOST_PAUSE_S)
            continue
        idle += found is True
        silent += found is None
        if idle >= IDLE_LOOKS or silent >= SILENT_LOOKS:
            return False
        pause = AGAIN_S


async def broken(kernel: Kernel, run: Run) -> bool:
    """Whether a cell has failed because every cell does.

    Asked only where no line of the cell itself is in the traceback.
    """
    failure = run.failure
    if failure is not None and any("Cell In[" in line for line in failure.traceback):
        return False
    content = {"code": "pass", "silent": True, "store_history": False, "allow_stdin": False}
    try:
        with kernel.asking("shell", "execute_request", content) as answer:
            with anyio.move_on_after(ASK_S):
                await answer.done.wait()
    except LaunchError:
        return False
    return answer.message is not None and answer.message.content.get("status") == "error"


async def _idle(kernel: Kernel) -> bool | None:
    """Whether the main thread waits for requests; None when nobody says and the process sleeps."""
    before = kernel.handle.usage()
    try:
        reply = await kernel.ask("kernel_mcp_state_request", {}, timeout=ASK_S)
    except LaunchError:
        after = kernel.handle.usage()
        asleep = after.cpu_s - before.cpu_s < ASLEEP_CPU_S and not kernel.handle.stopped
        return None if asleep and before.measured and after.measured else False
    return reply.get("idle") is True
