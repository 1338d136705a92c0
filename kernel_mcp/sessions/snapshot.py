"""The server's side of dumps: a kernel's variables are written to a file and loaded again.

A dump is hostile data. The server bounds it, stores it and sends it to another sandboxed kernel,
but never parses it. Every reply of a kernel is checked before it is shown or stored.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from kernel_mcp.errors import HibernationError, KernelMcpError, LaunchError
from kernel_mcp.linux.pipes import Checksum, checksum_of, from_pipe, into_pipe, make_pipe
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel, PendingReply
    from kernel_mcp.kernels.message_codec import Message


MAX_DESCRIBED = 500
MAX_DIMENSIONS = 32


def descriptions(value: object) -> tuple[dict[str, Any], ...]:
    """Return up to `MAX_DESCRIBED` descriptions with the fields of `models.Variable`.

    `value` may be anything; malformed parts are left out.
    """
    items = value[:MAX_DESCRIBED] if isinstance(value, list) else []
    return tuple(_description(item) for item in items if isinstance(item, dict))


def counted(value: object) -> int | None:
    """Return `value` if it is a count from 0 to 2**63 - 1, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**63 else None


def _description(item: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: _text(item.get(key)) for key in ("name", "type", "preview")}
    counts = {key: counted(item.get(key)) for key in ("length", "size")}
    shape = item.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or None in [counted(size) for size in shape]
    ):
        shape = None
    return {**texts, **counts, "shape": shape}


def _text(value: object) -> str:
    return one_line(value) if isinstance(value, str) else ""


SECONDS = 20.0
"""Processor seconds that a kernel may use for all variables, and again for imports."""
PASSES = 6
"""Bound of a reply with variables, as a multiple of `SECONDS`: one for attempts in forked children,
then the `PASSES` of the kernel's `attempt_limits`."""
ANSWER_S = 5.0
"""Additional processor seconds of that reply, and the bound of every other reply."""
PATIENCE = 10
"""Wall-clock bound as a multiple of the processor time, for a busy machine."""
LOOK_S = 0.5
"""Seconds between two readings of a late kernel's processor time."""
TRANSFER_S = 600.0
"""Wall-clock bound of the transfer of a dump, in seconds."""
SETTLE_S = 0.2
INTERRUPTS = 4
"""Number of interrupts to a late kernel. It ignores one that arrives just before the request
begins, so several are sent."""
PART_BYTES = 4 * MIB
PIPED_PER_S = 50 * MIB
"""Minimum bytes that a kernel passes through a pipe per second of processor time."""
DUMP_PIPE = "kernel_mcp_dump_pipe_request"
LOAD_PIPE = "kernel_mcp_load_pipe_request"
UNLIKE = "its kernel sent something else than it had announced"
COPIED = "a copy now: it shared memory with another object"
"""Reason for a changed array, for records of earlier versions, which have no reasons."""
EXTRA_BYTES = 32 * MIB
"""Bytes allowed beyond the variables, for code of cells and names."""
MAX_NAMES = 25_000
MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 200


class UnsavableError(HibernationError):
    """Raised if a working kernel reports that it cannot save or load the variables."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Variables in a file of `size` bytes.

    names      saved variables, in order of definition
    lost       names that were left out, with reasons
    variables  descriptions of the saved variables
    stored     names in the order of the file, with results of cells
    changed    names that will be loaded with a change, with reasons
    files      paths in the kernel's private folders, which are not saved
    groups     `stored` in groups of names that can only be loaded together
    checksum   checksum of the file; empty if unknown
    """

    path: Path
    size: int
    names: tuple[str, ...]
    lost: Mapping[str, str]
    variables: tuple[Mapping[str, Any], ...]
    stored: tuple[str, ...] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    checksum: str = ""

    @classmethod
    def of(cls, path: Path, size: int, reply: Mapping[str, Any], checksum: str = "") -> Dump:
        """Return the dump that a kernel's reply or a `row` describes.

        Raises HibernationError if it is malformed.
        """
        return cls(
            path=path,
            size=size,
            names=_names(reply.get("names")),
            lost=_reasons(reply.get("lost")),
            variables=descriptions(reply.get("variables")),
            stored=_names(reply.get("stored")),
            changed=_changes(reply),
            files=_names(reply.get("files", [])),
            groups=_groups(reply.get("groups", [])),
            checksum=checksum,
        )

    def row(self) -> dict[str, Any]:
        """Return the fields for `of`, without size and checksum."""
        return {
            "names": [*self.names],
            "lost": {**self.lost},
            "variables": [*self.variables],
            "stored": [*self.stored],
            "changed": {**self.changed},
            "files": [*self.files],
            "groups": [[*group] for group in self.groups],
        }


UNREADABLE = "they cannot be read from disk: {}"
CUT = "they are not whole on the disk: their file has another size"
CHANGED = "they were changed on the disk: their checksum is not that of the save"


def missing(dump: Dump) -> str:
    """Return the reason if a dump's file is missing or has another size, else "". Blocking."""
    try:
        found = dump.path.lstat()
    except OSError as error:
        return UNREADABLE.format(error.strerror)
    return "" if found.st_size == dump.size else CUT


async def damage(dump: Dump) -> str:
    """Return the reason if a dump's file has another size or checksum, else ""."""
    failure = await anyio.to_thread.run_sync(missing, dump)
    if failure or not dump.checksum:
        return failure
    try:
        fd = os.open(dump.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0):
            found = await checksum_of(fd, dump.size)
    except OSError as error:
        return UNREADABLE.format(error.strerror)
    return "" if found == dump.checksum else CHANGED


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading a dump: `names` were loaded, `lost` maps the others to reasons.

    `behind` are names stored after a lost one, which could not be read. `missing` are files of the
    dump that do not exist in this kernel.
    """

    names: tuple[str, ...]
    lost: Mapping[str, str]
    behind: tuple[str, ...]
    missing: tuple[str, ...] = ()


async def take(
    kernel: Kernel,
    path: Path,
    *,
    max_bytes: int,
    leave: Iterable[str] = (),
    seconds: float = 0.0,
) -> Dump:
    """Write the variables of an idle kernel to `path`, except those in `leave`.

    The kernel may use `seconds` of processor time; 0 stands for `SECONDS`. Raises HibernationError
    for a fault of the kernel, OSError.
    """
    seconds = seconds or SECONDS
    if (own := kernel.snapshots) is not None:
        said, written, checksum = await own.write(
            path, max_bytes=max_bytes, leave=leave, seconds=PASSES * seconds
        )
        return Dump.of(path, written, said, checksum)
    content: dict[str, Any] = {
        "max_bytes": max_bytes,
        "seconds": seconds,
        "leave": sorted(leave),
    }
    try:
        seconds = PASSES * seconds + ANSWER_S
        answer = await _ask(kernel, "kernel_mcp_dump_request", content, seconds)
        reply = answer.content
        size = reply.get("size")
        if not isinstance(size, int) or not 0 < size <= max_bytes + EXTRA_BYTES:
            raise HibernationError("its kernel said something impossible about its variables")
        dump = Dump.of(path, size, reply)
        with anyio.move_on_after(TRANSFER_S) as patience:
            dump = replace(dump, checksum=await _store(kernel, path, size))
        if patience.cancelled_caught:
            raise HibernationError(f"its kernel did not hand them over within {TRANSFER_S:g} s")
    except BaseException:
        _let_go(kernel)
        raise
    return dump


async def give(kernel: Kernel, dump: Dump, leave: Iterable[str] = ()) -> Loaded:
    """Load a dump into `kernel`. Raises HibernationError for a fault of the kernel, OSError."""
    if (own := kernel.snapshots) is not None:
        seconds = 2 * SECONDS + ANSWER_S + dump.size / PIPED_PER_S
        return _loaded(await own.read(dump.path, leave=leave, seconds=seconds), dump)
    async with handed_over(kernel, dump):
        return await load(kernel, dump, leave=leave)


@asynccontextmanager
async def handed_over(kernel: Kernel, dump: Dump) -> AsyncIterator[None]:
    """Send a dump to `kernel`, which can `load` it inside the block.

    A large dump is piped while it is loaded. The kernel gets no descriptor of the file, because it
    could reopen it for writing. Raises HibernationError for a fault of the kernel, OSError.
    """
    descriptor = os.open(dump.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        if dump.size > PART_BYTES:
            # A descriptor is never queued: the kernel must have read all requests before.
            await _ask(kernel, "kernel_info_request", {}, ANSWER_S)
            reader, writer = make_pipe()
            with open(writer, "wb", buffering=0) as pipe:
                with open(reader, "rb", buffering=0):
                    answer = await _ask(kernel, LOAD_PIPE, {}, ANSWER_S, given=reader)
                if answer.content.get("came") is True:
                    async with _beside(partial(_feed, file, pipe)):
                        yield
                    return
        while part := await anyio.to_thread.run_sync(file.read, PART_BYTES):
            await _ask(kernel, "kernel_mcp_load_part_request", {}, ANSWER_S, part)
        yield


@asynccontextmanager
async def _beside(work: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run `work` until the block ends. Raises an OSError of `work`, else the block's error."""
    failure: KernelMcpError | OSError | None = None

    async def run() -> None:
        nonlocal failure
        try:
            await work()
        except OSError as error:
            failure = error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            yield
        except (KernelMcpError, OSError) as error:
            failure = failure or error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _feed(file: FileIO, pipe: FileIO) -> None:
    with pipe, suppress(BrokenPipeError):  # the kernel has closed its end, or has ended
        await into_pipe(file.fileno(), pipe.fileno())


async def load(kernel: Kernel, dump: Dump, *, count: int = 0, leave: Iterable[str] = ()) -> Loaded:
    """Load the next `count` variables of a dump that was handed over; 0 stands for all.

    Names in `leave` are skipped, now and later. They must be complete `groups`, or the ends of
    groups. Raises HibernationError.
    """
    content: dict[str, Any] = {
        "seconds": SECONDS,
        "count": count,
        "leave": sorted(leave),
        "files": list(dump.files),
    }
    seconds = 2 * SECONDS + ANSWER_S + dump.size / PIPED_PER_S
    return _loaded((await _ask(kernel, "kernel_mcp_load_request", content, seconds)).content, dump)


def _loaded(reply: Mapping[str, Any], dump: Dump) -> Loaded:
    """Return the result in a kernel's reply. Raises HibernationError if it is malformed."""
    return Loaded(
        names=_names(reply.get("names")),
        lost=_reasons(reply.get("lost", {})),
        behind=_names(reply.get("behind", [])),
        missing=tuple(path for path in _names(reply.get("missing", [])) if path in dump.files),
    )


async def _store(kernel: Kernel, path: Path, size: int) -> str:
    """Receive a dump into `path`, and return its checksum. Raises HibernationError, OSError."""
    passed = Checksum()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        left = size
        if size > PART_BYTES:
            left -= await _piped(kernel, file, size, passed)
        while left:
            wanted = min(PART_BYTES, left)
            content = {"bytes": wanted}
            answer = await _ask(kernel, "kernel_mcp_dump_part_request", content, ANSWER_S)
            part = b"".join(answer.buffers)
            if len(part) != wanted:
                raise HibernationError(UNLIKE)
            await anyio.to_thread.run_sync(_write, file.fileno(), part, passed)
            left -= wanted
    return str(passed)


async def _piped(kernel: Kernel, file: FileIO, size: int, passed: Checksum) -> int:
    """Receive the dump through a pipe into `file`, and return its `size`.

    Returns 0 if the descriptor did not reach the kernel: the dump must be requested in parts then.
    Raises HibernationError, OSError.
    """
    reader, writer = make_pipe()
    came, ended = 0, anyio.Event()

    async def drain() -> None:
        nonlocal came
        with source:  # after `size` bytes or a disk error, further writes of the kernel fail
            came = await from_pipe(source.fileno(), file.fileno(), size, passed)
        ended.set()

    with open(reader, "rb", buffering=0) as source, open(writer, "wb", buffering=0) as pipe:
        async with _beside(drain):
            seconds = ANSWER_S + size / PIPED_PER_S
            answer = await _ask(kernel, DUMP_PIPE, {}, seconds, given=pipe.fileno())
            pipe.close()
            if answer.content.get("came") is not True:
                return 0
            await ended.wait()
    if came != size:
        raise HibernationError(UNLIKE)
    return size


def _let_go(kernel: Kernel) -> None:
    """Request that the kernel frees its dump, which refers to variables' memory; do not wait."""
    with (
        suppress(LaunchError),
        kernel.asking("shell", "kernel_mcp_dump_part_request", {"bytes": 0}),
    ):
        pass


def _write(descriptor: int, data: bytes, passed: Checksum) -> None:
    passed.add(data)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


async def _ask(
    kernel: Kernel,
    kind: str,
    content: dict[str, Any],
    seconds: float,
    *buffers: bytes,
    given: int | None = None,
) -> Message:
    """Send a shell request and return the reply; interrupt the kernel if it is late.

    `seconds` are processor time. Raises UnsavableError for a reply that reports a failure,
    HibernationError without a reply in time.
    """
    try:
        with kernel.asking("shell", kind, content, buffers, given) as answer:
            try:
                await _patience(kernel, answer, seconds)
                late = not answer.done.is_set()
            finally:
                await _settle(kernel, answer)
    except LaunchError as error:
        raise HibernationError("its kernel took no requests") from error
    message = answer.message
    if message is None and kernel.exit is not None:
        raise HibernationError(f"its kernel ended meanwhile ({kernel.exit.describe()})")
    if message is None or late:
        raise HibernationError(f"its kernel did not answer within {seconds:g} s of processor time")
    if message.content.get("status") != "ok":
        reason = message.content.get("reason")
        text = one_line(reason, MAX_REASON_CHARS) if isinstance(reason, str) else "no reason given"
        raise UnsavableError(f"its kernel could not do it: {text}")
    return message


async def _patience(kernel: Kernel, answer: PendingReply, seconds: float) -> None:
    """Wait for an answer until the kernel has used `seconds` of processor time.

    The wall-clock wait for a missing answer is `seconds` to `PATIENCE` times `seconds`.
    """
    with anyio.move_on_after(seconds):
        before = kernel.handle.usage().cpu_s
        await answer.done.wait()
    with anyio.move_on_after(seconds * (PATIENCE - 1)):
        while not answer.done.is_set() and kernel.handle.usage().cpu_s - before < seconds:
            with anyio.move_on_after(LOOK_S):
                await answer.done.wait()


async def _settle(kernel: Kernel, answer: PendingReply) -> None:
    """Interrupt a kernel that has not answered, up to `INTERRUPTS` times."""
    for _ in range(INTERRUPTS):
        if answer.done.is_set():
            break
        kernel.interrupt(alone=True)
        with anyio.CancelScope(shield=True), anyio.move_on_after(SETTLE_S):
            await answer.done.wait()


def _names(value: object) -> tuple[str, ...]:
    if (
        not isinstance(value, list)
        or len(value) > MAX_NAMES
        or not all(isinstance(name, str) and len(name) <= MAX_NAME_CHARS for name in value)
    ):
        raise HibernationError("its kernel named its variables in an impossible way")
    return tuple(value)


def _changes(reply: Mapping[str, Any]) -> dict[str, str]:
    """Return names with reasons. Records of earlier versions have a list of copied arrays."""
    copies = dict.fromkeys(_names(reply.get("copies", [])), COPIED)
    return {**copies, **_reasons(reply.get("changed", {}))}


def _groups(value: object) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise HibernationError("its kernel named its variables in an impossible way")
    return tuple(_names(group) for group in value)


def _reasons(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise HibernationError("its kernel named its variables in an impossible way")
    return {
        name: one_line(text, MAX_REASON_CHARS)
        for name, text in zip(_names(list(value)), value.values(), strict=True)
    }
