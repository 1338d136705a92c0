"""The floor: jupyter_client and a stock ipykernel, as anyone would put them together.

No MCP, no sandbox, in the process that measures.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from benchmarks.notebooks import Answer
from benchmarks.places import PACKAGES, environment
from benchmarks.results import BenchmarkError

FLOOR = "floor: jupyter_client + ipykernel"
REQUIREMENTS = (f"ipykernel=={version('ipykernel')}", *PACKAGES)
READY_S = 60
CELL_S = 120
_MAX_SOCKETS = 16_384
_KERNEL = "stock"


@contextmanager
def _patience(seconds: float, failure: str) -> Iterator[None]:
    """End what jupyter_client waits for without end, now and then. Raises BenchmarkError."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise BenchmarkError(f"{failure} within {seconds:g} s") from None


class FloorNotebook:
    """One stock kernel and its client."""

    def __init__(self, manager: AsyncKernelManager, *, on_close: Callable[[], object]) -> None:
        self._manager = manager
        self._client: AsyncKernelClient = manager.client()
        self._on_close = on_close
        self._begun = ""

    async def start(self, folder: Path, ipython: Path) -> None:
        """Start the kernel and wait until it is ready, in jupyter_client's own way."""
        environ = {**os.environ, "IPYTHONDIR": str(ipython)}
        with _patience(READY_S, "a stock kernel did not start"):
            await self._manager.start_kernel(
                cwd=str(folder), env=environ, stderr=subprocess.DEVNULL
            )
            self._client = self._manager.client()
            self._client.start_channels()
            await self._client.wait_for_ready(timeout=READY_S)

    async def run(self, code: str) -> Answer:
        """Run a cell to its end."""
        texts: list[str] = []
        pictures = 0

        def take(message: dict[str, Any]) -> None:
            nonlocal pictures
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                texts.append(content["data"].get("text/plain", ""))
                pictures += "image/png" in content["data"]

        with _patience(CELL_S, "a stock kernel did not answer"):
            reply = await self._client.execute_interactive(
                code, allow_stdin=False, output_hook=take, timeout=CELL_S
            )
        if reply["content"]["status"] != "ok":
            raise BenchmarkError(f"the cell {code[:60]!r} ended with {reply['content']}")
        return Answer("".join(texts), pictures)

    async def begin(self, code: str) -> None:
        """Start a cell that does not end, and return once it has put something out."""
        self._begun = self._client.execute(code, allow_stdin=False)
        while (await self._client.get_iopub_msg(timeout=READY_S))["msg_type"] != "stream":
            pass

    async def interrupt(self) -> None:
        """Stop the cell and return once it has ended."""
        await self._manager.interrupt_kernel()
        reply = await self._client.get_shell_msg(timeout=READY_S)
        if reply["parent_header"].get("msg_id") != self._begun:
            raise BenchmarkError("another cell ended")
        while True:
            message = await self._client.get_iopub_msg(timeout=READY_S)
            if message["content"].get("execution_state") == "idle":
                return

    async def close(self) -> None:
        """Kill the kernel."""
        with anyio.CancelScope(shield=True):
            self._client.stop_channels()
            await self._manager.shutdown_kernel(now=True)
            self._on_close()


class Floor:
    """Starts stock kernels and ends those that are left."""

    def __init__(self, specs: KernelSpecManager, context: zmq.asyncio.Context, folder: Path):
        self._specs = specs
        self._context = context
        self._folder = folder
        self._open: dict[int, FloorNotebook] = {}

    async def open(self) -> FloorNotebook:
        """Start a kernel.

        Each has a history of its own: kernels with a common one wait for each other at every cell.
        """
        place = next(number for number in itertools.count() if number not in self._open)
        manager = AsyncKernelManager(
            kernel_name=_KERNEL,
            kernel_spec_manager=self._specs,
            context=self._context,
            connection_file=str(self._folder / f"kernel-{place}.json"),
        )
        notebook = FloorNotebook(manager, on_close=lambda: self._open.pop(place, None))
        self._open[place] = notebook
        await notebook.start(self._folder, self._folder / f"ipython-{place}")
        return notebook

    async def aclose(self) -> None:
        """End every kernel that still runs."""
        for notebook in list(self._open.values()):
            await notebook.close()


@asynccontextmanager
async def floor(folder: Path) -> AsyncIterator[Floor]:
    """A floor whose files are below `folder`. Raises BenchmarkError."""
    python = await environment("floor", REQUIREMENTS) / "bin/python"
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": _KERNEL, "language": "python"}
    place = folder / "specs" / _KERNEL
    place.mkdir(parents=True, exist_ok=True)
    (place / "kernel.json").write_text(json.dumps(spec))
    specs = KernelSpecManager(kernel_dirs=[str(place.parent)], ensure_native_kernel=False)
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    made = Floor(specs, context, folder)
    try:
        yield made
    finally:
        await made.aclose()
        context.destroy(linger=0)
