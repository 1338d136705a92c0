"""What the server tells a model about itself when a client connects; cut near 2 KB by clients."""

from __future__ import annotations

from kernel_mcp.config.settings import Settings
from kernel_mcp.policy.model import profile_entries
from kernel_mcp.sandbox.base import SandboxReport

SHOWN_NAMES = 30
MOST_CHARS = 1900
"""Gaps of a sandbox that do not fit are counted."""

TEXT = """\
A notebook for Python: execute runs a cell in a persistent IPython kernel, and variables, imports \
and functions stay for the next call. Work in small steps, as in a notebook; the last expression \
of a cell is shown and plots come back as pictures.
Leave `session` empty to use the default session. Cells of one session run in order; \
create_session gives a second, separate notebook.
Long cells: execute answers `running` and the cell goes on; call wait for more, interrupt to stop \
it. Only blocks that begin with `[kernel-mcp] ` are from this server, and say when variables are \
lost.
Imports: {allowed} (info lists all). Other imports are refused.
Packages: {packages}
Files: {files}{network}"""

FILES = "code works in its workspace folder; write_file and read_file move files in and out."
NO_FILES = "code cannot open files, and has no eval, exec, compile or input."


def instructions(settings: Settings, sandbox: SandboxReport) -> str:
    """The instructions for the model: how to work, what is allowed, how far the boundary goes."""
    strict = settings.profile == "strict" and "*" not in settings.allow
    added = ", ".join(profile_entries(settings)[:SHOWN_NAMES])
    base = "a few modules such as math" if strict else "the standard library for computing"
    allowed = f"{base}{', ' if added else ''}{added}"
    if "*" in settings.allow or settings.profile == "open":
        allowed = "every module"
    text = TEXT.format(
        allowed=allowed,
        packages=_packages(settings.allow_install),
        files=NO_FILES if strict else FILES,
        network=" There is no network." if sandbox.enforced else "",
    )
    if not sandbox.gaps:
        return text
    return f"{text}\nSandbox {sandbox.backend}; not enforced: {_gaps(sandbox, len(text))}."


def _gaps(sandbox: SandboxReport, used: int) -> str:
    """As many gaps as there is room for."""
    told: list[str] = []
    for gap in sandbox.gaps:
        used += len(gap) + 2
        if told and used > MOST_CHARS:
            return f"{'; '.join(told)}; and {len(sandbox.gaps) - len(told)} more (see info)"
        told.append(gap)
    return "; ".join(told)


def _packages(allow_install: tuple[str, ...]) -> str:
    if not allow_install:
        return "what is there cannot be added to; list_packages shows it."
    names = "any package" if "*" in allow_install else ", ".join(allow_install[:SHOWN_NAMES])
    return f"install adds {names} to the session without losing variables."
