"""Checks code before it runs: short code here, longer code in a process of its own.

Parsing holds Python's lock, and so the event loop for which every session waits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial

import anyio

from kernel_mcp.barriers import reason_of, surely
from kernel_mcp.errors import LaunchError, ServerFailure
from kernel_mcp.launch import silence
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.silence import Silence
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.linux.proc import Watched
from kernel_mcp.linux.process import bare_program
from kernel_mcp.policy import Policy, Report
from kernel_mcp.policy.check import check
from kernel_mcp.policy.source import MAX_CODE
from kernel_mcp.policy.worker import LENGTH, Answer, question
from kernel_mcp.sandbox.base import SandboxCommand

LONG_CODE_CHARS = 2_000
"""Longer code is checked elsewhere: 60 lines take half a millisecond, a message a quarter."""
IDLE_S = 600.0
"""After which a process is ended, which takes 18 MiB, and 70 ms to start."""
ATTEMPTS = 2
MOST_ANSWER_BYTES = 1 << 24

logger = logging.getLogger(__name__)


class Checks:
    """One for a server; its process starts when it is needed."""

    def __init__(self) -> None:
        self._worker = _Worker()

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
        """As `policy.check.check`; without `imports` those may be left out of the report.

        Raises ServerFailure: the code must not run.
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
            told = await self._worker.ask(asked)
            if told is None:
                return await surely(here)
            answer = Answer.of(told)
            missing = [module for module in answer.asked if module not in steps]
            if not missing:
                return answer.report
            steps |= {module: policy.step(module, once=policy.once) for module in missing}

    async def aclose(self) -> None:
        """End the process."""
        await self._worker.aclose()


class _Worker:
    """One process at a time, which answers one question after the other."""

    def __init__(self) -> None:
        self._turn = anyio.Lock()
        self._process: _Process | None = None
        self._ending: list[_Process] = []
        self._idle: asyncio.TimerHandle | None = None

    async def ask(self, message: bytes) -> bytes | None:
        """The answer; None where no process can be started. Raises ServerFailure."""
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                return await self._ask(message)
            finally:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)

    async def _ask(self, message: bytes) -> bytes | None:
        why = ""
        for _ in range(ATTEMPTS):
            if self._process is None or self._process.gone:
                self._end()
                try:
                    self._process = _Process()
                except (LaunchError, OSError) as error:
                    if why:  # this code may end the server, too
                        break
                    logger.warning("code is checked by the server itself: %s", reason_of(error))
                    return None
            try:
                return await self._process.ask(message)
            except TimeoutError as silent:
                why = str(silent)
            except (EOFError, OSError):
                why = "it has ended"
            except BaseException:  # what it answers now would be taken for the next answer
                self._end()
                raise
            logger.warning("the process that checks code is replaced: %s%s", why, self._end())
        raise ServerFailure(
            f"The check of this code has failed {ATTEMPTS} times, and nothing of it was run: a "
            f"process of the server does it, and {why}. Split the code into smaller cells, or try "
            "again; the server's log says more."
        )

    async def aclose(self) -> None:
        """End the process, if there is one, and wait for all that have been ended."""
        if self._idle is not None:
            self._idle.cancel()
        self._end()
        for process in self._ending:
            await process.ended()

    def _end(self) -> str:
        """End the process, if there is one; what it wrote."""
        process, self._process = self._process, None
        if process is None:
            return ""
        self._ending = [*(each for each in self._ending if not each.gone), process]
        return process.end()


class _Process:
    """A process that checks code. The start raises LaunchError and OSError."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            self._socket, theirs = socket.socketpair()
            undo.callback(self._socket.close)
            self._socket.setblocking(False)
            fd = theirs.detach()
            argv = bare_program("kernel_mcp.policy.worker", str(fd), packages=True)
            self._popen, output = spawn(SandboxCommand(argv, [fd], {"LANG": "C.UTF-8"}))
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self._tail = StderrTail(output, self._loop)
            undo.callback(self._tail.close)
            self._watched = Watched(self._popen.pid, self._loop, self._on_end)
            undo.pop_all()

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._watched.gone.is_set()

    async def ask(self, message: bytes) -> bytes:
        """Send a question and wait for the answer.

        Raises EOFError or OSError when it ends, and TimeoutError with the reason when it is silent.
        """
        answer = self._loop.create_task(self._answer(message))
        watched = Silence(lambda: [self._popen.pid])
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=silence.LOOK_S)
                if not answer.done() and (why := watched.look()):
                    raise TimeoutError(why)
            return answer.result()
        finally:
            answer.cancel()
            with anyio.CancelScope(shield=True):  # until it has left the socket
                await asyncio.wait([answer])

    async def _answer(self, message: bytes) -> bytes:
        await self._loop.sock_sendall(self._socket, LENGTH.pack(len(message)) + message)
        (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
        if length > MOST_ANSWER_BYTES:
            raise EOFError
        return await self._receive(length)

    async def _receive(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = await self._loop.sock_recv(self._socket, count - len(found))
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)

    def end(self) -> str:
        """Have it end; what it wrote."""
        if not self.gone:
            self._watched.signal(signal.SIGKILL)
        self._socket.close()
        self._tail.drain()
        said = self._tail.text().strip()
        return f". It wrote:\n{said}" if said else ""

    async def ended(self) -> None:
        """Wait until it has ended."""
        with anyio.CancelScope(shield=True):
            await self._watched.gone.wait()

    def _on_end(self) -> None:
        self._popen.wait()
        self._watched.close()
        self._tail.drain()
        self._tail.close()
