"""Memory and load of this machine's GPUs, as nvidia-smi reports them."""

from __future__ import annotations

import anyio

from kernel_mcp.linux.commands import output_of
from kernel_mcp.linux.process import find_program, foreign_environment

ASK_S = 5.0
"""Time limit in seconds: the driver of an unused GPU is loaded for each query."""
_PROGRAM = "nvidia-smi"
_FIELDS = ("index", "memory.used", "memory.total", "utilization.gpu", "name")
_UNKNOWN = "not known"


async def gpu_load() -> list[str]:
    """Return a line on the state of each GPU, or one line with the reason why it is unknown."""
    program = find_program(_PROGRAM)
    if program is None:
        return [f"{_UNKNOWN}: the server's PATH leads to no {_PROGRAM}"]
    query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        with anyio.fail_after(ASK_S):
            done = await output_of([program, *query], env=foreign_environment())
    except TimeoutError:
        return [f"{_UNKNOWN}: {_PROGRAM} did not answer within {ASK_S:g} s"]
    except OSError as reason:
        return [f"{_UNKNOWN}: {_PROGRAM} cannot be run: {reason.strerror}"]
    text = done.stdout.decode(errors="replace").strip()
    if done.code or not text:
        said = (text.splitlines() or ["nothing"])[0]
        return [f"{_UNKNOWN}: {_PROGRAM} ended with code {done.code} and said {said}"]
    return [_in_words(line) for line in text.splitlines()]


def _in_words(line: str) -> str:
    """Return a readable form of a line of nvidia-smi's table; a number may be `[N/A]`."""
    fields = line.split(", ", len(_FIELDS) - 1)
    if len(fields) < len(_FIELDS):
        return f"{_UNKNOWN}: {_PROGRAM} said {line}"
    index, used, total, busy, name = fields
    return f"GPU {index}, {name}: {used} of {total} MiB in use, busy {busy} % of the time"
