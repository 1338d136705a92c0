"""Kernels that a person has open: stock ones, by their connection file or on a Jupyter server."""

from __future__ import annotations

import json
import secrets
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Protocol

import anyio
from anyio.abc import Process
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

PATIENCE_S = 60.0


class Opened(Protocol):
    """A running kernel of a person's."""

    flag: str
    """The operator's value of --attach."""
    place: str
    """The name that an agent requests."""

    async def run(self, code: str) -> None:
        """The person runs a cell to its end."""

    def begin(self, code: str) -> None:
        """The person runs a cell and does not wait for its end."""

    async def restart(self) -> None:
        """The person restarts the kernel."""

    async def end(self) -> None:
        """The person shuts it down."""


async def _cell(client: AsyncKernelClient, code: str) -> None:
    with anyio.fail_after(PATIENCE_S):
        await client.execute_interactive(code, output_hook=lambda _message: None)


class ByFile:
    """A kernel of Jupyter's own client, which its connection file names."""

    def __init__(self, manager: AsyncKernelManager, client: AsyncKernelClient) -> None:
        self._manager, self._client = manager, client
        self.flag = self.place = manager.connection_file

    async def run(self, code: str) -> None:
        await _cell(self._client, code)

    def begin(self, code: str) -> None:
        self._client.execute(code)

    async def restart(self) -> None:
        await self._manager.restart_kernel()
        await self._client.wait_for_ready(timeout=PATIENCE_S)

    async def end(self) -> None:
        await self._manager.shutdown_kernel()


@asynccontextmanager
async def by_file(connection: Path, kernel: str = "python3") -> AsyncIterator[Opened]:
    """A kernel with this connection file, and a client that has joined it."""
    manager = AsyncKernelManager(kernel_name=kernel, connection_file=str(connection))
    await manager.start_kernel(stderr=DEVNULL)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=PATIENCE_S)
        yield ByFile(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


class JupyterServer:
    """A Jupyter server of a person's."""

    def __init__(self, base: str, token: str, runtime: Path) -> None:
        self.base, self.token, self.runtime = base, token, runtime
        self.flag = f"{base}/?token={token}"

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request to the server; the JSON that it answers."""
        request = urllib.request.Request(
            f"{self.base}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self.token}"},
        )

        def fetched() -> Any:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                text = answer.read()
            return json.loads(text) if text else None

        return await anyio.to_thread.run_sync(fetched)

    @asynccontextmanager
    async def notebook(self, kernel: str = "python3") -> AsyncIterator[OnServer]:
        """A notebook that the person has open meanwhile."""
        notebook = {"path": "a notebook.ipynb", "type": "notebook", "name": "a notebook"}
        session = await self.ask("POST", "api/sessions", {**notebook, "kernel": {"name": kernel}})
        opened = OnServer(self, session["kernel"]["id"])
        try:
            await opened.join()
            yield opened
        finally:
            opened.close()
            with anyio.CancelScope(shield=True):
                for each in await self.ask("GET", "api/sessions"):
                    await self.ask("DELETE", f"api/sessions/{each['id']}")
                for each in await self.ask("GET", "api/kernels"):
                    await self.ask("DELETE", f"api/kernels/{each['id']}")


class OnServer:
    """A notebook's kernel on a Jupyter server; a client beside it is the person's."""

    def __init__(self, server: JupyterServer, kernel: str) -> None:
        self.flag = server.flag
        self.place = f"{server.base}/lab/tree/a%20notebook.ipynb"
        self._server, self._kernel = server, kernel
        self._client = AsyncKernelClient()

    async def join(self) -> None:
        """Let the person's client join the kernel."""
        connection = self._server.runtime / f"kernel-{self._kernel}.json"
        self._client.load_connection_file(str(connection))
        self._client.start_channels(hb=False)  # a busy machine is late for those
        await self._client.wait_for_ready(timeout=PATIENCE_S)

    async def run(self, code: str) -> None:
        await _cell(self._client, code)

    def begin(self, code: str) -> None:
        self._client.execute(code)

    async def restart(self) -> None:
        await self._server.ask("POST", f"api/kernels/{self._kernel}/restart")
        await self._client.wait_for_ready(timeout=PATIENCE_S)

    async def end(self) -> None:
        await self._server.ask("DELETE", f"api/kernels/{self._kernel}")

    def close(self) -> None:
        """Close the sockets of the person's client."""
        self._client.stop_channels()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def jupyter_server(folder: Path) -> AsyncIterator[JupyterServer]:
    """A Jupyter server without a kernel, which serves `folder`."""
    port, token, runtime = _free_port(), secrets.token_hex(16), folder / "runtime"
    words = ["--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0"]
    words += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    server: Process = await anyio.open_process(
        [sys.executable, "-m", "jupyter_server", *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "JUPYTER_RUNTIME_DIR": str(runtime)},
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    found = JupyterServer(f"http://127.0.0.1:{port}", token, runtime)
    try:
        with anyio.fail_after(PATIENCE_S):
            while True:
                try:
                    await found.ask("GET", "api/status")
                    break
                except OSError:
                    await anyio.sleep(0.05)  # it does not tell when it listens
        yield found
    finally:
        server.terminate()
        with anyio.CancelScope(shield=True), anyio.move_on_after(PATIENCE_S):
            await server.wait()
