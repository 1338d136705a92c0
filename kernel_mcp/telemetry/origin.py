"""What a moment of work is for: whose request, which session. Log lines and spans name it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where work comes from; empty where that is not known.

    request    the id of the request: of HTTP, of JSON-RPC, or both
    session    the handle of the session
    principal  who has made the request
    trace      the spans around it, where work goes on in another task
    """

    request: str = ""
    session: str = ""
    principal: str = ""
    trace: object = None


NOWHERE = Origin()
HERE: ContextVar[Origin] = ContextVar("origin", default=NOWHERE)


def of_call(request: object, principal: str, within: str = "") -> Origin:
    """That of a call, perhaps within a request of HTTP; the spans around it stay.

    What runs it may have been started by an earlier request.
    """
    return Origin(f"{within}/{request}" if within else str(request), "", principal)


def in_session(session: str) -> None:
    """What runs from here to the end of the block around it is part of a session."""
    HERE.set(replace(HERE.get(), session=session))
