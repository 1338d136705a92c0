"""Snapshots: the session's variables dumped by one kernel and loaded by another.

Every variable succeeds or fails by itself, within limits of size and time; a failed one is named
with a reason. The host stores the dump and never parses it.
"""

# The kernel and the shell are traitlets classes, the pickler comes from an untyped library.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import asyncio
import builtins
import io
import linecache
import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_specs.restricted import variables
from kernel_specs.restricted.hibernation import saving
from kernel_specs.restricted.hibernation.attempt_limits import (
    LOOKING,
    Attempts,
    StoppedError,
    TooLargeError,
    Watch,
)
from kernel_specs.restricted.hibernation.dumps import (
    RESULT,
    Arrival,
    ByteBudget,
    DumpBytes,
    Pieces,
    Segment,
    copying,
    homes_in_values,
    sharing,
)
from kernel_specs.restricted.hibernation.objects import IMPORT, held_by_modules, will_be_another
from kernel_specs.restricted.hibernation.pickles import (
    Identities,
    NotebookPickler,
    NotebookUnpickler,
    live_objects,
    stand_in,
)
from kernel_specs.restricted.hibernation.process_state import NAME as SETTING
from kernel_specs.restricted.policy.guard import CELL_PREFIX

if TYPE_CHECKING:
    from kernel_specs.restricted.config import BootConfig

SHARED_MEMORY = "/dev/shm"
SEMAPHORES = f"{SHARED_MEMORY}/sem."
"""Prefix of the files of sem_open(3), which hold no data."""
MAX_FILES = 100
MAX_ENTRIES = 20_000
MAX_PATH_CHARS = 200
MAX_NAMES = 2000
MAX_TOLD = 20_000
"""Most names beyond `MAX_NAMES` that a reply lists as lost; it counts the others."""
MAX_NAME_CHARS = 200
MAX_SOURCE_CHARS = 4 * 1024 * 1024
"""Characters of cells' code saved for tracebacks, and as many for history; the newest first."""
LARGE_BYTES = 1024 * 1024
DRAFTS = 2
"""Bytes for first pickles, before shared objects are known, as a multiple of the dump's limit."""
MAX_ODD = 100
"""Most namespace keys that are not names listed in a reply; the others are counted."""
_MANAGED = re.compile(r"__(builtins?|warningregistry)__")
_OUTPUT = re.compile(r"_{1,3}|_(\d+)")
_INPUT = re.compile(r"_i{1,3}|_i\d+")
"""Names of the user namespace that Python and IPython set themselves."""


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
    _tasks: Any
    _answers: Any
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
        with socket.socket(fileno=given) as host:
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
        self, content: Mapping[str, Any], say: Callable[[str], None]
    ) -> tuple[DumpBytes, dict[str, Any]]:
        dump, reply = take(self.shell, content, say, ahead=False)
        return dump, {"status": "ok", **self._whole(reply)}

    def _whole(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the report with other state that is lost: threads, tasks, files."""
        namespace = self.shell.user_ns
        work = running(self.service, self.io_loop.asyncio_loop, {*self._tasks, *self._answers})
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


def take(
    shell: Any,
    content: Mapping[str, Any],
    say: Callable[[str], object] = len,
    *,
    ahead: bool = True,
) -> tuple[DumpBytes, dict[str, Any]]:
    """Pickle the variables of `shell`; return dump and report. Raises StoppedError.

    `say` is called with each name before its value is pickled. With `ahead` a forked child pickles
    first, and values that kill or block it are left out.
    """
    everything, lost, hidden = _variables(shell)
    found = dict(list(everything.items())[:MAX_NAMES])
    beyond = list(everything)[MAX_NAMES:]
    lost |= dict.fromkeys(beyond[:MAX_TOLD], f"only {MAX_NAMES:,} variables are kept")
    if more := len(beyond[MAX_TOLD:]):
        lost[f"{more:,} more"] = f"only {MAX_NAMES:,} variables are kept"
    described = variables.describe(found, hidden)["variables"]
    sizes = {item["name"]: item["size"] or 0 for item in described}
    # In order of definition, as loading an object may need earlier ones; large ones last, so that
    # one that does not fit costs no other.
    wanted = dict(sorted(found.items(), key=lambda item: sizes.get(item[0], 0) // LARGE_BYTES))
    settings, unread = _settings(shell, content, say)
    lost |= unread
    wanted = settings | wanted  # settings first: those that affect imports are loaded before values
    wanted |= {_result_name(number): value for number, value in _results(shell.user_ns).items()}
    for name in content["leave"]:
        wanted.pop(name, None)
        lost.pop(name, None)
    segments: list[Segment] = []
    if ahead and not content["leave"]:  # a first attempt
        harm = _run_ahead(wanted, shell, content)
        lost |= harm
        wanted = {name: value for name, value in wanted.items() if name not in harm}
    try:
        failed, changed = _fill(segments, wanted, shell, content, say)
        lost |= failed
        filled = [part for part in segments if part.names]
        kept = {name for part in filled for name in part.names}
        order = [name for name in found if name in kept and name not in hidden]
        header = {
            "segments": [part.description() for part in filled],
            "order": order,
            "hidden": [name for name in found if name in kept and name in hidden],
        }
        dump = DumpBytes({**header, **_history(shell)}, filled)
    finally:
        for part in segments:
            part.close()
    return dump, {
        "size": dump.size,
        "names": order,
        "stored": [name for part in filled for name in part.names],
        "groups": [part.names for part in filled],
        "changed": {name: why for name, why in changed.items() if name not in lost},
        "lost": lost,
        "variables": [item for item in described if item["name"] in kept],
    }


def _settings(
    shell: Any, content: Mapping[str, Any], say: Callable[[str], object]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that have changed, and reasons by name for those that cannot be read."""
    found: dict[str, Any] = {}
    with Watch() as watch:
        attempts = Attempts(watch, content["seconds"])
        for name, read in shell.process_state.changes():
            if name not in content["leave"]:
                say(name)
                attempts.do(name, partial(_add, found, read))
    return found, attempts.lost


def _add(found: dict[str, Any], read: Callable[[], dict[str, Any]]) -> None:
    found |= read()


def _run_ahead(wanted: Mapping[str, Any], shell: Any, content: Mapping[str, Any]) -> dict[str, str]:
    """Return reasons by name for values that kill or block a forked child."""
    from kernel_specs.restricted.hibernation import dumps

    def fill(names: Sequence[str], say: Callable[[str], None]) -> None:
        some = {name: wanted[name] for name in names}
        _fill([], some, shell, {**content, "seconds": dumps.SECONDS}, say)

    with Watch() as watch:
        look = partial(dumps.harmful, list(wanted), fill, watch.ask)
        return watch.run(look, content["seconds"])


def _fill(
    segments: list[Segment],
    wanted: Mapping[str, Any],
    shell: Any,
    content: Mapping[str, Any],
    say: Callable[[str], object] = len,
) -> tuple[dict[str, str], dict[str, str]]:
    """Pickle values into a segment each, or one for those that share objects.

    Returns reasons by name for values that failed, and for those that will not be equal.
    """
    namespace = shell.user_ns
    code = "\n".join(shell.history_manager.input_hist_parsed)
    room = ByteBudget(content["max_bytes"])
    drafts = ByteBudget(content["max_bytes"], DRAFTS)
    lost: dict[str, str] = {}
    others: dict[str, Any] = {}
    """Values that code can distinguish from their copies."""

    def fill(names: Iterable[str]) -> Iterator[Segment]:
        """Yield segments with a value each, or none if it failed."""
        for name in names:
            segment = Segment(drafts, pickler, watch.ask)
            segments.append(segment)
            add(segment, name)
            yield segment

    def add(segment: Segment, name: str) -> None:
        say(name)
        value = wanted[name]
        if attempts.do(name, partial(_pickle, segment, value, namespace, code), value):
            segment.keep(name)
        else:
            segment.undo()

    def look(segment: Segment, name: str) -> None:
        segment.look()
        if will_be_another(wanted[name]):
            others[name] = wanted[name]

    with Watch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        identities = Identities()
        pickler = partial(
            NotebookPickler, namespace=namespace, identities=identities, ask=watch.ask
        )
        attempts = Attempts(watch, content["seconds"])
        apart = list(fill(wanted))
        looks = Attempts(watch, content["seconds"] * LOOKING)
        for part in apart:
            for name in part.names:
                say(name)
                if not looks.do(name, partial(look, part, name)):
                    part.drop()
        lost |= attempts.lost | looks.lost
        attempts = Attempts(watch, content["seconds"])
        apart = [part for part in apart if part.names]
        identities.homes.whole = homes_in_values(apart)
        changed = held_by_modules(others, namespace) | copying(apart, live_objects(namespace))
        changed |= {name: why for part in apart for name, why in part.changed.items()}
        for group in sharing(apart):
            names = [name for part in group for name in part.names]
            if len(group) == 1 and not group[0].homes & identities.homes.whole:
                try:
                    room.take(group[0].size)
                except TooLargeError as error:
                    lost |= dict.fromkeys(names, str(error))
                    group[0].drop()
                continue
            for part in group:
                part.drop()
            together = Segment(room, pickler, watch.ask)
            segments.append(together)
            for name in names:
                add(together, name)
    return lost | attempts.lost, changed


def _pickle(segment: Segment, value: Any, namespace: dict[str, Any], code: str) -> None:
    segment.add(stand_in(value, namespace, code))


def _variables(shell: Any) -> tuple[dict[str, Any], dict[str, str], set[str]]:
    """Return the user's variables in order, reasons by name for those lost, and hidden names.

    IPython does not show the hidden ones, such as those of `%pylab`; they come last.
    """
    own, concealed, missing = shell.own_names, shell.user_ns_hidden, object()
    results = _results(shell.user_ns)
    found: dict[str, Any] = {}
    hidden: dict[str, Any] = {}
    odd: list[tuple[str, str]] = []
    for name, value in list(shell.user_ns.items()):
        if type(name) is not str:
            odd.append((_as_item(name), "not a name"))
            continue
        is_hidden = concealed.get(name, missing) is value
        if name in own and (is_hidden or own[name] is value):
            continue
        if match := _OUTPUT.fullmatch(name):
            number = match[1]
            hook = shell.displayhook
            ours = results.get(int(number), missing) if number else getattr(hook, name, missing)
            if ours is value:
                continue
        elif _MANAGED.fullmatch(name) or (_INPUT.fullmatch(name) and is_hidden):
            continue
        if RESULT.fullmatch(name) or SETTING.fullmatch(name):
            odd.append((_as_item(name), "not a name"))
        elif len(name) <= MAX_NAME_CHARS and name.isprintable():
            (hidden if is_hidden else found)[name] = value
        else:
            short = ascii(name[: MAX_NAME_CHARS // 10])[1:-1]
            odd.append((f"{short}…", f"not a name of up to {MAX_NAME_CHARS} printable characters"))
    return {**found, **hidden}, _told(odd), set(hidden)


def _as_item(key: object) -> str:
    """Return a label for a namespace key that is no variable name: "globals()['a b']"."""
    of_python = type(key) in (int, float, bool, bytes, str)
    return f"globals()[{ascii(key)[: MAX_NAME_CHARS // 10] if of_python else type(key).__name__}]"


def _told(odd: list[tuple[str, str]]) -> dict[str, str]:
    """Return reasons by label for keys that cannot be saved; equal labels are numbered.

    At most `MAX_ODD`, and one entry that counts the rest.
    """
    found: dict[str, str] = {}
    for label, why in odd[:MAX_ODD]:
        same = sum(1 for each in found if each.startswith(label))
        found[f"{label} ({same + 1})" if same else label] = why
    if more := len(odd[MAX_ODD:]):
        found[f"{more:,} more keys of globals()"] = "not names"
    return found


def _results(namespace: dict[str, Any]) -> dict[int, Any]:
    """Return the results in `Out` by cell number; empty if code has replaced `Out`."""
    results = namespace.get("_oh")
    return dict(results) if isinstance(results, dict) else {}


def _history(shell: Any) -> dict[str, Any]:
    """Return the code of cells, for tracebacks, `inspect` and `In`."""
    numbers = shell.compile._filename_map
    sources = [
        [name, numbers.get(name), "".join(entry[2])]
        for name, entry in list(linecache.cache.items())
        if name.startswith(CELL_PREFIX) and len(entry) == 4
    ]
    manager = shell.history_manager
    left = MAX_SOURCE_CHARS
    kept = []
    for source in reversed(sources):
        left -= len(source[2])
        if left >= 0:
            kept.append(source)
    return {
        "execution_count": shell.execution_count,
        "sources": kept[::-1],
        "inputs": [_newest(manager.input_hist_parsed), _newest(manager.input_hist_raw)],
    }


def _newest(inputs: list[str]) -> list[str]:
    """Return all inputs; beyond `MAX_SOURCE_CHARS` the oldest are replaced by ""."""
    left = MAX_SOURCE_CHARS
    kept = []
    for text in reversed(inputs):
        left -= len(text)
        kept.append(text if left >= 0 else "")
    return kept[::-1]


def _result_name(number: int) -> str:
    return f"Out[{number}]"


def running(
    service: threading.Thread, loop: asyncio.AbstractEventLoop, own: Container[object]
) -> list[tuple[object, str, str]]:
    """Return running threads of code and tasks of `loop`, each with its name and its kind.

    `service` and the `own` tasks are the kernel's. Daemon threads of libraries are left out.
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
        if task not in own:
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


class Loading:
    """Loads an arrived dump into `shell`, the history first, in one step or in several."""

    def __init__(self, shell: Any, arrival: Arrival) -> None:
        self._shell = shell
        self._arrival = arrival
        self._header = arrival.header
        self._hidden = set(arrival.header.get("hidden", ()))  # none in a dump of an earlier version
        self._segments: list[dict[str, Any]] = list(arrival.header["segments"])
        self._unpickler: NotebookUnpickler | None = None
        self._nans: dict[int, float] = {}
        self._names: list[str] = []
        self._modules: Mapping[str, list[str]] = {}
        self._values: dict[str, Any] = {}
        self._behind: list[str] = []
        self._leave: set[str] = set()
        self._ask: Callable[[], object] = bool
        """The `ask` of the current step's watch."""
        self._settings: list[str] = []
        """Names of settings that are loaded, to be written last."""
        _restore_history(shell, self._header)

    def step(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Load `count` variables (0 for all), except those named in `leave` of any step so far.

        `seconds` of processor time are for all of them, and as many again for their imports. The
        reply has the `names` loaded, and `lost` ones with reasons. Further fields are names stored
        `behind` an unreadable one, the number `left`, and paths in `files` that are `missing`.
        Raises StoppedError. Raises ValueError or OSError for an incomplete dump: then no variable
        of it stays.
        """
        self._leave |= set(content["leave"])
        before = set(self._values)
        done = len(self._behind)
        with Watch() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._ask = watch.ask
            attempts = Attempts(watch, content["seconds"])
            imports = Attempts(watch, content["seconds"])
            count = content["count"] or sys.maxsize
            while count and (name := self._next()) is not None:
                for module in self._modules.get(name, ()):
                    if module not in sys.modules:
                        imports.do(module, partial(_import, module))
                if not attempts.do(name, partial(self._load, name)):
                    self._behind += self._names
                    self._names = []
                count -= 1
        order = [name for name in self._header["order"] if name in self._values]
        lost = dict(attempts.lost)
        if not self._left:
            lost |= self._finish(order, content["seconds"])
        return {
            "names": [name for name in order if name not in before],
            "lost": lost,
            "behind": self._behind[done:],
            "left": self._left,
            "missing": [path for path in content["files"] if not os.path.lexists(path)],
        }

    @property
    def _left(self) -> int:
        return len(self._names) + sum(len(segment["names"]) for segment in self._segments)

    def close(self) -> None:
        """Close the dump and drop loaded values: pandas counts references to its blocks."""
        self._arrival.close()
        self._unpickler = None
        self._values = {}

    def _next(self) -> str | None:
        """Return the next name, or None at the end; open the next segment when one is finished.

        Raises ValueError, OSError, MemoryError, and removes all loaded variables then.
        """
        while not self._names and self._segments:
            segment = self._segments.pop(0)
            self._names = [name for name in segment["names"] if name not in self._leave]
            self._modules = segment["modules"]
            self._unpickler = None  # its memory is free before the next is read
            try:
                pickles, buffers = self._arrival.segment(segment)
            except (ValueError, OSError, MemoryError):
                self._forget()
                raise
            self._unpickler = NotebookUnpickler(
                pickles, iter(buffers), nans=self._nans, ask=lambda: self._ask()
            )
        return self._names.pop(0) if self._names else None

    def _forget(self) -> None:
        self._shell.drop_by_id(self._values)
        self._values.clear()

    def _load(self, name: str) -> None:
        assert self._unpickler is not None
        self._values[name] = value = self._unpickler.load()[0]
        if SETTING.fullmatch(name):
            if self._shell.process_state.is_early(name):
                self._shell.process_state.write(name, value)
            else:
                self._settings.append(name)
        elif not RESULT.fullmatch(name):
            self._shell.push({name: value}, interactive=name not in self._hidden)

    def _finish(self, order: list[str], seconds: float) -> dict[str, str]:
        """Restore the order of the names, IPython's `Out`, and the settings of the process.

        Returns reasons by name for settings that cannot be written.
        """
        names = self._shell.user_ns
        for name in order:
            if name in names:
                names[name] = names.pop(name)
        _restore_results(self._shell, self._values)
        with Watch() as watch:
            attempts = Attempts(watch, seconds)
            for name in self._settings:
                write = partial(self._shell.process_state.write, name, self._values[name])
                attempts.do(name, write)
        return attempts.lost


def _import(name: str) -> None:
    """Import as a cell would: the import policy applies."""
    eval(IMPORT, {"__builtins__": builtins, "name": name})


def _restore_results(shell: Any, values: Mapping[str, Any]) -> None:
    found = {int(name[4:-1]): value for name, value in values.items() if RESULT.fullmatch(name)}
    shell.user_ns["_oh"].update(found)
    names = {f"_{number}": value for number, value in found.items()}
    for name, number in zip(("_", "__", "___"), sorted(found, reverse=True), strict=False):
        if name not in values:  # code has given it another meaning, which IPython respects
            names[name] = found[number]
            setattr(shell.displayhook, name, found[number])
    shell.push(names, interactive=False)


def _restore_history(shell: Any, header: Mapping[str, Any]) -> None:
    for name, number, text in header["sources"]:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        if number is not None:
            shell.compile._filename_map[name] = number
    manager = shell.history_manager
    manager.input_hist_parsed[:], manager.input_hist_raw[:] = header["inputs"]
    shell.execution_count = header["execution_count"]
