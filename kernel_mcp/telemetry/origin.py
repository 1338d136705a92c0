"""The request, session and principal of the current work, for log lines and spans."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of work; fields are empty where they are not known.

    request    id of the request: of HTTP, of JSON-RPC, or both
    session    handle of the session
    principal  name of the principal that made the request
    program    name and version of its client, as that says
    peer       address from which an HTTP request came
    trace      enclosing spans, for work that continues in another task
    """

    request: str = ""
    session: str = ""
    principal: str = ""
    trace: object = None
    program: str = ""
    peer: str = ""


NOWHERE = Origin()
HERE: ContextVar[Origin] = ContextVar("origin", default=NOWHERE)


def of_call(
    request: object, principal: str, within: str = "", program: str = "", peer: str = ""
) -> Origin:
    """Return the origin of a call; `within` is the id of its HTTP request, if any.

    It names no session, as the current task may have been started by an earlier request. Spans of
    the task stay in force.
    """
    name = f"{within}/{request}" if within else str(request)
    return Origin(name, "", principal, program=program, peer=peer)


def in_session(session: str) -> None:
    """Attribute the work of the current context to a session from now on."""
    HERE.set(replace(HERE.get(), session=session))
