"""Folders of sessions: how they are chosen, and which of them outlive a session."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kernel_mcp.barriers import Barrier, run_in_thread
from kernel_mcp.environments.layer import Layer
from kernel_mcp.errors import InputError
from kernel_mcp.files.workspace import Workspace
from kernel_mcp.identity import LOCAL, folder_name
from kernel_mcp.linux.folders import hold_name
from kernel_mcp.linux.safe_tree import make_private, remove_tree
from kernel_mcp.records import dataclass

SCRIPT = "(script)"
"""Name of sessions of `run_script`. It cannot be a session's name, so none is found by it."""
MOST_NUMBERED = 500
"""Bound of the numbers in names of kept workspaces, for sessions without a name."""


@dataclass(frozen=True, slots=True)
class SessionFolders:
    """Parent folders of sessions' files: `workspaces` for kernels, `records` for the server.

    `layers` are for installed packages. With `keep`, workspaces outlive their sessions and have
    their names; that of the default session is `default`. Those of scripts are removed, as no later
    session could find them. With `by_principal`, kept workspaces are in a folder of their owner.
    `workspace` returns the workspace in a folder.
    """

    workspaces: Path
    records: Path
    layers: Path
    keep: bool
    by_principal: bool = False
    workspace: Callable[[Path], Workspace] = Workspace

    def place(
        self, handle: str, name: str, undo: ExitStack, *, default: bool, principal: str = LOCAL
    ) -> tuple[str, Path]:
        """Return the name of a session and its workspace; `undo` unlocks a kept workspace.

        Raises InputError if another session or server uses the workspace.
        """
        kept = self.workspaces
        if not self.keep or name == SCRIPT:
            return name, kept / handle
        if self.by_principal:
            kept /= folder_name(principal)
            if not kept.is_dir():
                make_private(kept)
        if name:
            candidates = [name]
        else:
            stem = "default" if default else "session"
            first = [stem] if default else []
            candidates = [*first, *(f"{stem}-{number}" for number in range(1, MOST_NUMBERED))]
        for candidate in candidates:
            folder = kept / candidate
            found = folder.lstat().st_mode if os.path.lexists(folder) else None
            if found is not None and not stat.S_ISDIR(found):
                continue
            if not (name or default) and found is not None:
                continue  # of an earlier session, and available only by its name
            if (lock := hold_name(folder)) is not None:
                undo.callback(os.close, lock)
                return name or ("" if default else candidate), folder
        raise InputError(
            f"The workspace {kept / candidates[0]} is in use by another session or server: choose "
            "another name."
        )

    def make(self, workspace: Path, layer: Path, records: Path) -> None:
        """Create the folders of a session; existing ones stay as they are."""
        for folder in (workspace, records):
            if not folder.is_dir():
                make_private(folder)
        if not layer.is_dir():
            Layer(layer).make()

    def save_of(self, handle: str) -> Path:
        """Return the folder for a hibernated session's variables, if it is not persisted."""
        return self.records / handle / "saved"

    async def remove(self, handle: str, *, script: bool, recorded: bool) -> None:
        """Remove the folders that do not outlive the session; with `recorded` its records stay."""
        places = [self.layers / handle]
        if script or not self.keep:
            places.append(self.workspaces / handle)
        places.append(self.save_of(handle) if recorded else self.records / handle)
        for place in places:
            with Barrier("removing a session's files", handle):
                await run_in_thread(remove_tree, place)
