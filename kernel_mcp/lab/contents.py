"""The files of JupyterLab: the notebooks of sessions, and nothing of the disk."""

# jupyter_server is an extra, and traitlets classes are untyped to mypy.
# mypy: disable-error-code="misc, no-untyped-call"

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from jupyter_server.services.contents.manager import AsyncContentsManager
from tornado.web import HTTPError
from traitlets import Unicode

from kernel_mcp.errors import KernelMcpError
from kernel_mcp.lab.following import Follower
from kernel_mcp.lab.sessions import LabSession, Sessions

EXTENSION = "jupyter_server_ydoc"
_ONLY = "There are only the notebooks of sessions here, and none can be {done} in JupyterLab."


class SessionContents(AsyncContentsManager):
    """One folder with a notebook for each session.

    Nothing is written to disk: changes live in the shared document, until JupyterLab ends.
    """

    root_dir = Unicode("/")
    sessions: Sessions

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._began = datetime.now(timezone.utc)
        self._followers: dict[str, Follower] = {}
        self._documents: dict[str, Any] = {}

    async def get(
        self,
        path: str,
        content: bool = True,
        type: str | None = None,  # noqa: A002 - the name is jupyter_server's
        format: str | None = None,  # noqa: A002
        require_hash: bool = False,
    ) -> dict[str, Any]:
        """Return the folder, or the notebook of a session. Raises HTTPError.

        An open notebook exists even while no server has its session, but without content.
        """
        found = await self.sessions.listed()
        path = path.strip("/")
        if not path:
            return self._folder(found if content else {})
        joined = found.get(path)
        away = joined is None and path in self._documents and not content
        if (joined is None and not away) or type not in (None, "notebook"):
            raise HTTPError(404, f"There is no session with the notebook {path!r}.")
        model = self._model(path, "notebook")
        if content and joined is not None:
            model["content"], model["format"] = await self._content(joined), "json"
        if require_hash:
            model["hash"] = hashlib.sha256(path.encode()).hexdigest()
            model["hash_algorithm"] = "sha256"
        return model

    async def save(self, model: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Save nothing: the shared document already has it. Raises HTTPError for other paths."""
        return await self.get(path, content=False)

    async def get_kernel_path(self, path: str, model: Any = None) -> str:
        """Return the notebook's own path instead of its folder: its kernel is its session's."""
        return path

    def get_extra_handlers(self) -> list[Any]:
        """Return no handlers: files could be fetched by them and run in a browser."""
        return []

    async def dir_exists(self, path: str) -> bool:
        """Return True for the only folder, the root."""
        return not path.strip("/")

    async def file_exists(self, path: str = "") -> bool:
        """Return True if a session has this notebook."""
        return path.strip("/") in await self.sessions.listed()

    async def is_hidden(self, path: str) -> bool:
        """Return False: no notebook is hidden."""
        return False

    async def new(self, model: Any = None, path: str = "") -> dict[str, Any]:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="made"))

    async def new_untitled(self, path: str = "", type: str = "", ext: str = "") -> dict[str, Any]:  # noqa: A002
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="made"))

    async def copy(self, from_path: str, to_path: str | None = None) -> dict[str, Any]:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="copied"))

    async def delete_file(self, path: str) -> None:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="removed"))

    async def rename_file(self, old_path: str, new_path: str) -> None:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="renamed"))

    async def create_checkpoint(self, path: str) -> dict[str, Any]:
        """Return a placeholder: checkpoints are not supported."""
        return {"id": "now", "last_modified": self._began}

    async def list_checkpoints(self, path: str) -> list[dict[str, Any]]:
        """Return no checkpoints."""
        return []

    async def restore_checkpoint(self, checkpoint_id: str, path: str) -> None:
        """Refuse. Raises HTTPError."""
        raise HTTPError(403, _ONLY.format(done="restored"))

    async def delete_checkpoint(self, checkpoint_id: str, path: str) -> None:
        """Do nothing."""

    async def _content(self, joined: LabSession) -> dict[str, Any]:
        """Return the notebook, which follows its session from now on. Raises HTTPError."""
        document, follower = self._documents.get(joined.path), self._followers.get(joined.path)
        if document is not None and follower is not None and not follower.ended:
            shown: dict[str, Any] = document.get()
            return shown

        async def find() -> Any:
            made = await self._extension.get_document(
                path=joined.path,
                content_type="notebook",
                file_format="json",
                copy=False,
                create=True,
            )
            self._documents[joined.path] = made
            return made

        begins = follower is None or follower.ended
        if follower is None or begins:
            follower = Follower(joined, self.sessions, find, self._returned)
            self._followers[joined.path] = follower
        try:
            return await (follower.begin() if begins else follower.now())
        except (KernelMcpError, OSError, asyncio.TimeoutError) as error:
            if begins:
                del self._followers[joined.path]
            raise HTTPError(404, str(error)) from error

    async def _returned(self, before: LabSession, after: LabSession) -> None:
        """Connect notebooks to the kernel of a session that is back on another server.

        Pages notice this within a few seconds, when they poll.
        """
        kernels, sessions = self.parent.kernel_manager, self.parent.session_manager
        if before.kernel_id == after.kernel_id or before.kernel_id not in kernels:
            return
        made = await kernels.start_kernel(path=after.path)
        for each in await sessions.list_sessions():
            if each["kernel"]["id"] == before.kernel_id:
                await sessions.update_session(each["id"], kernel_id=made)
        await kernels.shutdown_kernel(before.kernel_id)

    @property
    def _extension(self) -> Any:
        return self.parent.extension_manager.extension_apps[EXTENSION].copy().pop()

    def _folder(self, found: Mapping[str, LabSession]) -> dict[str, Any]:
        shown = [self._model(path, "notebook") for path in found]
        return {**self._model("", "directory"), "content": shown, "format": "json"}

    def _model(self, path: str, kind: str) -> dict[str, Any]:
        return {
            "name": path,
            "path": path,
            "type": kind,
            "format": None,
            "mimetype": None,
            "content": None,
            "writable": True,
            "created": self._began,
            "last_modified": self._began,
            "size": None,
            "hash": None,
            "hash_algorithm": None,
        }
