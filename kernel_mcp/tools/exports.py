"""A session as a folder or a zip: notebook, script with its packages, receipt."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from functools import partial
from urllib.parse import quote

import anyio
from mcp_types import CallToolResult, ResourceLink

from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import InputError, WorkspaceError
from kernel_mcp.kernels.interpreter import PYTHON
from kernel_mcp.packages.installer import Installer
from kernel_mcp.packages.pins import SCRIPT, PinnedScript
from kernel_mcp.sessions.losses import cells_in_words
from kernel_mcp.sessions.notebook_export import notebook
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.results import notice_result
from kernel_mcp.verification.files import digests_of, opened
from kernel_mcp.verification.receipt import read_receipt
from kernel_mcp.verification.runnable import RunnableScript, runnable_script

NOTEBOOK, LOCK, PINS, DATA, RECEIPT = (
    "notebook.ipynb",
    f"{SCRIPT}.lock",
    "requirements.txt",
    "data.sha256",
    "receipt.json",
)
_ZIPPED = (2020, 1, 1, 0, 0, 0)
"""Date of all files in a zip, so that equal exports are equal files."""
_LINKS = {"zip": "application/zip", "folder": "application/x-ipynb+json"}


async def export_all(
    session: Session,
    path: str,
    installer: Installer,
    progress: ProgressCallback,
    limiter: anyio.CapacityLimiter,
    *,
    zipped: bool,
) -> CallToolResult:
    """Write the folder `path`, or a zip of it, and return the answer.

    Raises InputError for sessions of other languages, and where files are in the way.
    """
    if session.request.interpreter is not PYTHON:
        raise InputError("A folder is for sessions of Python: pass format=ipynb or script.")
    path = path.removesuffix(".ipynb").removesuffix(".zip").rstrip("/")
    if not path:
        raise InputError("path is missing: pass a name for the folder.")
    await anyio.to_thread.run_sync(partial(_check_free, session, path, zipped=zipped))
    cells = session.cells
    made = await anyio.to_thread.run_sync(
        partial(runnable_script, cells, cells.undone), limiter=limiter
    )
    pinned = await installer.pinned(session, made.modules, made.code, progress)
    write = partial(_write, session, path, pinned, zipped=zipped)
    place, size = await anyio.to_thread.run_sync(write, limiter=limiter)
    where = place if zipped else path
    told = await anyio.to_thread.run_sync(_words, where, made, pinned, session)
    result = notice_result(" ".join(told))
    uri = f"kernel://{session.handle}/files/{quote(place)}"
    mime = _LINKS["zip" if zipped else "folder"]
    result.content.append(ResourceLink(uri=uri, name=place, mime_type=mime, size=size))
    return result


def _check_free(session: Session, path: str, *, zipped: bool) -> None:
    """Raise InputError if a file of a mounted project would be replaced."""
    workspace = session.workspace
    target = f"{path}.zip" if zipped else path
    if not workspace.start or workspace.name_of(target).startswith("/"):
        return
    try:
        workspace.list_files(target)
    except WorkspaceError:
        try:
            workspace.open_file(target).close()
        except WorkspaceError:
            return  # nothing is there, or writing is refused
    raise InputError(
        f"Nothing was done: {target!r} exists in {workspace.start}. Pass another path."
    )


def _write(session: Session, path: str, pinned: PinnedScript, *, zipped: bool) -> tuple[str, int]:
    """Write all files; return the path and the size of the zip, or of the notebook."""
    cells = session.cells
    book = notebook(cells, undone=cells.undone, metadata=cells.notebook, session=session.handle)
    files: dict[str, bytes] = {NOTEBOOK: book, SCRIPT: pinned.script}
    if pinned.lock:
        files[LOCK] = pinned.lock
    else:
        files[PINS] = pinned.requirements.encode()
    if data := _data(session):
        files[DATA] = data
    if receipt := _receipt(session):
        files[RECEIPT] = receipt
    if zipped:
        return _save(session, f"{path}.zip", _zip(path.rpartition("/")[2], files))
    sizes = [_save(session, f"{path}/{name}", data) for name, data in files.items()]
    return sizes[0]


def _receipt(session: Session) -> bytes:
    """Return the receipt of the last verification if it is of these cells; empty otherwise."""
    if session.verified is None:
        return b""
    codes = [cell.recorded for cell in session.cells if cell.recorded.strip()]
    stale = read_receipt(session.verified.receipt).stale(codes)
    return b"" if stale else session.verified.receipt


def _data(session: Session) -> bytes:
    """Return the digests of files that cells have read and not made, as `sha256sum` has them."""
    made: set[str] = set()
    read: dict[str, None] = {}
    for cell in session.cells:
        for path, mode, _ in opened(cell):
            if mode == "r" and path not in made and path.isprintable():
                read[path] = None
            elif mode == "w" and path not in read:
                made.add(path)
    digests = digests_of(session.workspace, [*read])
    return "".join(f"{digest}  {path}\n" for path, digest in digests.items()).encode()


def _save(session: Session, path: str, data: bytes) -> tuple[str, int]:
    size = session.workspace.write_file(path, data)
    session.events.wrote(path, size, data)
    return path, size


def _zip(folder: str, files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(f"{folder}/{name}", _ZIPPED), data)
    return written.getvalue()


def _words(place: str, made: RunnableScript, pinned: PinnedScript, session: Session) -> list[str]:
    cells = f"{made.cells} cell{'' if made.cells == 1 else 's'}"
    told = [f"Wrote {place!r}: the notebook, and {cells} as {SCRIPT}."]
    if pinned.lock:
        told.append(
            f"Packages are locked with hashes: `uv run --locked {SCRIPT}` runs it elsewhere."
        )
    else:
        told.append(
            f"uv could not lock its packages ({pinned.reason}), so {PINS} has the installed "
            f"versions, without hashes of an index: `uv run {SCRIPT}` takes these versions."
        )
    if session.verified is None:
        told.append("There is no receipt, as the cells were not verified.")
    elif _receipt(session):
        told.append(f"{RECEIPT} is that of the last verification.")
    else:
        told.append(
            "There is no receipt: the last verification was of other cells than those of this "
            "session. verify without `path` is of these, unless a kernel was lost or cells undone."
        )
    for numbers, words in (
        (made.left, "Left out, as they did not end well or were undone"),
        (made.replaced, f"IPython commands are comments in {SCRIPT}"),
        (made.waits, "A top-level await, which only the notebook can run"),
    ):
        if numbers:
            told.append(f"{words}: {cells_in_words(list(numbers))}.")
    return told
