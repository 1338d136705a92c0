"""Snapshots: the session's variables taken out of one kernel and brought back in another.

Every variable succeeds or fails for itself, within a limit of size and of time; what fails is
named with a reason. The host passes the dump on in parts and never looks into it.
"""

# The kernel and the shell are traitlets classes, the pickler comes from an untyped library.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import io
import linecache
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from kernel_specs.restricted import variables
from kernel_specs.restricted.dumps import Arrival, Dump, Room, Segment
from kernel_specs.restricted.guard import CELL_PREFIX
from kernel_specs.restricted.watch import Attempts, Watch

MAX_NAMES = 2000
MAX_NAME_CHARS = 200
MAX_SOURCE_CHARS = 4 * 1024 * 1024
"""Code of cells kept for tracebacks and `inspect`, and again as history; the newest count."""
LARGE_BYTES = 1024 * 1024
MAX_RESULTS = 5
"""Results of cells named one by one when they could not be kept."""
_MANAGED = re.compile(
    r"_{1,3}|_\d+|_i{1,3}|_i\d+|_[io]h|_dh|In|Out"
    r"|__(name|doc|package|loader|spec|builtins?|warningregistry)__"
)
"""Names of the user namespace that Python and IPython set themselves."""
_RESULT = re.compile(r"Out\[\d+\]")


class SnapshotRequests:
    """What a kernel answers on its shell channel, between cells, in its main thread.

    `kernel_mcp_dump_request`       pickle the variables; what was kept and what was not
    `kernel_mcp_dump_part_request`  the next bytes of that dump, as a buffer
    `kernel_mcp_load_part_request`  the next bytes of a dump to load, as a buffer
    `kernel_mcp_load_request`       bring the variables back; what came and what did not
    """

    SNAPSHOT_REQUESTS: ClassVar = (
        "kernel_mcp_dump_request",
        "kernel_mcp_dump_part_request",
        "kernel_mcp_load_part_request",
        "kernel_mcp_load_request",
    )
    shell: Any
    session: Any
    _dump: Dump | None = None
    _arrival: Arrival | None = None

    async def kernel_mcp_dump_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Content: `max_bytes`, `seconds`, `shared` (one memo for all), `leave` (names)."""
        self._dump = None
        reply = _attempted(self._make_dump, parent["content"])
        self.session.send(stream, "kernel_mcp_dump_reply", reply, parent, ident)

    async def kernel_mcp_dump_part_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Content: `bytes`. The dump is forgotten after its last part, or when 0 are wanted."""
        size = parent["content"]["bytes"]
        part = self._dump.read(size) if self._dump is not None else b""
        if len(part) < size or not size:
            self._dump = None
        self.session.send(
            stream, "kernel_mcp_dump_part_reply", {"status": "ok"}, parent, ident, buffers=[part]
        )

    async def kernel_mcp_load_part_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """One buffer."""
        if self._arrival is None:
            self._arrival = Arrival()
        reply = _attempted(self._arrival.write, parent["buffers"][0])
        self.session.send(stream, "kernel_mcp_load_part_reply", reply, parent, ident)

    async def kernel_mcp_load_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Content: `seconds`, `leave` (names). All parts have been sent."""
        reply = _attempted(self._load, parent["content"])
        self._arrival = None
        self.session.send(stream, "kernel_mcp_load_reply", reply, parent, ident)

    def _make_dump(self, content: dict[str, Any]) -> dict[str, Any]:
        self._dump, reply = take(self.shell, content)
        return reply

    def _load(self, content: dict[str, Any]) -> dict[str, Any]:
        arrival = self._arrival
        if arrival is None or not arrival.complete:
            raise ValueError("the dump is not complete")
        return bring_back(self.shell, arrival, content)


def _attempted(action: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """The reply of an action, or one that says why there is none."""
    try:
        return {"status": "ok", **(action(argument) or {})}
    except KeyboardInterrupt:
        return {"status": "aborted"}
    except Exception as error:  # noqa: BLE001  # a reply is owed
        return {"status": "error", "reason": f"{type(error).__name__}: {error}"[:1000]}


def take(shell: Any, content: Mapping[str, Any]) -> tuple[Dump, dict[str, Any]]:
    """Pickle the variables of `shell`. Raises KeyboardInterrupt."""
    everything = _variables(shell)
    found = dict(list(everything.items())[:MAX_NAMES])
    described = variables.describe(found)["variables"]
    sizes = {item["name"]: item["size"] or 0 for item in described}
    # In the order of definition, which is also that of loading: what an object needs when it comes
    # back is there then. Large ones come last: what does not fit costs nothing but itself.
    wanted = dict(sorted(found.items(), key=lambda item: sizes.get(item[0], 0) // LARGE_BYTES))
    wanted |= {_result_name(number): value for number, value in _results(shell.user_ns).items()}
    for name in content["leave"]:
        wanted.pop(name, None)
    segments: list[Segment] = []
    try:
        lost = _fill(segments, wanted, shell, content)
        filled = [part for part in segments if part.names]
        kept = {name for part in filled for name in part.names}
        order = [name for name in found if name in kept]
        header = {"segments": [part.description() for part in filled], "order": order}
        dump = Dump({**header, **_history(shell)}, filled)
    finally:
        for part in segments:
            part.close()
    if more := len(everything) - len(found):
        lost[f"{more:,} more"] = f"only {MAX_NAMES:,} variables are kept"
    return dump, {
        "size": dump.size,
        "names": order,
        "lost": _gathered(lost),
        "variables": [item for item in described if item["name"] in kept],
    }


def _fill(
    segments: list[Segment], wanted: Mapping[str, Any], shell: Any, content: Mapping[str, Any]
) -> dict[str, str]:
    """Pickle values into new segments, one for all or one for each; the reasons of what failed."""
    from kernel_specs.restricted.pickles import NotebookPickler, stand_in

    namespace = shell.user_ns
    code = "\n".join(shell.history_manager.input_hist_parsed)
    room = Room(content["max_bytes"])

    def add(segment: Segment, value: Any) -> None:
        segment.add(stand_in(value, namespace, code))

    with Watch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempts = Attempts(watch, content["seconds"])
        for name, value in wanted.items():
            if not segments or not content["shared"]:
                segments.append(
                    Segment(room, lambda file, aside: NotebookPickler(file, namespace, aside))
                )
            if attempts.do(name, partial(add, segments[-1], value), value):
                segments[-1].keep(name)
            else:
                segments[-1].undo()
    return attempts.lost


def bring_back(shell: Any, arrival: Arrival, content: Mapping[str, Any]) -> dict[str, Any]:
    """Load a dump into `shell`; `behind` are names stored after one that could not be read.

    Raises KeyboardInterrupt.
    """
    _restore_history(shell, arrival.header)
    values: dict[str, Any] = {}
    behind: list[str] = []
    with Watch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempts = Attempts(watch, content["seconds"])

        def load(name: str, unpickler: pickle.Unpickler) -> None:
            values[name] = unpickler.load()[0]
            if not _RESULT.fullmatch(name):
                shell.user_ns[name] = values[name]

        for segment in arrival.header["segments"]:
            pickles, buffers = arrival.segments.pop(0)
            file = io.BytesIO(pickles)
            pickles.clear()
            unpickler = pickle.Unpickler(file, buffers=buffers)
            names = [name for name in segment["names"] if name not in content["leave"]]
            while names and attempts.do(names[0], partial(load, names[0], unpickler)):
                del names[0]
            behind += names[1:]
    order = [name for name in arrival.header["order"] if name in values]
    for name in order:
        shell.user_ns[name] = shell.user_ns.pop(name)
    _restore_results(shell, values)
    return {"names": order, "lost": attempts.lost, "behind": behind}


def _variables(shell: Any) -> dict[str, Any]:
    """What the user has defined, in order."""
    hidden, missing = shell.user_ns_hidden, object()
    return {
        name: value
        for name, value in list(shell.user_ns.items())
        if type(name) is str
        and len(name) <= MAX_NAME_CHARS
        and not _MANAGED.fullmatch(name)
        and hidden.get(name, missing) is not value
    }


def _results(namespace: dict[str, Any]) -> dict[int, Any]:
    """The values of cells that ended in an expression, by number."""
    results = namespace.get("_oh")
    return dict(results) if isinstance(results, dict) else {}


def _restore_results(shell: Any, values: Mapping[str, Any]) -> None:
    found = {int(name[4:-1]): value for name, value in values.items() if _RESULT.fullmatch(name)}
    shell.user_ns["_oh"].update(found)
    names = {f"_{number}": value for number, value in found.items()}
    for name, number in zip(("_", "__", "___"), sorted(found, reverse=True), strict=False):
        names[name] = found[number]
        setattr(shell.displayhook, name, found[number])
    shell.push(names, interactive=False)


def _history(shell: Any) -> dict[str, Any]:
    """The code of the cells, for tracebacks, `inspect` and `In`."""
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


def _restore_history(shell: Any, header: Mapping[str, Any]) -> None:
    for name, number, text in header["sources"]:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        if number is not None:
            shell.compile._filename_map[name] = number
    manager = shell.history_manager
    manager.input_hist_parsed[:], manager.input_hist_raw[:] = header["inputs"]
    shell.execution_count = header["execution_count"]


def _newest(inputs: list[str]) -> list[str]:
    """All inputs, the oldest ones emptied when together they are too long."""
    left = MAX_SOURCE_CHARS
    kept = []
    for text in reversed(inputs):
        left -= len(text)
        kept.append(text if left >= 0 else "")
    return kept[::-1]


def _result_name(number: int) -> str:
    return f"Out[{number}]"


def _gathered(lost: dict[str, str]) -> dict[str, str]:
    """The reasons, with the results of cells under one name."""
    results = [name for name in lost if _RESULT.fullmatch(name)]
    kept = {name: reason for name, reason in lost.items() if name not in results}
    if results:
        more = ["…"] if len(results) > MAX_RESULTS else []
        kept[", ".join([*results[:MAX_RESULTS], *more])] = lost[results[0]]
    return kept
