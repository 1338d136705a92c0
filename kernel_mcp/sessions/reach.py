"""Whether a kernel can still be reached: code may have replaced what takes and answers requests.

A kernel that does not answer is not therefore broken: code may hold Python's lock (the GIL) while
it waits, and no other thread gets to answer then. So a cell is given up only where the kernel's
main thread is known to have nothing in hand: it says so, or it goes on taking requests, which it
cannot while code holds it up.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

import anyio

from kernel_mcp.errors import LaunchError

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel
    from kernel_mcp.kernels.run import Run

TICK_S = 0.25
LOOK_S = 2.0
"""How long a cell runs before the kernel is asked about it; the pauses double from there."""
MOST_PAUSE_S = 30.0
ASK_S = 2.0
AGAIN_S = 0.5
IDLE_LOOKS = 2
"""Looks that find the main thread waiting for requests, though it has not answered this one."""
DEAF_LOOKS = 4
"""Looks that find requests taken and none answered."""
HELD_LOOKS = 2
"""Looks without an answer after which the cell tells of it."""
ASLEEP_CPU_S = 0.1
"""Processor time of a process that sleeps for `ASK_S`."""
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
    DEAF = auto()
    """It takes requests and answers none."""
    HELD = auto()
    """It does neither, and sleeps."""


async def ended(
    kernel: Kernel, run: Run, tick: Callable[[], None] | None, tell: Callable[[str], None]
) -> bool:
    """Wait for the end of a cell; False when the kernel has nothing in hand and will not answer.

    `tick` is called every `TICK_S` meanwhile, `tell` once when there is something to be said.
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
        if found.count(_State.IDLE) >= IDLE_LOOKS or found.count(_State.DEAF) >= DEAF_LOOKS:
            kernel.broken = True
            return False
        if state is _State.HELD and found.count(state) == HELD_LOOKS:
            tell(HELD)
        unclear = found and state is not _State.HELD
        pause = AGAIN_S if unclear else min(2 * max(pause, LOOK_S), MOST_PAUSE_S)


async def broken(kernel: Kernel, run: Run) -> bool:
    """Whether a cell has failed because every cell does.

    Asked only where no line of the cell itself is in the traceback.
    """
    failure = run.failure
    if failure is not None and any("Cell In[" in line for line in failure.traceback):
        return False
    kernel.broken = await _trial(kernel, ASK_S) == "error"
    return kernel.broken


async def still_broken(kernel: Kernel) -> bool:
    """Whether a kernel that was found broken still is; asked before it gets another cell."""
    if kernel.broken:
        kernel.broken = await _trial(kernel, AGAIN_S) != "ok"
    return kernel.broken


async def _trial(kernel: Kernel, timeout: float) -> str:
    """What comes of a cell that does nothing: a status, or nothing within `timeout` seconds."""
    content = {"code": "pass", "silent": True, "store_history": False, "allow_stdin": False}
    try:
        with kernel.asking("shell", "execute_request", content) as answer:
            with anyio.move_on_after(timeout):
                await answer.done.wait()
    except LaunchError:
        return ""
    return "" if answer.message is None else str(answer.message.content.get("status"))


async def _look(kernel: Kernel, run: Run) -> _State:
    before, outputs = kernel.handle.usage(), run.outputs
    try:
        reply = await kernel.ask("kernel_mcp_state_request", {}, timeout=ASK_S)
    except LaunchError:
        after = kernel.handle.usage()
    else:
        return _State.IDLE if reply.get("idle") is True else _State.WORKS
    if run.outputs != outputs:  # the cell is busy sending, or kept waiting by who reads it
        return _State.WORKS
    asleep = after.cpu_s - before.cpu_s < ASLEEP_CPU_S and not kernel.handle.stopped
    if not (asleep and before.measured and after.measured):
        return _State.WORKS
    return _State.DEAF if await _takes_requests(kernel) else _State.HELD


async def _takes_requests(kernel: Kernel) -> bool:
    """Whether the main thread takes a request now, which it cannot while code holds it up."""
    try:
        if kernel.taken:
            kernel.knock()
    except LaunchError:
        return False
    await anyio.sleep(AGAIN_S)
    return kernel.taken
