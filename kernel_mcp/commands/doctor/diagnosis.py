"""The diagnosis of a machine, as text for people or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import SandboxReport
from kernel_mcp.sandbox.remedies import for_cgroups
from kernel_mcp.sandbox.self_test import Check

UNCOUNTED = "immortal objects, which save each session 5 MiB, are off"
"""Remark on a version of Python; it is shown even if only problems are."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings on one backend; `problem` says why it is unusable."""

    backend: str
    problem: str = ""
    checks: tuple[Check, ...] = ()
    report: SandboxReport | None = None

    def state(self, check: Check) -> str:
        """Return `ok`, `fails`, `untried`, or `gap` for what the backend does not promise."""
        if check.passed:
            return "ok"
        if self.report is not None and check.name in self.report.unpromised:
            return "gap"
        return "fails" if check.tried else "untried"

    @property
    def holds(self) -> bool:
        """True if this backend enforces something, and all that it promises is in force."""
        return self.confines and all(self.state(check) in ("ok", "gap") for check in self.checks)

    @property
    def confines(self) -> bool:
        """True if this backend promises anything."""
        return self.report is not None and bool(self.report.enforced)

    @property
    def untried(self) -> bool:
        """True if it is not known whether it holds: all that is wrong could not be tried."""
        states = {self.state(check) for check in self.checks}
        return self.confines and "untried" in states and "fails" not in states


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All examinations; `used` is the server's backend, `refusal` the reason why it has none.

    `problem` is the reason why no backend could start a kernel. `policy` says what code may do,
    `variables` what it finds in its environment. `attached` are external kernels, which no sandbox
    confines. `kernels` are trials of those that `--kernel` names. `tools` are the tool servers.
    """

    versions: dict[str, str]
    examinations: tuple[Examination, ...]
    used: str
    refusal: str = ""
    problem: str = ""
    policy: str = ""
    missing: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    kernels: tuple[Check, ...] = ()
    tools: tuple[str, ...] = ()

    @property
    def advice(self) -> list[str]:
        """Steps by which the user can resolve the problems found."""
        found = list(self.missing)
        report = next(
            (each.report for each in self.examinations if each.backend == self.used), None
        )
        if report is not None and any(gap.startswith("no cgroup") for gap in report.gaps):
            found.append(for_cgroups())
        told = [line for each in self.examinations for line in each.problem.splitlines()]
        return [*found, *(line for line in self.refusal.splitlines() if line not in told)]

    @property
    def holds(self) -> bool:
        """True if the server's backend holds and kernels start, those of `--kernel` too."""
        return self.confines and all(each.passed for each in self.kernels)

    @property
    def confines(self) -> bool:
        """True if the server's backend holds and its own kernels start."""
        found = (item for item in self.examinations if item.backend == self.used)
        return not self.problem and any(item.holds for item in found)


_MARKS = {"ok": "ok", "gap": "gap", "fails": "FAILS", "untried": "?"}
_COLOURS = {"ok": "32", "gap": "33", "fails": "31", "untried": "33"}
FOUND_CHARS = 100


def as_text(diagnosis: Diagnosis, *, colour: bool, verbose: bool = False) -> str:
    """Return the problems, or with `verbose` everything, as text; the verdict is the last line."""
    parts = [[f"{name:11} {version}" for name, version in diagnosis.versions.items()]]
    parts += [_section(each, colour=colour) for each in diagnosis.examinations]
    parts.append([*_about(diagnosis), *_verdict(diagnosis)])
    if not verbose:
        parts = [
            [line for line in parts[0] if UNCOUNTED in line],
            *(_unwell(each, diagnosis, colour=colour) for each in diagnosis.examinations),
            *([[diagnosis.problem]] if diagnosis.problem else []),
            _tools(diagnosis),
            _kernels(diagnosis),
            _verdict(diagnosis),
        ]
    if diagnosis.advice:
        parts.insert(-1, ["What you can do:", *_bullets(diagnosis.advice)])
    return "\n\n".join("\n".join(part) for part in parts if part)


def _unwell(examination: Examination, diagnosis: Diagnosis, *, colour: bool) -> list[str]:
    """Return the problem or the failed checks of one backend; [] when another backend is used."""
    if diagnosis.used and examination.backend != diagnosis.used:
        return []
    if examination.problem:
        return _section(examination, colour=colour)
    states = ("fails", "untried")
    failed = [each for each in examination.checks if examination.state(each) in states]
    return _section(replace(examination, checks=tuple(failed)), colour=colour) if failed else []


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the whole diagnosis as JSON values."""
    return {
        "holds": diagnosis.holds,
        "used": diagnosis.used,
        "refusal": diagnosis.refusal,
        "problem": diagnosis.problem,
        "policy": diagnosis.policy,
        "variables": list(diagnosis.variables),
        "attached": list(diagnosis.attached),
        "tools": list(diagnosis.tools),
        "kernels": [
            {"name": each.name, "holds": each.passed, "found": each.found}
            for each in diagnosis.kernels
        ],
        "advice": diagnosis.advice,
        "versions": diagnosis.versions,
        "backends": [_backend(item) for item in diagnosis.examinations],
    }


def _backend(examination: Examination) -> dict[str, Any]:
    report = examination.report
    return {
        "backend": examination.backend,
        "holds": examination.holds,
        "problem": examination.problem,
        "enforced": list(report.enforced) if report else [],
        "gaps": list(report.gaps) if report else [],
        "checks": [
            {
                "name": check.name,
                "state": examination.state(check),
                "found": check.found,
                "remedy": "" if check.passed else check.remedy,
            }
            for check in examination.checks
        ],
    }


def _section(examination: Examination, *, colour: bool) -> list[str]:
    if examination.problem:
        return [f"{examination.backend}: cannot be used", *_indented(examination.problem)]
    verdict = "holds" if examination.holds else "does NOT hold"
    if examination.untried:
        verdict = "could not be tried"
    if examination.report is not None and not examination.report.enforced:
        verdict = "is no boundary"
    lines = [f"{examination.backend}: {verdict}"]
    width = max(len(check.name) for check in examination.checks)
    for check in examination.checks:
        state = examination.state(check)
        found = "" if state == "ok" and check.found == "none" else _cut(check.found)
        mark = f"{_MARKS[state]:5}"
        if colour:
            mark = f"\x1b[{_COLOURS[state]}m{mark}\x1b[0m"
        lines.append(f"  {mark} {check.name:{width}}  {found}".rstrip())
        if state == "fails" and examination.report is not None and examination.report.enforced:
            lines.append(f"        what to do: {check.remedy}")
    if examination.report is not None and examination.report.gaps:
        lines += ["  does not protect from:", *_bullets(examination.report.gaps)]
    return lines


def _about(diagnosis: Diagnosis) -> list[str]:
    """Return lines on the problem, the policy, the variables and the attachable kernels."""
    lines = [diagnosis.problem] if diagnosis.problem else []
    if diagnosis.used and diagnosis.policy:
        lines.append(f"Policy {diagnosis.policy}")
    if diagnosis.used and diagnosis.variables:
        lines.append(f"Code reads the variables {', '.join(diagnosis.variables)}.")
    if diagnosis.used and diagnosis.attached:
        lines += ["Outside any sandbox, sessions may join:", *_bullets(diagnosis.attached)]
    return [*lines, *_tools(diagnosis), *_kernels(diagnosis)]


def _tools(diagnosis: Diagnosis) -> list[str]:
    """Return lines on the tool servers, whose programs run outside the sandbox."""
    if not diagnosis.used or not diagnosis.tools:
        return []
    return ["Outside any sandbox, code calls tools of:", *_bullets(diagnosis.tools)]


def _kernels(diagnosis: Diagnosis) -> list[str]:
    """Return a line for each kernel of `--kernel`, and a remedy for each that failed."""
    lines = []
    for each in diagnosis.kernels:
        lines.append(f"{'ok   ' if each.passed else 'FAILS'} {each.name}: {each.found}")
        lines += [] if each.passed else [f"      what to do: {each.remedy}"]
    return lines


def _verdict(diagnosis: Diagnosis) -> list[str]:
    """Return the verdict, one sentence."""
    if not diagnosis.used:
        return ["A server with these flags would not start, as none of these can be used."]
    holds = "which holds" if diagnosis.confines else "which does not hold"
    if any(each.untried for each in diagnosis.examinations if each.backend == diagnosis.used):
        holds = "of which not everything could be tried here"
    return [f"A server with these flags uses {diagnosis.used}, {holds}."]


def _bullets(texts: Sequence[str]) -> list[str]:
    return [f"    - {text}" for text in texts]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= FOUND_CHARS else f"{line[: FOUND_CHARS - 1]}…"
