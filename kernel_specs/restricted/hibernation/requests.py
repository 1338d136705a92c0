"""Shell requests of hibernation, and the part of their reports that is not in variables."""

# The kernel is a traitlets class.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_specs.restricted.checkpoints.suspended import socket_of
from kernel_specs.restricted.hibernation import saving
from kernel_specs.restricted.hibernation.attempt_limits import StoppedError
from kernel_specs.restricted.hibernation.dumps import Arrival, DumpBytes, Pieces
from kernel_specs.restricted.hibernation.loading import Loading
from kernel_specs.restricted.hibernation.snapshot import take
from kernel_specs.restricted.originals import io, os, threading

if TYPE_CHECKING:
    from kernel_specs.restricted.config import BootConfig

SHARED_MEMORY = "/dev/shm"
SEMAPHORES = f"{SHARED_MEMORY}/sem."
"""Prefix of the files of sem_open(3), which hold no data."""
MAX_FILES = 100
MAX_ENTRIES = 20_000
MAX_PATH_CHARS = 200


class SnapshotRequests:
    """Shell requests of hibernation, answered between cells in the main thread.

    `kernel_mcp_dump_request`       pickle the variables; reply with names saved and names lost
    `kernel_mcp_dump_part_request`  the next bytes of that dump, as a buffer
    `kernel_mcp_dump_pipe_request`  that dump, into a pipe that came with the request
    `kernel_mcp_save_request`       fork a child that writes such a dump to a socket sent along
    `kernel_mcp_load_part_request`  the next bytes of a dump to load, as a buffer
    `kernel_mcp_load_pipe_request`  a pipe to read a dump from, when it is loaded
    `kernel_mcp_load_request`       load variables; reply with names loaded and names lost
    """

    SNAPSHOT_REQUESTS: ClassVar = (
        "kernel_mcp_dump_request",
        "kernel_mcp_dump_part_request",
        "kernel_mcp_dump_pipe_request",
        "kernel_mcp_save_request",
        "kernel_mcp_load_part_request",
        "kernel_mcp_load_pipe_request",
        "kernel_mcp_load_request",
    )
    shell: Any
    session: Any
    boot: BootConfig
    service: Any
    io_loop: Any
    shell_stream: Any
    _dump: DumpBytes | None = None
    _parts: Pieces | None = None
    _source: io.RawIOBase | None = None
    _loading: Loading | None = None

    async def kernel_mcp_dump_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Pickle the variables. Content: `max_bytes`, `seconds`, `leave` (names to leave out)."""
        self._dump = None
        reply = _attempted(self._make_dump, parent["content"])
        self.session.send(stream, "kernel_mcp_dump_reply", reply, parent, ident)

    async def kernel_mcp_dump_part_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Send the next `bytes` of the dump; forget it after its last part, or if `bytes` is 0."""
        size = parent["content"]["bytes"]
        part = self._dump.read(size) if self._dump is not None else b""
        if len(part) < size or not size:
            self._dump = None
        self.session.send(
            stream, "kernel_mcp_dump_part_reply", {"status": "ok"}, parent, ident, buffers=[part]
        )

    async def kernel_mcp_dump_pipe_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Write the dump into the pipe sent along, and forget it. No content.

        The reply has `came`: False if no pipe arrived, and the dump is kept.
        """
        reply = _attempted(self._write_dump, parent["content"])
        self.session.send(stream, "kernel_mcp_dump_pipe_reply", reply, parent, ident)

    async def kernel_mcp_save_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Fork a child that writes a dump to the socket sent along.

        Content: that of a dump request; `whole`: report an error if a value is too large; `hurry`:
        run at normal priority. The reply has `unfit`: the reason why no child was forked, or "".
        """
        reply = _attempted(self._save, parent["content"])
        self.session.send(stream, "kernel_mcp_save_reply", reply, parent, ident)

    async def kernel_mcp_load_part_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Append the request's buffer to the dump that will be loaded."""
        if self._parts is None:
            self._source = self._parts = Pieces()
        self._parts.add(parent["buffers"][0])
        self.session.send(stream, "kernel_mcp_load_part_reply", {"status": "ok"}, parent, ident)

    async def kernel_mcp_load_pipe_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Read the dump from the pipe sent along. No content; `came` in the reply: one arrived."""
        reply = _attempted(self._take_pipe, parent["content"])
        self.session.send(stream, "kernel_mcp_load_pipe_reply", reply, parent, ident)

    async def kernel_mcp_load_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run the first or next step of loading the dump. Content: that of `Loading.step`."""
        reply = _attempted(self._load, parent["content"])
        if not reply.get("left"):
            if self._loading is not None:
                self._loading.close()
            self._source = self._parts = self._loading = None
        self.session.send(stream, "kernel_mcp_load_reply", reply, parent, ident)

    def _make_dump(self, content: dict[str, Any]) -> dict[str, Any]:
        self.shell.process_state.hold()
        self._dump, reply = take(self.shell, content)
        return self._whole(reply)

    def _save(self, content: dict[str, Any]) -> dict[str, Any]:
        given = self._given()
        if given is None:
            return {"unfit": "no socket came with the request"}
        with socket_of(given) as host:
            unfit = saving.unfit_to_fork([self.service])
            if not unfit:
                self.shell.process_state.hold()
                saving.write_from_child(host, self._report, content)
        return {"unfit": unfit}

    def _given(self) -> int | None:
        """Return the descriptor sent with the request; None if a container runtime dropped it."""
        return next(iter(self.shell_stream.descriptors()), None)

    def _write_dump(self, _: dict[str, Any]) -> dict[str, Any]:
        given = self._given()
        if given is None:
            return {"came": False}
        dump, self._dump = self._dump, None
        try:
            if dump is not None:
                dump.write(given)
        finally:
            os.close(given)
        return {"came": True}

    def _take_pipe(self, _: dict[str, Any]) -> dict[str, Any]:
        given = self._given()
        if given is not None:
            self._parts, self._source = None, io.FileIO(given)
        return {"came": given is not None}

    def _report(
        self, content: Mapping[str, Any], on_progress: Callable[[str], None]
    ) -> tuple[DumpBytes, dict[str, Any]]:
        dump, reply = take(self.shell, content, on_progress, ahead=False)
        return dump, {"status": "ok", **self._whole(reply)}

    def _whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the report with other state that is lost: threads, tasks, files."""
        namespace = self.shell.user_ns
        work = running(self.service, self.io_loop.asyncio_loop)
        known = {id(value) for value in namespace.copy().values()}
        lost = {name: why for each, name, why in work if id(each) not in known}
        return {
            **reply,
            "lost": {**lost, **reply["lost"]},
            "files": left_files(self.boot.tmp),
        }

    def _load(self, content: dict[str, Any]) -> dict[str, Any]:
        if self._loading is None:
            if self._source is None:
                raise ValueError("there is no dump")
            self._loading = Loading(self.shell, Arrival(self._source))
        return self._loading.step(content)


def _attempted(action: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """Return the reply of an action, with its status; or the reason of its failure."""
    try:
        return {"status": "ok", **(action(argument) or {})}
    except StoppedError:
        return {"status": "aborted"}
    except Exception as error:  # noqa: BLE001  # every request gets a reply
        return {"status": "error", "reason": f"{type(error).__name__}: {error}"[:1000]}


def running(
    service: threading.Thread, loop: asyncio.AbstractEventLoop
) -> list[tuple[object, str, str]]:
    """Return running threads of code and tasks of `loop`, each with its name and its kind.

    The kernel's own thread `service` and daemon threads of libraries are left out.
    """
    found: list[tuple[object, str, str]] = []
    for thread in threading.enumerate():
        of_a_cell = "__main__" in (
            type(thread).__module__,
            getattr(getattr(thread, "_target", None), "__module__", None),
        )
        apart = thread in (service, threading.main_thread())
        if not apart and (of_a_cell or not thread.daemon):
            found.append((thread, str(thread.name), "a running thread"))
    for task in asyncio.all_tasks(loop):
        code = task.get_coro()
        found.append((task, str(getattr(code, "__qualname__", code)), "a running task"))
    return found


def left_files(tmp: str) -> list[str]:
    """Return the paths of files below `tmp` and in shared memory, at most `MAX_FILES`.

    Reads at most `MAX_ENTRIES` entries. Hidden folders of `tmp`, which hold caches (see
    `confine`), and mounts of the host are skipped.
    """
    found: list[str] = []
    looked = 0
    for root in (tmp, SHARED_MEMORY):
        own = _device(root)
        for folder, folders, names in os.walk(root):
            if _device(folder) != own:
                folders.clear()
                continue
            folders[:] = sorted(name for name in folders if folder != tmp or name[0] != ".")
            for path in (f"{folder}/{name}" for name in sorted(names)):
                looked += 1
                if len(found) == MAX_FILES or looked > MAX_ENTRIES:
                    return found
                if path.startswith(SEMAPHORES) or len(path) > MAX_PATH_CHARS:
                    continue
                if _is_file(path):
                    found.append(path)
    return found


def _device(path: str) -> int:
    """Return the device number of a path's file system; 0 if the path is gone."""
    try:
        return Path(path).stat().st_dev
    except OSError:
        return 0


def _is_file(path: str) -> bool:
    try:
        path.encode()
        return Path(path).is_file()
    except (OSError, UnicodeError):
        return False
