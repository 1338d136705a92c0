"""Dump the variables of a shell, for another kernel to load.

Every variable succeeds or fails by itself, within limits of size and time; a failed one is named
with a reason. The host stores the dump and never parses it.
"""

# The shell is a traitlets class, the pickler comes from an untyped library.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kernel_specs.restricted import variables
from kernel_specs.restricted.hibernation import harmful_values
from kernel_specs.restricted.hibernation.attempt_limits import (
    LOOKING,
    Attempts,
    TooLargeError,
    Watch,
)
from kernel_specs.restricted.hibernation.dumps import (
    RESULT,
    ByteBudget,
    DumpBytes,
    Segment,
    copying,
    homes_in_values,
    sharing,
)
from kernel_specs.restricted.hibernation.notebook_pickler import (
    Identities,
    NotebookPickler,
    live_objects,
    stand_in,
)
from kernel_specs.restricted.hibernation.object_reducer import held_by_modules, will_be_another
from kernel_specs.restricted.hibernation.process_state import NAME as SETTING
from kernel_specs.restricted.originals import warnings
from kernel_specs.restricted.policy.guard import CELL_PREFIX

MAX_NAMES = 2000
MAX_REPORTED = 20_000
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


def take(
    shell: Any,
    content: Mapping[str, Any],
    on_progress: Callable[[str], object] = len,
    *,
    ahead: bool = True,
) -> tuple[DumpBytes, dict[str, Any]]:
    """Pickle the variables of `shell`; return dump and report. Raises StoppedError.

    `on_progress` is called with each name before its value is pickled. With `ahead` a forked child
    pickles first, and values that kill or block it are left out.
    """
    everything, lost, hidden = _variables(shell)
    found = dict(list(everything.items())[:MAX_NAMES])
    beyond = list(everything)[MAX_NAMES:]
    lost |= dict.fromkeys(beyond[:MAX_REPORTED], f"only {MAX_NAMES:,} variables are kept")
    if more := len(beyond[MAX_REPORTED:]):
        lost[f"{more:,} more"] = f"only {MAX_NAMES:,} variables are kept"
    described = variables.describe(found, hidden)["variables"]
    sizes = {item["name"]: item["size"] or 0 for item in described}
    # In order of definition, as loading an object may need earlier ones; large ones last, so that
    # one that does not fit costs no other.
    wanted = dict(sorted(found.items(), key=lambda item: sizes.get(item[0], 0) // LARGE_BYTES))
    settings, unread = _settings(shell, content, on_progress)
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
        failed, changed = _fill(segments, wanted, shell, content, on_progress)
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
    shell: Any, content: Mapping[str, Any], on_progress: Callable[[str], object]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that have changed, and reasons by name for those that cannot be read."""
    found: dict[str, Any] = {}
    with Watch() as watch:
        attempts = Attempts(watch, content["seconds"])
        for name, read in shell.process_state.changes():
            if name not in content["leave"]:
                on_progress(name)
                attempts.do(name, partial(_add, found, read))
    return found, attempts.lost


def _add(found: dict[str, Any], read: Callable[[], dict[str, Any]]) -> None:
    found |= read()


def _run_ahead(wanted: Mapping[str, Any], shell: Any, content: Mapping[str, Any]) -> dict[str, str]:
    """Return reasons by name for values that kill or block a forked child."""

    def fill(names: Sequence[str], on_progress: Callable[[str], None]) -> None:
        some = {name: wanted[name] for name in names}
        _fill([], some, shell, {**content, "seconds": harmful_values.SECONDS}, on_progress)

    with Watch() as watch:
        look = partial(harmful_values.harmful, list(wanted), fill, watch.ask)
        return watch.run(look, content["seconds"])


def _fill(
    segments: list[Segment],
    wanted: Mapping[str, Any],
    shell: Any,
    content: Mapping[str, Any],
    on_progress: Callable[[str], object] = len,
) -> tuple[dict[str, str], dict[str, str]]:
    """Pickle values into a segment each, or one for those that share objects.

    Returns reasons by name for values that failed, and for those that will not be equal.
    """
    namespace = shell.user_ns
    code = "\n".join(_newest(shell.history_manager.input_hist_parsed))
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
        on_progress(name)
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
                on_progress(name)
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
    return {**found, **hidden}, _reasons(odd), set(hidden)


def _as_item(key: object) -> str:
    """Return a label for a namespace key that is no variable name: "globals()['a b']"."""
    of_python = type(key) in (int, float, bool, bytes, str)
    return f"globals()[{ascii(key)[: MAX_NAME_CHARS // 10] if of_python else type(key).__name__}]"


def _reasons(odd: list[tuple[str, str]]) -> dict[str, str]:
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
        if type(name) is str and name.startswith(CELL_PREFIX) and len(entry) == 4
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


def _newest(inputs: list[Any]) -> list[str]:
    """Return all inputs; "" stands for no text, and for the oldest beyond `MAX_SOURCE_CHARS`."""
    left = MAX_SOURCE_CHARS
    kept = []
    for each in reversed(inputs):
        text = each if type(each) is str else ""
        left -= len(text)
        kept.append(text if left >= 0 else "")
    return kept[::-1]


def _result_name(number: int) -> str:
    return f"Out[{number}]"
