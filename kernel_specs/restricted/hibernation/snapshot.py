"""Snapshots: the session's variables dumped by one kernel and loaded by another.

Every variable succeeds or fails by itself, within limits of size and time; a failed one is named
with a reason. The host stores the dump and never parses it.
"""

# The kernel and the shell are traitlets classes, the pickler comes from an untyped library.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_specs.restricted import variables
from kernel_specs.restricted.hibernation.attempt_limits import Attempts, TimeUpError, Watch
from kernel_specs.restricted.hibernation.dumps import Arrival, Dump, Room, Segment
from kernel_specs.restricted.hibernation.loading import left_files
from kernel_specs.restricted.policy.guard import CELL_PREFIX

if TYPE_CHECKING:
    from kernel_specs.restricted.config import BootConfig
    from kernel_specs.restricted.hibernation.loading import Loading

MAX_NAMES = 2000
MAX_TOLD = 20_000
"""Lost names beyond `MAX_NAMES` that a reply lists; it counts the others."""
MAX_NAME_CHARS = 200
MAX_SOURCE_CHARS = 4 * 1024 * 1024
"""Code of cells kept for tracebacks, and as much for history; the newest first."""
LARGE_BYTES = 1024 * 1024
_MANAGED = re.compile(r"__(name|doc|package|loader|spec|builtins?|warningregistry)__")
_OUTPUT = re.compile(r"_{1,3}|_(\d+)")
_INPUT = re.compile(r"_i{1,3}|_i\d+")
"""Names of the user namespace that Python and IPython set themselves."""


class SnapshotRequests:
    """Shell requests of hibernation, answered between cells in the main thread.

    `kernel_mcp_dump_request`       pickle the variables; what was kept and what was not
    `kernel_mcp_dump_part_request`  the next bytes of that dump, as a buffer
    `kernel_mcp_load_part_request`  the next bytes of a dump to load, as a buffer
    `kernel_mcp_load_request`       bring variables back; what came and what did not
    """

    SNAPSHOT_REQUESTS: ClassVar = (
        "kernel_mcp_dump_request",
        "kernel_mcp_dump_part_request",
        "kernel_mcp_load_part_request",
        "kernel_mcp_load_request",
    )
    shell: Any
    session: Any
    boot: BootConfig
    _dump: Dump | None = None
    _arrival: Arrival | None = None
    _loading: Loading | None = None

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
        """Content: that of `Loading.step`, for the first or the next step of what has been sent."""
        reply = _attempted(self._load, parent["content"])
        if not reply.get("left"):
            self._arrival = self._loading = None
        self.session.send(stream, "kernel_mcp_load_reply", reply, parent, ident)

    def _make_dump(self, content: dict[str, Any]) -> dict[str, Any]:
        self._dump, reply = take(self.shell, content)
        return {**reply, "files": left_files(self.boot.tmp)}

    def _load(self, content: dict[str, Any]) -> dict[str, Any]:
        from kernel_specs.restricted.hibernation.loading import Loading

        if self._loading is None:
            if self._arrival is None or not self._arrival.complete:
                raise ValueError("the dump is not complete")
            self._loading = Loading(self.shell, self._arrival)
        return self._loading.step(content)


def _attempted(action: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """The reply of an action, or the reason of its failure."""
    try:
        return {"status": "ok", **(action(argument) or {})}
    except KeyboardInterrupt:
        return {"status": "aborted"}
    except Exception as error:  # noqa: BLE001  # a reply is owed
        return {"status": "error", "reason": f"{type(error).__name__}: {error}"[:1000]}


def take(shell: Any, content: Mapping[str, Any]) -> tuple[Dump, dict[str, Any]]:
    """Pickle the variables of `shell`. Raises KeyboardInterrupt."""
    everything, lost = _variables(shell)
    found = dict(list(everything.items())[:MAX_NAMES])
    beyond = list(everything)[MAX_NAMES:]
    lost |= dict.fromkeys(beyond[:MAX_TOLD], f"only {MAX_NAMES:,} variables are kept")
    if more := len(beyond[MAX_TOLD:]):
        lost[f"{more:,} more"] = f"only {MAX_NAMES:,} variables are kept"
    described = variables.describe(found)["variables"]
    sizes = {item["name"]: item["size"] or 0 for item in described}
    # In order of definition, as loading an object may need earlier ones; large ones last, so that
    # one that does not fit costs no other.
    wanted = dict(sorted(found.items(), key=lambda item: sizes.get(item[0], 0) // LARGE_BYTES))
    wanted |= {_result_name(number): value for number, value in _results(shell.user_ns).items()}
    for name in content["leave"]:
        wanted.pop(name, None)
        lost.pop(name, None)
    segments: list[Segment] = []
    if not content["leave"]:  # a first attempt
        harm = _run_ahead(wanted, shell, content)
        lost |= harm
        wanted = {name: value for name, value in wanted.items() if name not in harm}
    try:
        lost |= _fill(segments, wanted, shell, content)
        filled = [part for part in segments if part.names]
        kept = {name for part in filled for name in part.names}
        order = [name for name in found if name in kept]
        header = {"segments": [part.description() for part in filled], "order": order}
        dump = Dump({**header, **_history(shell)}, filled)
    finally:
        for part in segments:
            part.close()
    return dump, {
        "size": dump.size,
        "names": order,
        "stored": [name for part in filled for name in part.names],
        "copies": [name for part in filled for name in part.copies],
        "lost": lost,
        "variables": [item for item in described if item["name"] in kept],
    }


def _run_ahead(wanted: Mapping[str, Any], shell: Any, content: Mapping[str, Any]) -> dict[str, str]:
    """The names of values that end or block a forked child, with reasons."""
    from kernel_specs.restricted.hibernation import dumps

    def fill(names: Sequence[str], say: Callable[[str], None]) -> None:
        some = {name: wanted[name] for name in names}
        _fill([], some, shell, {**content, "seconds": dumps.SECONDS}, say)

    with Watch() as watch:
        try:
            return watch.run(partial(dumps.harmful, list(wanted), fill), content["seconds"])
        except TimeUpError:
            return {}


def _fill(
    segments: list[Segment],
    wanted: Mapping[str, Any],
    shell: Any,
    content: Mapping[str, Any],
    say: Callable[[str], object] = len,
) -> dict[str, str]:
    """Pickle values into one segment or one each; names that failed, with reasons."""
    from kernel_specs.restricted.hibernation.pickles import NotebookPickler, stand_in

    namespace = shell.user_ns
    code = "\n".join(shell.history_manager.input_hist_parsed)
    room = Room(content["max_bytes"])

    def add(segment: Segment, value: Any) -> None:
        segment.add(stand_in(value, namespace, code))

    with Watch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempts = Attempts(watch, content["seconds"])
        for name, value in wanted.items():
            say(name)
            if not segments or not content["shared"]:
                segments.append(
                    Segment(room, lambda file, aside: NotebookPickler(file, namespace, aside))
                )
            if attempts.do(name, partial(add, segments[-1], value), value):
                segments[-1].keep(name)
            else:
                segments[-1].undo()
    return attempts.lost


def _variables(shell: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The user's variables in order, and names that cannot be kept, with reasons."""
    hidden, missing = shell.user_ns_hidden, object()
    results = _results(shell.user_ns)
    found: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, value in list(shell.user_ns.items()):
        if type(name) is not str or hidden.get(name, missing) is value:
            continue
        if match := _OUTPUT.fullmatch(name):
            number = match[1]
            hook = shell.displayhook
            own = results.get(int(number), missing) if number else getattr(hook, name, missing)
            if own is value:
                continue
        elif _MANAGED.fullmatch(name) or (_INPUT.fullmatch(name) and type(value) is str):
            continue
        if len(name) <= MAX_NAME_CHARS and name.isprintable():
            found[name] = value
        else:
            short = ascii(name[: MAX_NAME_CHARS // 10])[1:-1]
            lost[f"{short}…"] = f"not a name of up to {MAX_NAME_CHARS} printable characters"
    return found, lost


def _results(namespace: dict[str, Any]) -> dict[int, Any]:
    """The values of cells that ended in an expression, by number."""
    results = namespace.get("_oh")
    return dict(results) if isinstance(results, dict) else {}


def _history(shell: Any) -> dict[str, Any]:
    """Code of cells, for tracebacks, `inspect` and `In`."""
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
    """All inputs; the oldest become empty beyond `MAX_SOURCE_CHARS`."""
    left = MAX_SOURCE_CHARS
    kept = []
    for text in reversed(inputs):
        left -= len(text)
        kept.append(text if left >= 0 else "")
    return kept[::-1]


def _result_name(number: int) -> str:
    return f"Out[{number}]"
