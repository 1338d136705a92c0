"""A live kernel of a kernel spec: any language, in a sandbox of this server."""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.channels import Channel, ChannelListener, Channels, KernelChannels
from kernel_mcp.kernels.jupyter import JupyterKernel
from kernel_mcp.kernels.kernel import DRAIN_S
from kernel_mcp.kernels.message_codec import Message, whole_number
from kernel_mcp.kernels.run import Run, Sink
from kernel_mcp.kernelspecs.languages import language_of
from kernel_mcp.kernelspecs.snapshots import FileSnapshots
from kernel_mcp.kernelspecs.snippets import filled
from kernel_mcp.kernelspecs.spec import Kernelspec
from kernel_mcp.linux.proc import children, is_zombie
from kernel_mcp.output.items import Stream
from kernel_mcp.output.text import one_line

logger = logging.getLogger(__name__)

TEXT_CHARS = 80
ERROR_CHARS = 500
UNPREPARED = "what this server adds to kernels of this language did not fit its version"


class SpecKernel(JupyterKernel):
    """The kernel of a kernel spec."""

    def __init__(
        self, *arguments: Any, spec: Kernelspec, workspace: Path, seen_at: str, **named: Any
    ) -> None:
        """See `Kernel`; it sees the folder `workspace` at the path `seen_at`."""
        self.spec = spec
        self._language = language_of(spec)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._interpreters: frozenset[int] = frozenset()
        """Processes in which the kernel runs cells, if it has others for that."""
        super().__init__(*arguments, **named)
        if (code := self._language.dump) is not None:
            self.snapshots = FileSnapshots(
                code, self.evaluate, self.handle.limits, workspace, seen_at
            )
            self.starts_anew = code.starts_anew

    def _open(self, listener: ChannelListener) -> KernelChannels:
        sockets = self.handle.sockets
        return Channels(
            sockets.connection,
            listener,
            ends=sockets.channels,
            floods=self._floods,
            reads_ahead=True,
        )

    async def ready(self, timeout: float) -> None:
        """See `Kernel`."""
        answers = False
        with contextlib.suppress(LaunchError):  # it has closed its channels
            answers = await self.connected(timeout)
        if not answers:
            with anyio.move_on_after(DRAIN_S):
                await self.handle.wait()
            name = f"The kernel of {self.spec.display_name}"
            late = f"{name} did not answer within {timeout:g} s"
            what = self.exit.story(name) if self.exit else late
            output = self.handle.process.output.strip()
            said = f". It wrote:\n{output[-2000:]}" if output else "."
            raise LaunchError(f"{what}{said}")
        if self._language.start:
            await self._prepare(timeout)
        if self._language.programs:
            self.handle.process.start.tail.heard = self._on_written
        version = one_line(str(self.language_info.get("version", "")))[:TEXT_CHARS]
        self.environment = replace(self.environment, version=version)

    async def _prepare(self, timeout: float) -> None:
        """Run the code that makes a fresh kernel ready; another version of it may need none."""
        try:
            await self.evaluate(self._language.start, timeout)
        except LaunchError as reason:
            if self.exit is not None:
                raise
            logger.warning("the kernel of %s is as it is: %s", self.spec.display_name, reason)
            self.handle.report.boundary += (UNPREPARED,)

    def _listen(self, sink: Sink) -> Run:
        if self._language.renewed:
            self._interpreters = self._living()
        return super()._listen(sink)

    def _living(self) -> frozenset[int]:
        return frozenset(each for each in children(self.handle.pid) if not is_zombie(each))

    def _on_message(self, channel: Channel, message: Message) -> None:
        if channel != "control":
            self.handle.process.start.tail.drain()  # what was written before comes before
        super()._on_message(channel, message)

    def _take_output(self, message: Message, run: Run | None) -> None:
        super()._take_output(message, run)
        told = message.content.get("evalue" if message.kind == "error" else "text")
        if run is None or not isinstance(told, str):
            return
        if message.content.get("name") == "stdout":
            if (said := self._language.renewed) and told.rstrip().endswith(said):
                run.renewed = self._interpreters.isdisjoint(self._living())
            return
        step = self._language.advice(told, self.policy)
        if step and step not in run.notices:
            run.notices.append(step)

    def _on_written(self, data: bytes) -> None:
        """Take in what the kernel's process, or one that it has started, wrote itself."""
        if not self._hidden and self._stray is not None and (text := self._decoder.decode(data)):
            self._stray(Stream("stdout", text))

    @property
    def notebook_metadata(self) -> Mapping[str, Any]:
        """See `Kernel`."""
        info = super().notebook_metadata["language_info"]
        return {**self.spec.notebook, "language_info": info}

    def interrupt(self, *, alone: bool = False) -> None:
        """See `Kernel`; by a message if the kernel spec says so."""
        if self.spec.by_message:
            self._channels.interrupt()
        else:
            super().interrupt(alone=alone)

    async def describe_variables(self, match: str, offset: int, timeout: float) -> dict[str, Any]:
        """See `Kernel`."""
        pattern = fnmatch.translate(match)
        code = filled(self._language.variables, match=match, pattern=pattern, offset=offset)
        found = await self.evaluate(code, timeout)
        return {**found, "offset": offset} if isinstance(found, dict) else {}

    async def check_syntax(self, code: str, timeout: float) -> tuple[int, int, str] | None:
        """Return line, column and message of a syntax error in `code`, or None.

        Raises LaunchError.
        """
        if not self._language.check:
            raise LaunchError(f"{self.spec.display_name} cannot check code without running it.")
        found = await self.evaluate(filled(self._language.check, code=code), timeout)
        if found is None:
            return None
        line, column, message = found if isinstance(found, list) and len(found) == 3 else (1, 0, "")
        text = one_line(str(message))[:ERROR_CHARS]
        return whole_number(line) or 1, whole_number(column) or 0, text

    async def list_packages(self, timeout: float) -> dict[str, tuple[str, bool]]:
        """See `Kernel`."""
        found = await self.evaluate(self._language.packages, timeout)
        listed: dict[str, tuple[str, bool]] = {}
        for name, told in found.items() if isinstance(found, dict) else ():
            version, own = told if isinstance(told, list) and len(told) == 2 else ("", False)
            listed[one_line(name)[:TEXT_CHARS]] = one_line(str(version))[:TEXT_CHARS], own is True
        return listed
