"""Other MCP servers with a Jupyter kernel, each started as its own documentation says."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
from mcp.client import Client

from benchmarks.connection import answer, call
from benchmarks.notebooks import Answer, Notebook, Notebooks
from benchmarks.places import PACKAGES
from benchmarks.results import BenchmarkError

UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started."""

    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


class Peer(Protocol):
    """A server that others have written. `packages` are what its environment needs."""

    @property
    def name(self) -> str:
        """Its name on the package index."""

    @property
    def packages(self) -> Sequence[str]:
        """The packages to install."""

    def beside(self, place: Path, folder: Path) -> AbstractAsyncContextManager[Command]:
        """Run its services with files in `folder` inside the block; `place` is its environment."""

    def notebooks(self, client: Client, place: Path) -> Notebooks:
        """Its sessions."""


@dataclass(frozen=True, slots=True)
class ToolNotebook:
    """A session that runs cells by one tool and cannot be interrupted by any."""

    client: Client
    tool: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    closing: str = ""

    async def run(self, code: str) -> Answer:
        """Run a cell to its end."""
        return answer(await call(self.client, self.tool, code=code, **self.arguments))

    async def begin(self, code: str) -> None:
        """Not offered."""
        raise BenchmarkError("a cell cannot be followed while it runs")

    async def interrupt(self) -> None:
        """Not offered."""
        raise BenchmarkError("a cell cannot be interrupted")

    async def close(self) -> None:
        """End the session where there is a tool for it."""
        if self.closing:
            await call(self.client, self.closing, **self.arguments)


class JupyterKernelMcp:
    """jupyter-kernel-mcp: kernels of jupyter_client, by name."""

    name = "jupyter-kernel-mcp"
    packages = ("jupyter-kernel-mcp", "mcp<2", *PACKAGES)

    @asynccontextmanager
    async def beside(self, place: Path, folder: Path) -> AsyncIterator[Command]:
        """It needs nothing."""
        yield Command([str(place / "bin/jupyter-kernel-mcp")])

    def notebooks(self, client: Client, place: Path) -> Notebooks:
        """A kernel for each."""
        return _Kernels(client, place)


@dataclass(frozen=True, slots=True)
class _Kernels:
    client: Client
    place: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def open(self) -> Notebook:
        kernel = f"k{next(self.numbers)}"
        python = str(self.place / "bin/python")
        await call(self.client, "start_kernel", env_path=python, kernel_id=kernel)
        return ToolNotebook(self.client, "execute_code", {"kernel_id": kernel}, "stop_kernel")


class Ipybox:
    """ipybox: one kernel behind a kernel gateway; `reset` gives a fresh one."""

    name = "ipybox"
    packages = ("ipybox", "mcp<2", *PACKAGES)

    @asynccontextmanager
    async def beside(self, place: Path, folder: Path) -> AsyncIterator[Command]:
        """It starts its gateway itself."""
        yield Command([str(place / "bin/ipybox"), "--log-level", "ERROR"])

    def notebooks(self, client: Client, place: Path) -> Notebooks:
        """One after the other."""
        return _Resets(client)


@dataclass(frozen=True, slots=True)
class _Resets:
    client: Client

    async def open(self) -> Notebook:
        await call(self.client, "reset")
        return _IpyboxNotebook(self.client, "execute_ipython_cell")


@dataclass(frozen=True, slots=True)
class _IpyboxNotebook(ToolNotebook):
    async def run(self, code: str) -> Answer:
        found = answer(await call(self.client, self.tool, code=code))
        return Answer(found.text, found.text.count(".png"))  # it answers with their paths


class JupyterMcpServer:
    """jupyter-mcp-server: notebooks of a Jupyter server, which has to run already."""

    name = "jupyter-mcp-server"
    packages = ("jupyter-mcp-server", "ipykernel", *PACKAGES)

    @asynccontextmanager
    async def beside(self, place: Path, folder: Path) -> AsyncIterator[Command]:
        """A Jupyter server."""
        port, token = _free_port(), secrets.token_hex(16)
        environ = {
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        argv = [
            str(place / "bin/jupyter"), "server", "--no-browser", "--ip=127.0.0.1",
            f"--port={port}", f"--IdentityProvider.token={token}",
            *(["--allow-root"] if os.geteuid() == 0 else []),
        ]  # fmt: skip
        process = await anyio.open_process(
            argv,
            cwd=folder,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await _listens(port)
            url = f"http://127.0.0.1:{port}"
            given = {"JUPYTER_URL": url, "JUPYTER_TOKEN": token, "ALLOW_IMG_OUTPUT": "true"}
            yield Command([str(place / "bin/jupyter-mcp-server")], {**environ, **given})
        finally:
            with anyio.CancelScope(shield=True):
                process.terminate()
                with anyio.move_on_after(10):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                await process.aclose()

    def notebooks(self, client: Client, place: Path) -> Notebooks:
        """A notebook file for each."""
        return _Files(client)


@dataclass(frozen=True, slots=True)
class _Files:
    client: Client

    async def open(self) -> Notebook:
        name = f"n{secrets.token_hex(4)}"
        await call(
            self.client,
            "use_notebook",
            notebook_name=name,
            notebook_path=f"{name}.ipynb",
            mode="create",
        )
        return _FileNotebook(self.client, "execute_code", {"notebook_name": name})


@dataclass(frozen=True, slots=True)
class _FileNotebook(ToolNotebook):
    async def run(self, code: str) -> Answer:
        return answer(await call(self.client, self.tool, code=code))  # in the notebook in use

    async def close(self) -> None:
        await call(self.client, "unuse_notebook", **self.arguments)


PEERS: tuple[Peer, ...] = (JupyterKernelMcp(), Ipybox(), JupyterMcpServer())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _listens(port: int) -> None:
    with anyio.fail_after(UP_S):
        while not await _connects(port):
            await anyio.sleep(0.1)


async def _connects(port: int) -> bool:
    try:
        stream = await anyio.connect_tcp("127.0.0.1", port)
    except OSError:
        return False
    await stream.aclose()
    return True
