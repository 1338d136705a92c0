"""Find out whether cells reproduce, and if not, why: by replays, each of which tests one cause.

A cause is named only if a replay or a record shows it. The order of the replays:

1. a new interpreter with another hash seed, folders listed in another order. Equal: reproduced
2. a fork with the original's hash seed. Equal: the result depends on that seed, or on that order.
   Equal to neither: two replays with all seeds fixed, then with one changed at a time. If those two
   differ it is chance, the clock, threads or the network
3. if both give the same, and not the original: the cells of the log put back, one by one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernel_mcp.launch.base import Replay
from kernel_mcp.sessions.cell import Status
from kernel_mcp.verification import names
from kernel_mcp.verification.names import DataFlow, flow_of
from kernel_mcp.verification.repairs import Repair, repairs
from kernel_mcp.verification.replay import Repeated, Repeats, Run
from kernel_mcp.verification.report import Cause, Report, Verdict, counted, notes, results_of
from kernel_mcp.verification.steps import Log, Step
from kernel_specs.restricted.config import HOST, NETWORK, READ_ONLY

OTHER_ORDER = 7
"""Seed of the order in which replays list folders."""
SEED = 20
"""Seed of the generators in the replays that test whether they are the cause."""
MOST_REPAIRS = 8
_OF_TOOLS = ("tools", "mcp_tools")
"""Modules by which code calls tools."""
_OF_NETWORK = ("URLError", "ConnectError", "ConnectionError", "ConnectionRefusedError", "gaierror")
"""Exceptions of code that cannot connect."""
COLD = Replay(cold=True, shuffle=OTHER_ORDER)
FORKED = Replay(cold=False)
FIXED = Replay(cold=False, seed=SEED, hashes=SEED)
_BY_CHANCE = {
    names.OF_RANDOM: Cause.GENERATOR,
    names.OF_NUMPY: Cause.GENERATOR,
    names.UNSEEDED: Cause.GENERATOR,
    names.ENTROPY: Cause.ENTROPY,
    names.CLOCK: Cause.CLOCK,
    names.THREADS: Cause.THREADS,
    names.NETWORK: Cause.NETWORK,
}


class Judge:
    """Judges `steps` by replays; `changed` are files that differ from what the cells have read."""

    def __init__(
        self, steps: Sequence[Step], log: Log, repeat: Repeats, changed: dict[str, str]
    ) -> None:
        """`changed` has the reason for each path, such as "has changed"."""
        self._steps = [each for each in steps if not each.omitted]
        self._all = list(steps)
        self._log = log
        self._repeat = repeat
        self._changed = changed
        self._flow = DataFlow([each.source for each in self._steps])

    @property
    def steps(self) -> Sequence[Step]:
        """All cells, those included that are not repeated."""
        return self._all

    async def report(self) -> Report:
        """Return the verdict. Raises KernelMcpError if no kernel can be started."""
        run = await self._repeat(self._steps, COLD)
        seed = run.cells[-1].record.get("seed") if run.cells else None
        return replace(await self._report(run), seed=seed if isinstance(seed, int) else 0)

    async def _report(self, run: Run) -> Report:
        results = results_of(self._all, run)
        same, most = counted(results)
        place = run.first_difference
        if place is None:
            text = f"Reproduced: {same} of {most} cells, with another hash seed.{notes(results)}"
            return Report(Verdict.REPRODUCED, text, cells=results)
        found = await self._judged(run, place)
        left = sum(not each.same and not each.note for each in results) - 1
        more = f" {left} more cell{'s differ' if left > 1 else ' differs'}." if left > 0 else ""
        return replace(found, text=f"{found.text}{more}{notes(results)}", cells=results)

    async def _judged(self, run: Run, place: int) -> Report:
        there = run.cells[place]
        if there.broke and (found := await self._failed(run, place)) is not None:
            return found
        again = await self._repeat(self._steps, FORKED)
        first = again.first_difference
        if first is not None and first < place:
            return await self._by_chance(again, first)
        as_then = first is None or first > place
        if as_then:
            return await self._fragile(run, place)
        if not _agree(run, again, place):
            return await self._by_chance(run, place)
        return await self._hidden(run, place)

    # Cells that did not end as the original.

    async def _failed(self, run: Run, place: int) -> Report | None:
        """Return the cause of an end that the exception itself names; None if it names none."""
        there = run.cells[place]
        name, failure = there.step.name, there.failure
        if there.status is Status.TIMEOUT:
            text = f"{name} was stopped: it took more than three times as long as then."
            return Report(Verdict.FAILED, text, Cause.TIME_LIMIT, name)
        if failure is None:
            return None
        head = f"Does not run from the top: {name}"
        if there.missing in (NETWORK, HOST) or (
            failure.name in _OF_NETWORK and not there.step.failed and self._connects(place)
        ):
            text = f"Not repeated: {name} needs the network, closed in replays (--open network)."
            return Report(Verdict.FAILED, text, Cause.NETWORK, name)
        if there.missing == READ_ONLY:
            text = f"Not repeated: {name} writes to a mount, read-only in replays (--open mounts)."
            return Report(Verdict.FAILED, text, Cause.READ_ONLY, name)
        if failure.name == "NameError" and (missing := _quoted(failure.value)):
            return await self._undefined(head, missing, place)
        if failure.name in ("ModuleNotFoundError", "FileNotFoundError") and (
            restored := await self._restored(run, place)
        ):
            return restored
        if failure.name == "ModuleNotFoundError" and _quoted(failure.value) in _OF_TOOLS:
            text = f"Not repeated: {name} calls tools, closed in replays (--open tools)."
            return Report(Verdict.FAILED, text, Cause.TOOLS, name)
        if failure.name == "ModuleNotFoundError":
            text = f"{head} imports {_quoted(failure.value)!r}, which this environment lacks."
            return Report(Verdict.FAILED, text, Cause.ENVIRONMENT, name)
        if failure.name == "FileNotFoundError" and not there.step.failed:
            path = _quoted(failure.value)
            text = f"{head} reads {path!r}, which is not there any more."
            return Report(Verdict.FAILED, text, Cause.FILE_MISSING, name)
        return None

    def _connects(self, place: int) -> bool:
        """Return True if a cell, or one that it depends on, calls a library of the network."""
        near = self._flow.before(place)
        return any(names.NETWORK in names.chance(self._flow, each) for each in near)

    async def _undefined(self, head: str, missing: str, place: int) -> Report | None:
        """Return who defined a name that a replay lacks."""
        name = self._steps[place].name
        later = [
            each
            for each, flow in zip(self._steps, self._flow.flows, strict=True)
            if missing in flow.binds and each is not self._steps[place]
        ]
        numbers = [each.number for each in self._log.steps]
        before = self._steps[place].number or max(numbers, default=0)
        logged = [
            each
            for each in self._log.steps
            if each.number <= before and missing in flow_of(each.source).binds
        ]
        if later and self._steps.index(later[0]) > place:
            text = f"{head} needs `{missing}`, which {later[0].name} defines below it."
            return Report(Verdict.FAILED, text, Cause.ORDER, name)
        if not logged:
            if not self._log.steps:
                text = f"{head} needs `{missing}`, which no cell of the notebook defines."
                return Report(Verdict.FAILED, text, Cause.NEVER_DEFINED, name)
            return None
        by = logged[-1]
        kept = next((each for each in self._steps if each.number == by.number), None)
        if kept is not None:
            text = (
                f"{head} needs `{missing}`. {_capital(kept.name)} was `{_line(by)}` when it ran as "
                f"{by.name}; it was edited since."
            )
            return Report(Verdict.FAILED, text, Cause.EDITED, name)
        if by.number < self._log.first:
            text = (
                f"{head} needs `{missing}`, which {by.name} of an earlier kernel has defined; "
                "that is not in the notebook."
            )
            return Report(Verdict.FAILED, text, Cause.EARLIER_KERNEL, name)
        text = f"{head} needs `{missing}`, defined by {by.name}, which is not in the notebook."
        return Report(Verdict.FAILED, text, Cause.DELETED, name)

    # Cells that gave something else.

    async def _fragile(self, run: Run, place: int) -> Report:
        name = self._steps[place].name
        shuffled = await self._repeat(self._steps, replace(FORKED, shuffle=OTHER_ORDER))
        first = shuffled.first_difference
        if first is not None and first <= place:
            text = f"Fragile: {name} depends on the order of a folder's listing{_of(run, place)}."
            return Report(Verdict.FRAGILE, f"{text} `sorted` fixes it.", Cause.FOLDER_ORDER, name)
        one, two = [await self._repeat(self._steps, FIXED) for _ in range(2)]
        other = await self._repeat(self._steps, replace(FIXED, hashes=SEED + 1))
        if _agree(one, two, place) and not _agree(one, other, place):
            text = f"Fragile: {name} depends on the hash seed{_of(run, place)}."
            return Report(Verdict.FRAGILE, f"{text} `sorted` fixes it.", Cause.HASH_SEED, name)
        text = f"Differs from {name}{_of(run, place)}, by its process. Cause not found."
        return Report(Verdict.DIFFERS, text, Cause.UNKNOWN, name)

    async def _by_chance(self, run: Run, place: int) -> Report:
        name = self._steps[place].name
        head = f"Differs by chance from {name}{_of(run, place)}"
        sources = {
            each: at
            for at in reversed(self._flow.before(place))
            for each in names.chance(self._flow, at)
        }
        first, second = [await self._repeat(self._steps, FIXED) for _ in range(2)]
        if _agree(first, second, place):
            return await self._of_seed(head, place, first, sources)
        causes = {_BY_CHANCE[each] for each in sources}
        if len(causes) == 1:
            source, at = next(iter(sources.items()))
            of = "" if at == place else f", in {self._steps[at].name}"
            return Report(
                Verdict.DIFFERS, f"{head}. Cause: {source}{of}.", _BY_CHANCE[source], name
            )
        maybe = f" It uses {' and '.join(sorted(sources))}." if sources else ""
        return Report(Verdict.DIFFERS, f"{head}. Cause not found.{maybe}", Cause.UNKNOWN, name)

    async def _of_seed(self, head: str, place: int, fixed: Run, sources: dict[str, int]) -> Report:
        """Return a report on what two replays had in common that gave the same."""
        name = self._steps[place].name
        if not _agree(fixed, await self._repeat(self._steps, replace(FIXED, seed=SEED + 1)), place):
            return self._of_generator(head, name, fixed, place, sources)
        for other, cause, what in (
            (replace(FIXED, hashes=SEED + 1), Cause.HASH_SEED, "the hash seed"),
            (replace(FIXED, shuffle=OTHER_ORDER), Cause.FOLDER_ORDER, "the order of a folder"),
        ):
            if not _agree(fixed, await self._repeat(self._steps, other), place):
                text = f"Fragile: {name} depends on {what}. `sorted` fixes it."
                return Report(Verdict.FRAGILE, text, cause, name)
        return Report(Verdict.DIFFERS, f"{head}. Cause not found.", Cause.UNKNOWN, name)

    def _of_generator(
        self, head: str, name: str, run: Run, place: int, sources: dict[str, int]
    ) -> Report:
        """Return a report on a global generator: two replays with the same seed were equal."""
        used = [each for each in (names.OF_RANDOM, names.OF_NUMPY) if each in sources]
        at = min((sources[each] for each in used), default=place)
        for earlier in self._flow.before(place):
            drawn = run.cells[earlier].record.get("random")
            if isinstance(drawn, list) and drawn:
                at, used = earlier, [names.OF_NUMPY if "numpy" in drawn else names.OF_RANDOM]
                break
        which = " and ".join(used) or "a global generator"
        seed = "numpy.random.seed(0)" if which == names.OF_NUMPY else "random.seed(0)"
        text = f"{head}. Cause: {which}, unseeded in {self._steps[at].name}; `{seed}` fixes it."
        return Report(Verdict.DIFFERS, text, Cause.GENERATOR, name)

    async def _hidden(self, run: Run, place: int) -> Report:
        name = self._steps[place].name
        head = f"Differs from {name}{_of(run, place)}"
        if run.cells[place].broke:
            head = f"Does not run from the top: {name} fails with {_of_failure(run.cells[place])}"
        verdict = Verdict.FAILED if run.cells[place].broke else Verdict.DIFFERS
        if found := await self._restored(run, place, head=head):
            return found
        near = self._flow.before(place)
        for path, why in self._changed.items():
            readers = [each for each in near if _reads(self._steps[each], path)]
            if readers:
                by = self._steps[readers[-1]].name
                text = f"{head}. `{path}` {why} since {by} read it."
                return Report(verdict, text, Cause.FILE_CHANGED, name)
        if whole := await self._whole_log(place):
            return Report(verdict, f"{head}. {whole[1]}", whole[0], name)
        return Report(verdict, f"{head}. Cause not found.", Cause.UNKNOWN, name)

    async def _restored(self, run: Run, place: int, head: str = "") -> Report | None:
        """Return the report on the first cell of the log that, put back, gives the original."""
        step, there = self._steps[place], run.cells[place]
        head = head or f"Does not run from the top: {step.name}"
        verdict = Verdict.FAILED if there.broke else Verdict.DIFFERS
        for repair in repairs(self._steps, place, self._log, self._flow)[:MOST_REPAIRS]:
            if await self._gives(repair, step):
                return Report(verdict, f"{head}. {repair.text}", Cause(repair.cause), step.name)
        return None

    async def _gives(self, repair: Repair, step: Step) -> bool:
        """Return True if the cell gives the original in the repaired order of cells."""
        run = await self._repeat(repair.steps, COLD)
        done = next((each for each in run.cells if each.step.name == step.name), None)
        return done is not None and done.difference is None and not done.broke

    async def _whole_log(self, place: int) -> tuple[Cause, str] | None:
        """Return cause and text if all cells of the log, as they ran, give the original."""
        step = self._steps[place]
        logged = self._log.until(step.number) if step.number else []
        if not logged or logged[-1].number != step.number:
            return None
        run = await self._repeat(logged, COLD)
        if len(run.cells) < len(logged) or run.cells[-1].difference is not None:
            return None
        there = {each.number for each in self._steps}
        gone = [each for each in logged if each.number not in there]
        wanted = {name for at in self._flow.before(place) for name in self._flow.flows[at].uses}
        near = [
            each for each in gone if (f := flow_of(each.source)).binds & wanted or f.uses & wanted
        ]
        if not near:
            return Cause.UNKNOWN, "The log gives it; which of its cells was not found."
        named = ", ".join(each.name for each in near[:5])
        sources = {each.source.strip() for each in self._steps}
        if all(each.source.strip() in sources for each in near):
            return Cause.REPEATED, f"Cells ran more often than once, also as {named}."
        return Cause.DELETED, f"{named} ran before it and are not in the notebook."


def _agree(one: Run, other: Run, place: int) -> bool:
    """Return True if two replays gave the same up to a place."""
    return Run(one.cells[: place + 1]).agrees(Run(other.cells[: place + 1]))


def _reads(step: Step, path: str) -> bool:
    files = step.record.get("files")
    return isinstance(files, list) and any(each[0] == path for each in files)


def _of(run: Run, place: int) -> str:
    """Return the values of the first difference, after a colon; empty for none."""
    found = run.cells[place].difference
    if found is None:
        return ""
    return f": {found.before or 'nothing'} → {found.after or 'nothing'}"


def _of_failure(there: Repeated) -> str:
    return "no exception" if there.failure is None else f"{there.failure.name}"


def _quoted(text: str) -> str:
    """Return the last text in single quotes; empty for none."""
    parts = text.split("'")
    return parts[-2] if len(parts) > 2 else ""


def _line(step: Step) -> str:
    return step.source.strip().partition("\n")[0][:60]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
