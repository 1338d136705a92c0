"""A notebook as a file of a workspace that other programs change, too.

A change reads the file and replaces it only if it is still the same: changes by others meanwhile
are kept. Everything here is blocking, and is to be run in a thread.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kernel_mcp.errors import NotebookError, WorkspaceError
from kernel_mcp.files.streams import Changed, tag_of
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.notebooks.document import MOST_BYTES, NotebookDocument
from kernel_mcp.notebooks.metadata import PYTHON_METADATA, language_of

TRIES = 20
"""Attempts to change a file that another program keeps changing."""
SETTLED_S = 1.0
"""Seconds after its last change in which an unreadable file may still be being written."""
PAUSE_S = 0.02
"""Seconds between two reads of such a file: nothing signals the end of the write."""
SUFFIX = ".ipynb"
_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH

T = TypeVar("T")


class NotebookFile:
    """The notebook at `path`, as answers name it.

    All methods raise WorkspaceError and NotebookError.
    """

    def __init__(
        self,
        workspace: Workspace,
        path: str,
        wrote: Callable[[str, int, bytes], None],
        metadata: Mapping[str, Any] = PYTHON_METADATA,
    ) -> None:
        """`wrote` is called with path, size and content of each saved version.

        `metadata` has the fields `kernelspec` and `language_info` of the kernel that runs cells.
        Raises NotebookError for a name that does not end in `SUFFIX`.
        """
        if not path.endswith(SUFFIX):
            raise NotebookError(f"{path!r} is no name for a notebook: let it end in {SUFFIX}.")
        self._workspace = workspace
        self._wrote = wrote
        self._metadata = metadata
        self.path = workspace.name_of(path)

    def read(self) -> NotebookDocument:
        """Return the notebook as it is now."""
        return self._read_stable()[0]

    def change(self, work: Callable[[NotebookDocument], T]) -> T:
        """Change the present notebook by `work`, save it, and return the result of `work`.

        It is called again with the new content if another program has changed the file meanwhile,
        up to `TRIES` times.
        """
        for _ in range(TRIES):
            document, info = self._read_stable()
            self._check_mode(info)
            result = work(document)
            if self._put(document.bytes(), tag_of(info)):
                return result
        raise NotebookError(
            f"{self.path!r} was not changed: another program writes to it all the time. Try again "
            "when that has ended."
        )

    def _read_stable(self) -> tuple[NotebookDocument, os.stat_result]:
        """Return the notebook and the status of its file, once it is written completely.

        Some editors write in place: an incomplete file that was changed just now is read again.
        """
        end = time.monotonic() + SETTLED_S
        while True:
            data, info = self._content()
            try:
                return NotebookDocument.read(self.path, data), info
            except NotebookError:
                whole = data.rstrip().endswith(b"}")
                young = time.time() - info.st_mtime < SETTLED_S
                if whole or not young or time.monotonic() > end:
                    raise
            time.sleep(PAUSE_S)

    def create(self) -> bool:
        """Create a notebook without cells if there is no file; return True if there was none."""
        try:
            self._content()
        except WorkspaceError as missing:
            if missing.code != errno.ENOENT:
                raise
            return self._put(NotebookDocument.new(self._metadata).bytes(), "")
        return False

    def check_language(self, document: NotebookDocument) -> None:
        """Raise NotebookError if its code is in another language than the kernel's."""
        if not document.is_of(self._metadata):
            raise NotebookError(self.refusal(document))

    def refusal(self, document: NotebookDocument) -> str:
        """Return the reason why a notebook in another language is not run."""
        return (
            f"{self.path!r} is a notebook of {document.language}, and cells run as "
            f"{language_of(self._metadata)} here: nothing was run or written. read_notebook and "
            "edit_notebook work on it."
        )

    def check_writable(self) -> None:
        """Raise WorkspaceError or NotebookError if the file cannot be written."""
        self._check_mode(self._content()[1])
        self._workspace.begin_upload(self.path, 0, lambda _: True).close()

    def _check_mode(self, info: os.stat_result) -> None:
        if not info.st_mode & _WRITABLE:
            raise NotebookError(
                f"{self.path!r} is read-only: nobody has the permission to write it. Work on a "
                "copy, or make it writable with code (os.chmod) if that is meant."
            )

    def _content(self) -> tuple[bytes, os.stat_result]:
        """Return the bytes of the file and its status."""
        found = self._workspace.open_file(self.path)
        try:
            if found.info.st_size > MOST_BYTES:
                raise NotebookError(
                    f"{self.path!r} has {found.info.st_size:,} bytes; a notebook of at most "
                    f"{MOST_BYTES:,} can be opened. Clear outputs of it with code first."
                )
            data = found.read(0, MOST_BYTES)
        finally:
            found.close()
        return data, found.info

    def _put(self, data: bytes, tag: str) -> bool:
        """Replace the file with this tag, empty for no file; return False if it has another."""
        if len(data) > MOST_BYTES:
            raise NotebookError(
                f"{self.path!r} was not changed: it would have {len(data):,} bytes, and "
                f"{MOST_BYTES:,} are the most. Clear outputs of it, or open another notebook."
            )
        try:
            upload = self._workspace.begin_upload(self.path, len(data), lambda now: now == tag)
            try:
                upload.write(data)
                self._workspace.finish_upload(upload, lambda now: now == tag)
            finally:
                upload.close()
        except Changed:
            return False
        self._wrote(self.path, len(data), data)
        return True
