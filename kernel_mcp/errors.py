"""Every error the server raises on purpose.

KernelMcpError
├── ConfigError                a flag, variable or file says something impossible
├── SandboxUnavailable         the promised boundary cannot be put in force here
├── EnvironmentBuildError      a kernel environment could not be resolved or built
│   └── UnfitPackages          some of its packages cannot be had, even alone
├── LaunchError                a kernel did not start
│   ├── KernelGone             a kernel had ended before it took a cell
│   ├── Uncopyable             there can be no checkpoint of a kernel now
│   └── BoundaryBroken         it started without what its sandbox promises, and was ended
├── UndoError                  there is no way back to where a cell began
├── BranchError                a session cannot be branched, or a branch not be adopted
├── InputError                 an argument of a tool call cannot be used
│   └── WorkspaceError         a path or file in the workspace cannot be used
├── SessionNotFound            unknown, foreign or expired handle or name
│   └── SessionGone            one of the caller's own whose session has ended
├── SessionLimitReached        the quota of sessions is used up
├── InstallError               packages could not be added to the session
├── HibernationError           a session's variables could not be saved or brought back
├── ServerStops                a call was given up because the server ends
└── ServerFailure              the system refused the server something that it needs

The text of an error is read by a language model or an operator: what happened, why, what to do
next. Tools hand it over unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping


class KernelMcpError(Exception):
    """Base of all errors with a message for the caller."""


class ConfigError(KernelMcpError):
    """A setting is wrong; the command line prints it as one line."""


class SandboxUnavailable(KernelMcpError):
    """No sandbox backend works here; the text says what to install or change."""


class EnvironmentBuildError(KernelMcpError):
    """A kernel environment could not be resolved, downloaded or built."""


class UnfitPackages(EnvironmentBuildError):
    """Packages that cannot be resolved; `unfit` has the reason for each."""

    def __init__(self, unfit: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in unfit.items()))
        self.unfit = dict(unfit)


class LaunchError(KernelMcpError):
    """A kernel process did not reach the point where it can run cells."""


class Uncopyable(LaunchError):
    """A copy of a kernel would lack something; `words` name what."""

    def __init__(self, words: tuple[str, ...]) -> None:
        super().__init__(f"no copy of this kernel can be made: it has {', '.join(words)}")
        self.words = words


class BoundaryBroken(LaunchError):
    """A kernel was killed before it ran any code: its sandbox does not hold."""


class KernelGone(LaunchError):
    """A kernel ended before it received a cell; nothing of the cell has run."""


class UndoError(KernelMcpError):
    """Nothing was undone; the text says why."""


class BranchError(KernelMcpError):
    """Branches could not be created, or none could be adopted; the text says why."""


class InputError(KernelMcpError):
    """An argument of a tool call is unusable; nothing was changed."""


class WorkspaceError(InputError):
    """A file operation in a workspace was refused or failed; `code` is an errno, or 0."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class NotebookError(InputError):
    """A notebook file cannot be read, or a cell has changed since the caller read it."""


class SessionNotFound(KernelMcpError):
    """No session of this caller has that handle or name (one text for unknown and expired)."""


class SessionGone(SessionNotFound):
    """The session has ended; `lost` names some of its variables, `more` counts the others."""

    def __init__(
        self, text: str, *, handle: str, lost: tuple[str, ...] = (), more: int = 0
    ) -> None:
        super().__init__(text)
        self.handle = handle
        self.lost = lost
        self.more = more


class SessionLimitReached(KernelMcpError):
    """No further session may be opened."""


class QuotaReached(SessionLimitReached):
    """A principal has reached its quota of sessions on all servers together."""


class InstallError(KernelMcpError):
    """Packages could not be installed; the session is as it was."""


class HibernationError(KernelMcpError):
    """A session could not be saved to disk or restored from it."""


class ServerStops(KernelMcpError):
    """The server is shutting down and cancels the call."""


class ServerFailure(KernelMcpError):
    """A resource of the server failed; the text names it and what still works."""
