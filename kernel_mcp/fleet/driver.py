"""Driver of a front: the process in which Ray runs. It makes the calls that `link` asks for.

Frames between both are a length and a pickle: whoever writes them can run programs on all machines
of the fleet anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
from typing import Any

import anyio

from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.fleet.cluster import NAMESPACE, connect
from kernel_mcp.fleet.registry import registry_of

HEADER_BYTES = 8


def frame(value: Any) -> bytes:
    """Return the bytes of a frame."""
    data = pickle.dumps(value)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Return the value of the next frame. Raises IncompleteReadError at the end, OSError."""
    length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    return pickle.loads(await reader.readexactly(length))


class Driver:
    """Makes calls to actors by their names, concurrently."""

    def __init__(self, ray: Any, writer: asyncio.StreamWriter) -> None:
        self._ray = ray
        self._writer = writer
        self._actors: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Answer requests until the front ends. Raises IncompleteReadError then, or OSError."""
        while True:
            task = asyncio.create_task(self._answer(*await read_frame(reader)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, number: int, name: str, method: str, arguments: tuple[Any, ...], streams: bool
    ) -> None:
        errors = self._ray.exceptions
        kind, value = "end" if streams else "value", None
        try:
            if not method or name not in self._actors:
                find = self._ray.get_actor
                self._actors[name] = await anyio.to_thread.run_sync(find, name, NAMESPACE)
            if streams:
                call = getattr(self._actors[name], method).options(num_returns="streaming")
                async for each in call.remote(*arguments):
                    self._writer.write(frame((number, "item", await each)))
            elif method:
                value = await getattr(self._actors[name], method).remote(*arguments)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self._actors.pop(name, None)
            kind, value = "lost", str(error)
        except errors.RayError as error:
            kind = "refused" if isinstance(error, KernelMcpError) else "failed"
            value = str(error)
        except ValueError as error:
            kind, value = "missing", str(error)
        self._writer.write(frame((number, kind, value)))
        await self._writer.drain()


async def _serve(ray: Any, front: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=front)
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        await Driver(ray, writer).run(reader)


def main(descriptor: int, address: str, place: str) -> None:
    """Connect to the cluster, report that to the front, and answer its requests until it ends."""
    front = socket.socket(fileno=descriptor)
    try:
        ray = connect(address, place=place)
        registry_of(ray)
    except KernelMcpError as error:
        kind = "config" if isinstance(error, ConfigError) else "refused"
        front.sendall(frame((kind, str(error))))
        return
    front.sendall(frame(("value", "")))
    asyncio.run(_serve(ray, front))
    os._exit(0)  # Ray would wait for a head that is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
