"""A back-end with the faults of real ones, and some that nobody would write on purpose."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio

from kernel_mcp.backends.interface import Emit


class OddError(BaseException):
    """It is no Exception, and has no text."""

    def __str__(self) -> str:
        raise ValueError


async def fail(error: Exception) -> None:
    """Raise it."""
    raise error


class FaultyBackend:
    """Fails to start, or gives kernels that fail, as its text says."""

    language = "Faults"
    place = "nowhere"
    lacking: Mapping[str, str] = {}

    def __init__(self, fault: str) -> None:
        self._fault = fault

    async def start(self, session: str) -> Any:
        """Start, or not."""
        match self._fault:
            case "start raises":
                raise SystemExit(3)
            case "start cancels":
                raise asyncio.CancelledError
            case "start returns nothing":
                return None
        return FaultyKernel(self._fault)

    async def aclose(self) -> None:
        """Raise or hang, as the text says."""
        if self._fault == "end hangs":
            await asyncio.sleep(3600)
        if self._fault == "end raises":
            raise OddError


class FaultyKernel:
    """Does what the code of a cell says."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._gone = asyncio.Event()
        self._earlier: Emit = lambda _kind, _content: None

    async def execute(self, code: str, emit: Emit) -> Any:
        """Run the fault that `code` names."""
        match code:
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "odd":
                raise OddError
            case "group":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fail, ValueError("one"))
                    tasks.start_soon(fail, OSError("two"))
            case "silent":
                return False
            case "block":
                time.sleep(3600)
            case "stubborn":
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
            case "malformed":
                odd: list[Any] = [None, [], {"text": 3}, {"name": "stdout"}, {"data": "no"}]
                for content in odd:
                    for kind in ("stream", "display_data", "error", "clear_output", "no_such"):
                        emit(kind, content)
                emit("display_data", {"data": {"image/png": b"bytes"}, "metadata": 3})
            case "huge":
                emit("stream", {"name": "stdout", "text": "x" * 40_000_000})
            case "flood":
                for number in range(20_000):
                    emit("stream", {"name": "stdout", "text": f"{number}\n"})
            case "thread":
                text = {"name": "stdout", "text": "from a thread\n"}
                thread = threading.Thread(target=emit, args=("stream", text))
                thread.start()
                thread.join()
            case "later":
                self._earlier = emit
            case "now":
                emit("stream", {"name": "stdout", "text": "mine"})
                self._earlier("stream", {"name": "stdout", "text": "of the earlier cell"})
            case "die":
                self._gone.set()
                await asyncio.sleep(3600)
            case _:
                emit("stream", {"name": "stdout", "text": code})
        return True

    async def interrupt(self) -> None:
        """Do nothing."""

    async def ended(self) -> Any:
        """Return what is no text, or raise."""
        await self._gone.wait()
        if self._fault == "ended raises":
            raise OddError
        return None

    async def aclose(self) -> None:
        """Hang."""
        if self._fault == "close hangs":
            await asyncio.sleep(3600)
