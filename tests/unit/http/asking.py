"""An HTTP client for an application in this process, which sends what real clients clean up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import anyio
from starlette.applications import Starlette
from starlette.requests import Request

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.host_folders.exposed import ExposedMount
from kernel_mcp.http.files import routes
from kernel_mcp.identity import Principal
from kernel_mcp.output.text import Masks
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.manager import SessionManager
from kernel_mcp.sessions.session import Session
from tests.unit.fake_kernels import FakeClock, FakeSource, new_manager

GONE = b"\0gone"
"""A piece of a body in whose place the client goes away."""
SILENT = b"\0silent"
"""A piece that never comes."""


@dataclass
class Reply:
    """An answer; `whole` says that its end was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Asking:
    """A client with one session that is `mine`."""

    app: Starlette
    manager: SessionManager
    mine: Session
    taken: Callable[[int], Awaitable[None]] | None = None
    """Waits until the client takes the piece of an answer after so many bytes."""

    @property
    def workspace(self) -> Path:
        return self.mine.workspace.root

    async def ask(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: Iterable[bytes] = (),
        *,
        who: str = "ann",
    ) -> Reply:
        """The answer to a request for a raw `target`; a body without a length is chunked."""
        reply, parts = Reply(), list(body)
        path, _, query = target.partition("?")
        fields = [("x-who", who), *(headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("latin-1"),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in fields],
            "state": {},
        }
        ended = anyio.Event()

        async def receive() -> dict[str, Any]:
            if reply.whole:
                return {"type": "http.disconnect"}
            if not parts:
                await ended.wait()
                return {"type": "http.disconnect"}
            piece = parts.pop(0)
            if piece == GONE:
                return {"type": "http.disconnect"}
            if piece == SILENT:
                await anyio.sleep_forever()
            return {"type": "http.request", "body": piece, "more_body": bool(parts)}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                pairs = [(k.decode(), v.decode("latin-1")) for k, v in message["headers"]]
                assert len({k for k, _ in pairs}) == len(pairs)
                reply.headers = dict(pairs)
                return
            if self.taken is not None:
                await self.taken(len(reply.body))
            reply.body += message.get("body", b"")
            if not message.get("more_body", False):
                reply.whole = True
                ended.set()

        if method in ("PUT", "POST") and not parts:
            parts = [b""]
        with anyio.fail_after(60):
            await self.app(scope, receive, send)  # type: ignore[arg-type]
        return reply

    async def get(self, path: str, headers: dict[str, str] | None = None, **more: Any) -> Reply:
        return await self.ask("GET", self.of(path), headers, **more)

    async def put(
        self, path: str, content: bytes, headers: dict[str, str] | None = None, **more: Any
    ) -> Reply:
        length = {"content-length": str(len(content))}
        return await self.ask("PUT", self.of(path), length | (headers or {}), [content], **more)

    async def delete(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return await self.ask("DELETE", self.of(path), headers)

    def of(self, path: str) -> str:
        """The address of a file of this session."""
        return f"/sessions/{self.mine.handle}/files/{path}"

    def taking(self, taken: Callable[[int], Awaitable[None]]) -> Asking:
        """The same for a client that takes answers in its own time."""
        return replace(self, taken=taken)


@asynccontextmanager
async def asking(
    folder: Path,
    *,
    disk_bytes: int = 0,
    hidden: Sequence[tuple[str, str]] = (),
    opener: Any = None,
    quotas: Quotas | None = None,
    mounts: Sequence[ExposedMount] = (),
    **options: Any,
) -> AsyncIterator[Asking]:
    """A client of the routes for files, of sessions with fake kernels and real folders."""
    manager = new_manager(folder, FakeSource(), FakeClock(), quotas=quotas or Quotas())
    masks = Masks(hidden)
    workspace = partial(
        Workspace, disk_bytes=disk_bytes, opener=opener, masked=masks.pieces, mounts=mounts
    )
    factory = manager._factory
    factory._folders = replace(factory._folders, workspace=workspace)

    def caller_of(request: Request) -> Caller:
        name = request.headers["x-who"]
        return Caller(principal=name, who=Principal(name=name))

    app = Starlette(routes=routes(manager, caller_of, masks=masks, **options))
    async with manager.running():
        mine = await manager.create(Caller(principal="ann"), name="desk")
        yield Asking(app, manager, mine)
