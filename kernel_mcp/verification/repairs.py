"""Ways to put cells back as they ran, each of which names one cause of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernel_mcp.records import dataclass
from kernel_mcp.verification.names import DataFlow, flow_of
from kernel_mcp.verification.steps import Log, Step

SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Repair:
    """Cells that may give the original; `cause` (a value of `Cause`) and `text` if they do."""

    cause: str
    text: str
    steps: list[Step]


def repairs(steps: Sequence[Step], place: int, log: Log, flow: DataFlow) -> list[Repair]:
    """Return the repairs for the cell at `place`, those that are nearest by data flow first."""
    near = flow.before(place)
    edited = _edited(steps, log)
    found = [_unedited(steps, at, edited[at]) for at in reversed(near) if at in edited]
    found += _put_back(steps, place, log, flow)
    if (ordered := _ordered(steps, place)) is not None:
        found.append(ordered)
    if len(edited) > 1:
        before = [edited.get(at, each) for at, each in enumerate(steps)]
        which = ", ".join(steps[at].name for at in edited)
        found.append(Repair("edited", f"Edited since they ran: {which}.", before))
    return found


def _edited(steps: Sequence[Step], log: Log) -> dict[int, Step]:
    """Return the steps as they ran that were edited since, by place."""
    found = {}
    for place, step in enumerate(steps):
        logged = log.of(step.number)
        if logged is not None and logged.source.strip() != step.source.strip():
            found[place] = replace(step, source=logged.source)
    return found


def _unedited(steps: Sequence[Step], at: int, then: Step) -> Repair:
    changed = [*steps[:at], then, *steps[at + 1 :]]
    text = (
        f"{then.name.capitalize()} was `{changed_line(then.source, steps[at].source)}` when it ran "
        f"as In[{then.number}]; it was edited since and not run again."
    )
    return Repair("edited", text, changed)


def _put_back(steps: Sequence[Step], place: int, log: Log, flow: DataFlow) -> list[Repair]:
    """Return repairs by cells of the log that are not in the notebook, the latest first."""
    there = {each.number for each in steps}
    until = steps[place].number
    wanted = {name for at in flow.before(place) for name in flow.flows[at].uses}
    found = []
    for gone in reversed(log.until(until - 1)):
        own = flow_of(gone.source)
        if gone.number in there:
            continue
        if not (own.binds | own.uses) & wanted:
            continue
        missing = replace(gone, outputs=None)
        cause, text = _words(steps, gone)
        behind = next((at for at, each in enumerate(steps) if each.number > gone.number), place)
        places = dict.fromkeys((min(behind, place), place))
        found += [Repair(cause, text, [*steps[:at], missing, *steps[at:]]) for at in places]
    return found


def _words(steps: Sequence[Step], gone: Step) -> tuple[str, str]:
    line = first_line(gone.source)
    same = next((each for each in steps if each.source.strip() == gone.source.strip()), None)
    if same is not None:
        return "repeated", f"{same.name.capitalize()} ran more than once, also as {gone.name}."
    names = flow_of(gone.source).binds
    again = next(
        (
            each
            for each in steps
            if each.number > gone.number and names and names <= flow_of(each.source).binds
        ),
        None,
    )
    if again is not None:
        text = (
            f"{again.name.capitalize()} was `{line}` when it ran as {gone.name}; it was edited and "
            "run again since."
        )
        return "edited", text
    return "deleted", f"{gone.name}, `{line}`, ran before it and is not in the notebook."


def _ordered(steps: Sequence[Step], place: int) -> Repair | None:
    """Return the cells in the order in which they ran; None if that is the notebook's."""
    run = sorted((each for each in steps if each.number), key=lambda each: each.number)
    if not steps[place].number or run == [each for each in steps if each.number]:
        return None
    at = next(n for n, (one, other) in enumerate(zip(run, steps, strict=False)) if one != other)
    text = f"The cells ran in another order: {run[at].name} (In[{run[at].number}]) ran before "
    after = next(each for each in run[at + 1 :] if steps.index(each) < steps.index(run[at]))
    return Repair("order", f"{text}{after.name} (In[{after.number}]).", run)


def first_line(source: str) -> str:
    """Return the first line of code, in short."""
    return source.strip().partition("\n")[0][:SHOWN_CHARS]


def changed_line(then: str, now: str) -> str:
    """Return the first line of `then` that `now` has not, in short."""
    there = {line.strip() for line in now.splitlines()}
    lost = [
        line.strip() for line in then.splitlines() if line.strip() and line.strip() not in there
    ]
    return lost[0][:SHOWN_CHARS] if lost else first_line(then)
