"""Keep the template of one environment running: start, restart with growing pauses, retire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import anyio

from kernel_mcp.barriers import Barrier, reason_of
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.launch.template.outer import Shared, outer_command, start_message
from kernel_mcp.launch.template.process import TemplateProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Sandbox

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
MOST_FAILURES = 3
"""Forks in a row that may fail before a template is replaced."""


class TemplateSupervisor:
    """The template of one environment, or what takes its place while there is none.

    Templates that fork no more are kept until their last kernel has ended.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        shared: Shared,
        environment: KernelEnvironment,
        preload: Sequence[str],
    ) -> None:
        """Start a template at once."""
        self._sandbox = sandbox
        self._shared = shared
        self.environment = environment
        self.preload = tuple(preload)
        self._current: TemplateProcess | None = None
        self._all: dict[TemplateProcess, Identity | None] = {}
        self._again: asyncio.TimerHandle | None = None
        self._pause_s = FIRST_PAUSE_S
        self._failures = 0
        self.refusal = ""
        """Why no template of this environment may be used, if that is so."""
        self._start()

    @property
    def template(self) -> TemplateProcess | None:
        """The template that can fork now, if there is one."""
        current = self._current
        return current if current is not None and current.usable else None

    @property
    def busy(self) -> bool:
        """Whether any template of it runs."""
        return bool(self._all)

    async def ready(self) -> bool:
        """Wait until the current template is ready or has failed; whether it can fork."""
        return self._current is not None and await self._current.ready()

    def forked(self) -> None:
        """A fork went well."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S

    def failed(self) -> None:
        """A fork went wrong: after some in a row, the template is replaced."""
        self._failures += 1
        if self._failures >= MOST_FAILURES and self._current is not None:
            self._current.retire()
            self._replace(f"{self._failures} kernels in a row could not be forked")

    def refuse(self, reason: str) -> None:
        """What it forks is not confined: use none for this environment any more."""
        if not self.refusal:
            self.refusal = reason
            logger.error(
                "the template of %s is refused and kernels start cold, as %s. Run `kernel-mcp "
                "doctor` and report this as a defect.",
                self.environment.python,
                reason,
            )
        self.retire()

    def retire(self) -> None:
        """Fork no more and start no other; kernels that run go on."""
        self._current = None
        if self._again is not None:
            self._again.cancel()
        for template in list(self._all):
            template.retire()

    async def aclose(self) -> None:
        """End all templates with the kernels they still have."""
        self.retire()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for template in list(self._all):
                    tasks.start_soon(template.aclose)

    def _start(self) -> None:
        self._failures = 0
        identity = None
        with Barrier("starting a template") as barrier:
            identity = self._sandbox.identity()
            template = TemplateProcess(
                lambda control: outer_command(self.environment, control, self._shared, identity),
                start_message(self.environment, self.preload),
                self._on_change,
            )
            self._current = template
            self._all[template] = identity
        if barrier.failure is not None:
            self._sandbox.release(identity)
            self._replace(reason_of(barrier.failure))

    def _on_change(self, template: TemplateProcess) -> None:
        """A template has become ready, or forks no more, or is gone."""
        if template.gone.is_set():
            self._sandbox.release(self._all.pop(template, None))
        if template is self._current and not template.alive:
            output = template.output
            self._replace(f"it has ended. It wrote:\n{output}" if output else "it has ended")
        elif template.usable:
            for name, error in template.missing.items():
                logger.info("not preloaded: %s (%s)", name, error)

    def _replace(self, reason: str) -> None:
        """Start another template after a pause; until then kernels start cold."""
        self._current = None
        logger.warning(
            "the template of %s is replaced in %g s, kernels start cold until then: %s",
            self.environment.python,
            self._pause_s,
            reason,
        )
        self._again = asyncio.get_running_loop().call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
