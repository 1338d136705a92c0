"""Sessions of running servers, as the server of JupyterLab asks for them."""

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
from kernel_mcp.sessions.roster import ask_all

SUFFIX = ".ipynb"
LISTED_S = 1.0
"""JupyterLab looks at the folder several times for each of its requests."""
_IDS = uuid.UUID("6f2b1f0e-7f1c-4f0b-9a52-5d5a2f6b7c11")
"""A namespace for names of sessions, by which their kernels are known to JupyterLab."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A session: its handle, its notebook's name in JupyterLab, whether it outlives its server."""

    handle: str
    path: str
    kept: bool = False

    @property
    def kernel_id(self) -> str:
        """What its kernel is known by."""
        return str(uuid.uuid5(_IDS, self.handle))


class Sessions:
    """The sessions of servers that keep their files in `state`."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._listed: tuple[float, dict[str, Joined]] = -math.inf, {}
        self._paths: dict[str, str] = {}
        """The notebook of each session, by what is the same for those that outlive a server."""

    async def listed(self) -> dict[str, Joined]:
        """All sessions by the names of their notebooks, as they were within `LISTED_S`."""
        since, found = self._listed
        if time.monotonic() - since < LISTED_S:
            return found
        found = {}
        for server in await self._ask({}):
            for each in server.get("sessions", ()):
                handle, name = str(each["session"]), str(each["name"])
                kept = str(each["kept"])
                path = self._path(kept or handle, handle, name)
                found[path] = Joined(handle, path, bool(kept))
        self._listed = time.monotonic(), found
        return found

    def _path(self, key: str, handle: str, name: str) -> str:
        """The notebook of a session, which no other one gets while JupyterLab runs."""
        if key not in self._paths:
            path = _path(name or handle)
            if path in self._paths.values():
                path = _path(f"{name} {handle}")
            self._paths[key] = path
        return self._paths[key]

    async def find(self, path: str) -> Joined:
        """The session of a notebook. Raises SessionNotFound."""
        found = (await self.listed()).get(path.strip("/"))
        if found is None:
            raise SessionNotFound(f"No session that runs now has the notebook {path!r}.")
        return found

    async def join(self, handle: str, *, record: bool = False) -> Mapping[str, Any]:
        """The connection file of a session, and with `record` its cells. Raises SessionNotFound."""
        answers = await self._ask({"join": handle, "plain": True, "record": record})
        for each in answers:
            if each.get("session") == handle:
                return each
        said = "; ".join(str(each["error"]) for each in answers if "error" in each)
        raise SessionNotFound(said or f"Session {handle} has ended.")

    async def connection(self, handle: str) -> KernelConnectionInfo:
        """The content of the connection file of a session. Raises SessionNotFound, OSError."""
        path = Path(str((await self.join(handle))["file"]))
        content: KernelConnectionInfo = json.loads(await anyio.to_thread.run_sync(path.read_bytes))
        return content

    async def _ask(self, question: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return await anyio.to_thread.run_sync(lambda: list(ask_all(self._state, question)))


def _path(name: str) -> str:
    return f"{name.replace('/', '_')}{SUFFIX}"
