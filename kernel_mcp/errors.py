"""Errors that the server raises on purpose. Some rooms define further subclasses.

KernelMcpError
├── ConfigError                a flag, variable or file has an invalid value
├── SandboxUnavailable         the configured sandbox cannot be enforced on this machine
├── EnvironmentBuildError      a kernel environment could not be resolved or built
│   └── UnfitPackages          some of its packages cannot be resolved, even alone
├── LaunchError                a kernel did not start
│   ├── KernelGone             a kernel ended before it received a cell
│   ├── AnswerLate             a kernel did not answer a request in time
│   ├── Uncopyable             no checkpoint of a kernel is possible now
│   └── BoundaryBroken         the sandbox of a new kernel does not hold; the kernel was killed
├── UndoError                  cells could not be undone
├── BranchError                a session cannot be branched, or a branch not adopted
├── InputError                 an argument of a tool call cannot be used
│   ├── WorkspaceError         a path or file in the workspace cannot be used
│   └── NotebookError          a notebook file cannot be used
├── SessionNotFound            unknown, foreign or expired handle or name
│   └── SessionGone            one of the caller's own sessions, which has ended
├── SessionLimitReached        no further session may be opened
│   └── QuotaReached           the principal's quota of sessions is used up
├── InstallError               packages could not be added to the session
├── HibernationError           a session could not be saved or restored
│   └── SavedTooLate           its kernel took too long
├── ServerStops                a call was cancelled because the server shuts down
└── ServerFailure              a resource of the server failed

The text of an error is for a language model or an operator: what happened, why, and what to do
next. Tools return it unchanged.
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


class AnswerLate(LaunchError):
    """A kernel did not answer a request in time."""


class Uncopyable(LaunchError):
    """No checkpoint of a kernel can be made; `words` name what a copy would lack."""

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


class SavedTooLate(HibernationError):
    """A kernel took too long to save or load its variables."""


class ServerStops(KernelMcpError):
    """The server is shutting down and cancels the call."""


class ServerFailure(KernelMcpError):
    """A resource of the server failed; the text names it and what still works."""
