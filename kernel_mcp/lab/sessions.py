"""Sessions of running servers, as JupyterLab's server sees them."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from jupyter_client.connect import KernelConnectionInfo

from kernel_mcp.errors import SessionNotFound
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.admin import ask_all

SUFFIX = ".ipynb"
LISTED_S = 1.0
"""Seconds for which the list is cached: JupyterLab reads it several times in each request."""
_IDS = uuid.UUID("6f2b1f0e-7f1c-4f0b-9a52-5d5a2f6b7c11")
"""UUID namespace of kernel ids in JupyterLab, which derive from a session's handle and server."""


@dataclass(frozen=True, slots=True)
class LabSession:
    """A session: its handle, its notebook's name, and True if it outlives its server.

    `server` identifies the server that runs it now: a restored session keeps its handle.
    """

    handle: str
    path: str
    persisted: bool = False
    server: str = ""

    @property
    def kernel_id(self) -> str:
        """Id of its kernel in JupyterLab, another one on each server."""
        return str(uuid.uuid5(_IDS, f"{self.handle} {self.server}"))


class Sessions:
    """The sessions of servers that keep their files in `state`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._listed: tuple[float, dict[str, LabSession]] = -math.inf, {}
        self._paths: dict[str, str] = {}
        """The notebook of each session, by an id that stays the same when a server restores it."""

    async def listed(self) -> dict[str, LabSession]:
        """Return all sessions by the names of their notebooks, at most `LISTED_S` old."""
        since, found = self._listed
        if time.monotonic() - since < LISTED_S:
            return found
        found = {}
        for server in await self._ask({}):
            place = str(server.get("server", ""))
            for each in server.get("sessions", ()):
                handle, name = str(each["session"]), str(each["name"])
                kept = str(each["persisted_id"])
                path = self._path(kept or handle, handle, name)
                found[path] = LabSession(handle, path, bool(kept), place)
        self._listed = time.monotonic(), found
        return found

    def _path(self, key: str, handle: str, name: str) -> str:
        """Return the notebook name of a session; no other session gets it while JupyterLab runs."""
        if key not in self._paths:
            path = _path(name or handle)
            if path in self._paths.values():
                path = _path(f"{name} {handle}")
            self._paths[key] = path
        return self._paths[key]

    async def find(self, path: str) -> LabSession:
        """Return the session of a notebook. Raises SessionNotFound."""
        found = (await self.listed()).get(path.strip("/"))
        if found is None:
            raise SessionNotFound(f"No session that runs now has the notebook {path!r}.")
        return found

    async def join(self, handle: str, *, record: bool = False) -> Mapping[str, Any]:
        """Return the path of a session's connection file, and with `record` its cells.

        Raises SessionNotFound.
        """
        answers = await self._ask({"join": handle, "plain": True, "record": record})
        for each in answers:
            if each.get("session") == handle:
                return each
        said = "; ".join(str(each["error"]) for each in answers if "error" in each)
        raise SessionNotFound(said or f"Session {handle} has ended.")

    async def connection(self, handle: str) -> KernelConnectionInfo:
        """Return the content of a session's connection file. Raises SessionNotFound, OSError."""
        path = Path(str((await self.join(handle))["file"]))
        content: KernelConnectionInfo = json.loads(await anyio.to_thread.run_sync(path.read_bytes))
        return content

    async def _ask(self, question: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return await anyio.to_thread.run_sync(lambda: list(ask_all(self._state, question)))


def _path(name: str) -> str:
    return f"{name.replace('/', '_')}{SUFFIX}"
