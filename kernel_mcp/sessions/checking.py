"""Checks code before it runs: short code here, longer code in a process of its own.

Parsing holds Python's lock, and so the event loop for which every session waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import anyio

from kernel_mcp.barriers import reason_of, surely
from kernel_mcp.errors import LaunchError, ServerFailure
from kernel_mcp.launch.helper import HelperProcess
from kernel_mcp.linux.process import bare_program
from kernel_mcp.policy import Policy, Report
from kernel_mcp.policy.check import check
from kernel_mcp.policy.source import MAX_CODE
from kernel_mcp.policy.worker import Answer, content_of, question, written
from kernel_specs import linux

LONG_CODE_CHARS = 2_000
"""Longer code is checked in a process: 60 lines take 0.5 ms, a message to the process 0.25 ms."""
IDLE_S = 600.0
"""Idle seconds after which the process is ended; it takes 18 MiB, and 70 ms to start."""
ATTEMPTS = 2

logger = logging.getLogger(__name__)


class Checks:
    """The checks of a server; their process starts when it is needed."""

    def __init__(self, remark: Callable[[str], None] = lambda _text: None) -> None:
        """`remark` adds a text to the next answers."""
        self._remark = remark
        self._turn = anyio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._process = HelperProcess(
            "the process that checks code",
            lambda fd: bare_program("kernel_mcp.policy.worker", str(fd), packages=True),
            on_start=lambda: None,
            on_message=_on_message,
            on_end=self._on_end,
            on_demand=True,
        )

    async def check(
        self,
        code: str,
        policy: Policy,
        *,
        known_names: Collection[str] | None = None,
        own_modules: Collection[str] = (),
        python: str = "",
        compiled: bool = True,
        imports: bool = True,
    ) -> Report:
        """Check code as `policy.check.check` does, and return its report.

        Without `imports` the report may lack those. Raises ServerFailure if the check failed: the
        code must not run.
        """
        here = partial(
            check,
            code,
            policy,
            known_names=None if known_names is None else frozenset(known_names),
            own_modules=frozenset(own_modules),
            python=python,
            compiled=compiled,
        )
        if not LONG_CODE_CHARS < len(code) <= MAX_CODE:  # no more is parsed
            return await surely(here) if compiled else here()
        steps: dict[str, str] = {}
        while True:
            asked = question(
                code,
                policy,
                known_names=known_names,
                own_modules=own_modules,
                python=python,
                compiled=compiled,
                imports=imports,
                steps=steps,
            )
            told = await self._ask(asked)
            if told is None:
                return await surely(here)
            answer = Answer.of(told)
            missing = [module for module in answer.asked if module not in steps]
            if not missing:
                return answer.report
            steps |= {module: policy.step(module, once=policy.once) for module in missing}

    async def aclose(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        await self._process.aclose()

    async def _ask(self, message: bytes) -> bytes | None:
        """Return the answer of the process; None if it cannot be started. Raises ServerFailure."""
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                fd = written(message)
            except OSError as error:
                logger.warning("code is checked by the server itself: %s", reason_of(error))
                return None
            try:
                return await self._ask_process(fd)
            except anyio.get_cancelled_exc_class():  # nobody waits for what it computes
                self._process.stop()
                raise
            finally:
                os.close(fd)
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._process.stop)

    async def _ask_process(self, fd: int) -> bytes | None:
        why = ""
        for _ in range(ATTEMPTS):
            self._process.start()
            if not self._process.running:
                if why:  # this code may end the server, too
                    break
                return None
            try:
                _, fds = await self._process.ask({}, [fd])
                return content_of(fds)
            except (LaunchError, ValueError) as error:
                why = str(error)
        raise ServerFailure(
            f"The check of this code has failed {ATTEMPTS} times, and nothing of it was run: {why}."
            " Split the code into smaller cells, or try again; the server's log says more."
        )

    def _on_end(self, why: str) -> None:
        self._remark(
            f"The process that checks long code is replaced ({why}): no code runs unchecked "
            "meanwhile"
        )


def _on_message(_message: dict[str, Any], fds: list[int]) -> None:
    linux.close_all(fds)
    raise ValueError("nothing was asked")
