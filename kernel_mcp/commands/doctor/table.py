"""The report of the doctor: for a person and for a program."""

from __future__ import annotations

from typing import Any

from kernel_mcp.commands.doctor.examine import Diagnosis, Examination

_MARKS = {"ok": "ok", "gap": "gap", "fails": "FAILS"}
_COLOURS = {"ok": "32", "gap": "33", "fails": "31"}
FOUND_CHARS = 100


def as_text(diagnosis: Diagnosis, *, colour: bool) -> str:
    """A table for each backend, then what a server would do."""
    lines = [f"{name:11} {version}" for name, version in diagnosis.versions.items()]
    for examination in diagnosis.examinations:
        lines += ["", *_section(examination, colour=colour)]
    lines += ["", *_verdict(diagnosis)]
    return "\n".join(lines)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same for programs."""
    return {
        "holds": diagnosis.holds,
        "used": diagnosis.used,
        "refusal": diagnosis.refusal,
        "problem": diagnosis.problem,
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


def _verdict(diagnosis: Diagnosis) -> list[str]:
    lines = [diagnosis.problem] if diagnosis.problem else []
    if not diagnosis.used:
        return [*lines, "A server with these flags would not start:", *_indented(diagnosis.refusal)]
    holds = "which holds" if diagnosis.holds else "which does not hold"
    return [*lines, f"A server with these flags uses {diagnosis.used}, {holds}."]


def _bullets(texts: tuple[str, ...]) -> list[str]:
    return [f"    - {text}" for text in texts]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= FOUND_CHARS else f"{line[: FOUND_CHARS - 1]}…"
