"""Messages between fronts and nodes, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.environments.uv import ProgressCallback
from kernel_mcp.errors import InputError, KernelMcpError, ServerFailure, SessionNotFound
from kernel_mcp.identity import Principal
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import ResponseContext
from kernel_mcp.sessions.questions import Answer
from kernel_mcp.tools.calls import Call


@dataclass(frozen=True, slots=True)
class Moved:
    """A node does not have the session; `node` has it. Empty: any other node may take it."""

    node: str = ""


_FIELDS = ("principal", "default", "known", "client", "program", "request", "peer")


def caller_row(caller: Caller) -> dict[str, Any]:
    """Return a caller as plain values, without the delivery of the answer."""
    who = caller.who
    found = {name: getattr(caller, name) for name in _FIELDS}
    return found | {
        "scopes": sorted(who.scopes),
        "quotas": dataclasses.asdict(who.quotas),
        "doors": list(who.grants),
        "lead": caller.response.preamble,
    }


def caller_of(row: Mapping[str, Any], response: ResponseContext) -> Caller:
    """Return the caller from the output of `caller_row`; `response` tracks the delivery."""
    who = Principal(
        name=str(row["principal"]),
        scopes=frozenset(map(str, row["scopes"])),
        quotas=Quotas(**row["quotas"]),
        grants=tuple(map(str, row["doors"])),
    )
    return Caller(**{name: row[name] for name in _FIELDS}, who=who, response=response)


def call_row(call: Call) -> dict[str, Any]:
    """Return a call as plain values, without its caller; nobody is asked while it is open."""
    return {
        "request": call.request_id,
        "of_view": call.of_view,
        "task": call.task,
        "asks": sorted(call.asks) if call.ask is None else [],
        "answer": None if call.answer is None else dataclasses.asdict(call.answer),
        "repeats": call.repeats,
    }


def call_of(row: Mapping[str, Any], caller: Caller, progress: ProgressCallback | None) -> Call:
    """Return the call of a caller from the output of `call_row`."""
    answer = row.get("answer")
    return Call(
        caller,
        progress,
        request_id=str(row["request"]),
        of_view=bool(row.get("of_view")),
        task=bool(row.get("task")),
        asks=frozenset(row.get("asks", ())),
        answer=None if answer is None else Answer(**answer),
        repeats=bool(row.get("repeats")),
    )


_KINDS: dict[str, type[KernelMcpError]] = {"missing": SessionNotFound, "input": InputError}


def error_row(error: KernelMcpError) -> dict[str, Any]:
    """Return an error of a read as plain values, by its kind for the client."""
    kind = next((kind for kind, each in _KINDS.items() if isinstance(error, each)), "")
    return {"error": kind, "text": str(error)}


def error_of(row: Mapping[str, Any]) -> KernelMcpError:
    """Return the error from the output of `error_row`."""
    return _KINDS.get(str(row["error"]), ServerFailure)(str(row["text"]))
