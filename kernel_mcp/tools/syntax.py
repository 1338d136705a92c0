"""The work of check_syntax: what a session would find in code that it does not run."""

from __future__ import annotations

import anyio

from kernel_mcp.environments.metadata import modules_of
from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.factory import KernelRequest
from kernel_mcp.packages.lines import plan
from kernel_mcp.packages.requirements import Problem
from kernel_mcp.policy import Kind, Report
from kernel_mcp.policy.check import own_modules
from kernel_mcp.policy.source import line_of_key
from kernel_mcp.sessions.introspection import variables_of
from kernel_mcp.sessions.session import Session
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools.models import DiagnosticModel, ImportModel, SyntaxReport

CHECK_S = 5.0
"""Seconds that a kernel has to parse code."""


async def judged(
    services: ToolContext, session: Session, code: str, dependencies: list[str], python: str
) -> Report:
    """Check code as `execute` would, and return the report; nothing is run.

    With `dependencies`, `python` or metadata in the code it is checked as a script of `run_script`.
    """
    planned = await anyio.to_thread.run_sync(plan, code, services.installer.rules)
    problems = [Problem(planned.line, planned.problem)] if planned.problem else []
    request, modules = session.request, planned.modules
    kind: Kind = "install"
    names: frozenset[str] | None = frozenset()
    own: frozenset[str] = frozenset()
    if dependencies or python or line_of_key(code, "dependencies"):
        needs, unfit = await services.scripts.judge(code, dependencies, python)
        request = KernelRequest("", request.workspace, needs.python, needs.packages)
        modules += modules_of(each.name for each in needs.packages)
        problems += unfit
        kind = "pep723"
        version = needs.python
    else:
        names = await _known_names(session)
        own = own_modules(session.workspace.module_folders)
        version = services.factory.version(session.request)
    report = await services.manager.checks.check(
        planned.code,
        services.factory.policy(request).with_modules(modules),
        known_names=names,
        own_modules=own,
        python=version,
    )
    for each in problems:
        report = report.with_error(kind, each.reason, each.line, code)
    return report


async def checked_by_kernel(session: Session, code: str) -> Report:
    """Return what the session's kernel finds in code that it does not run."""
    kernel = await session.ensure_kernel()
    found = await kernel.check_syntax(code, CHECK_S)
    if found is None:
        return Report(valid=True)
    line, column, message = found
    line = min(line, len(code.splitlines()) or 1)
    return Report(valid=False).with_error("syntax", message, line, code, max(1, column))


async def _known_names(session: Session) -> frozenset[str] | None:
    """Return the names of the session's variables; None if they cannot all be listed."""
    try:
        found = await variables_of(session)
    except LaunchError:
        return None
    if found["omitted"]:
        return None
    return frozenset(item["name"] for item in found["variables"])


def syntax_report(session: Session, report: Report) -> SyntaxReport:
    """Return the answer of check_syntax."""
    return SyntaxReport(
        session=session.handle,
        valid=report.valid,
        diagnostics=[
            DiagnosticModel(
                severity=item.severity,
                kind=item.kind,
                message=item.message,
                line=item.line,
                column=item.column,
                source_line=item.source_line,
            )
            for item in report.diagnostics
        ],
        imports=[
            ImportModel(name=item.name, line=item.line, allowed=item.allowed)
            for item in report.imports
        ],
        summary=report.render(),
    )
