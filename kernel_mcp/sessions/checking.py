"""Checks code before it runs: short code in a thread, longer code in a process.

The parser holds the GIL, which blocks the event loop: 40 ms for 100 KB of usual code, 240 ms for
100 KB of lines of one letter. Python 3.10 crashes on an expression with some 100,000 operators.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from kernel_mcp.barriers import reason_of, run_in_thread
from kernel_mcp.errors import ServerFailure
from kernel_mcp.linux.commands import output_of
from kernel_mcp.linux.process import bare_program
from kernel_mcp.policy import Policy, Report
from kernel_mcp.policy.check import check, too_deep
from kernel_mcp.policy.source import MAX_CODE, Source
from kernel_mcp.policy.worker import report_of, request

LONG_CODE_CHARS = 16_000
"""Code of more characters is checked in a process, which starts in some 0.1 s.

The parser needs at most 40 ms for this length, and no version of Python crashes on it.
"""
MOST_PROCESSES = 2
"""Maximum number of concurrent checks in processes. Each may use 1 GiB and 20 s of processor
time."""
_TOO_DEEP = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGXCPU)
"""Exit codes for code that overflows the stack or exceeds the limit of processor time."""

logger = logging.getLogger(__name__)


class Checks:
    """The checks of a server, with a bound on their processes."""

    def __init__(self) -> None:
        self._processes = anyio.Semaphore(MOST_PROCESSES)

    async def check(
        self,
        code: str,
        policy: Policy,
        *,
        known_names: frozenset[str] | None = None,
        own_modules: frozenset[str] = frozenset(),
        python: str = "",
        compiled: bool = True,
    ) -> Report:
        """Check code as `policy.check.check` does, and return its report.

        Raises ServerFailure if the check failed: the code must not run.
        """
        wishes: dict[str, Any] = {
            "known_names": known_names,
            "own_modules": own_modules,
            "python": python,
            "compiled": compiled,
        }
        if not LONG_CODE_CHARS < len(code) <= MAX_CODE:  # longer code is refused unparsed
            return await run_in_thread(partial(check, code, policy, **wishes))
        async with self._processes:
            return await _check_in_process(code, policy, wishes)


async def _check_in_process(code: str, policy: Policy, wishes: Mapping[str, Any]) -> Report:
    mark = secrets.token_hex(8)
    try:
        fd = request(code, policy, wishes)
        try:
            argv = bare_program("kernel_mcp.policy.worker", str(fd), mark, packages=True)
            done = await output_of(argv, env={"LANG": "C.UTF-8"}, pass_fds=[fd])
        finally:
            os.close(fd)
        if done.code in _TOO_DEEP:
            return Report(valid=False, diagnostics=(too_deep(Source.of(code)),))
        if done.code == 0:
            return report_of(done.stdout, mark, policy)
        why = f"its process has ended with code {done.code}"
        logger.error(
            "a check has failed: %s. It wrote:\n%s",
            why,
            done.stderr[-2000:].decode("utf-8", "replace"),
        )
    except (OSError, ValueError) as error:
        why = reason_of(error)
        logger.error("a check has failed: %s", why)
    raise ServerFailure(
        f"The check of this code has failed, and nothing of it was run: {why}. Split the code into "
        "smaller cells, or try again; the server's log says more."
    )
