"""From the server's own values to the structured results of tools."""

from __future__ import annotations

import platform

from kernel_mcp import __version__
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import MIB
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.policy import Policy, Report
from kernel_mcp.sandbox.base import Sandbox, SandboxReport
from kernel_mcp.sessions.session import Session
from kernel_mcp.tools.models import (
    DiagnosticModel,
    ImportModel,
    LimitsModel,
    ServerInfo,
    SessionState,
    SyntaxReport,
)
from kernel_mcp.tools.telling import names_of, spoken

FIRST_LINE_CHARS = 80


def state(session: Session, now: float) -> SessionState:
    """One line of `list_sessions`; `now` is a time of the session's clock."""
    current, kernel = session.current, session.kernel
    usage = kernel.handle.usage() if kernel is not None else None
    running_s = None
    if current is not None and current.started is not None:
        running_s = round(now - current.started, 3)
    return SessionState(
        session=session.handle,
        name=session.name,
        state=session.state,
        age_s=round(now - session.created, 3),
        idle_s=0.0 if session.state == "busy" else round(now - session.last_used, 3),
        memory_mb=round(usage.memory_bytes / MIB, 1) if usage else 0.0,
        python=kernel.environment.version if kernel is not None else "",
        cells=len(session.cells),
        queued=session.queued,
        running_cell=current.number if current is not None else None,
        running_s=running_s,
        last_cell=_last_cell(session),
        notices=[spoken(each.text) for each in session.ledger.pending],
        lost=names_of(each.loss for each in session.ledger.pending if each.loss is not None),
    )


def _last_cell(session: Session) -> str:
    if not session.cells:
        return ""
    cell = session.cells[-1]
    line = cell.code.strip().splitlines()[0]
    shown = line if len(line) <= FIRST_LINE_CHARS else line[: FIRST_LINE_CHARS - 1] + "…"
    return f"{cell.number} [{cell.status.value}] {shown}"


def syntax(session: Session, report: Report) -> SyntaxReport:
    """The answer of `check_syntax`."""
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


def server(
    session: Session,
    environment: KernelEnvironment,
    policy: Policy,
    *,
    sandbox: Sandbox,
    report: SandboxReport,
    refusal: str,
    settings: Settings,
    audit: str,
) -> ServerInfo:
    """The answer of `info`; `refusal` is why kernels are not forked from a template, if so."""
    found = list(session.kernel.handle.boundary) if session.kernel is not None else []
    if refusal:
        found.append(f"kernels are not forked, as their template was refused: {refusal}")
    limits = settings.limits
    folder = session.demand.workspace
    return ServerInfo(
        session=session.handle,
        server_version=__version__,
        python=environment.version,
        platform=f"{platform.system()} {platform.machine()}",
        packages=list(environment.packages),
        allowed_imports=["*"] if policy.allow_all else sorted(policy.modules),
        sandbox=report.backend,
        sandbox_enforces=list(report.enforced),
        sandbox_gaps=list(report.gaps),
        sandbox_found=found,
        audit_log=audit,
        limits=LimitsModel(
            memory_mb=limits.memory_bytes // MIB,
            cpu_s=limits.cpu_seconds,
            cpus=limits.cpus,
            processes=limits.pids,
            disk_mb=limits.disk_bytes // MIB,
            cell_timeout_s=settings.timeout_s,
            max_sessions=settings.max_sessions,
            idle_timeout_s=settings.idle_timeout_s,
        ),
        workspace=sandbox.guest_paths(folder, folder).workspace,
        ignored_settings=str(settings.refusal) if settings.refusal is not None else "",
    )
