"""Messages between fronts and nodes."""

from __future__ import annotations

import json

import pytest

from kernel_mcp.config.quotas import Quotas
from kernel_mcp.errors import InputError, KernelMcpError, SessionNotFound, WorkspaceError
from kernel_mcp.fleet.messages import caller_of, caller_row, error_of, error_row
from kernel_mcp.fleet.session_table import SavedPart, SessionRow
from kernel_mcp.identity import Principal
from kernel_mcp.sessions.directory import Caller
from kernel_mcp.sessions.notifications import ResponseContext


def test_who_calls_is_the_same_on_the_other_side() -> None:
    who = Principal("ada", frozenset({"kernel:run"}), Quotas(sessions=3, cpu=1.5), ("network",))
    caller = Caller(
        "ada", "default", who, known=False, client="a client", request="r-1", program="p 1"
    )
    row = json.loads(json.dumps(caller_row(caller)))
    response = ResponseContext()
    found = caller_of(row, response)
    assert (found, found.who, found.response) == (caller, who, response)
    assert (found.known, found.client, found.request) == (False, "a client", "r-1")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SessionNotFound("a"), SessionNotFound),
        (InputError("b"), InputError),
        (WorkspaceError("c"), InputError),
        (KernelMcpError("d"), KernelMcpError),
    ],
)
def test_errors_keep_text_and_kind(error: KernelMcpError, kind: type[Exception]) -> None:
    found = error_of(json.loads(json.dumps(error_row(error))))
    assert isinstance(found, kind)
    assert str(found) == str(error)


def test_rows_of_sessions_are_plain_values_that_say_all() -> None:
    row = SessionRow(
        "s-1.one",
        "ada",
        name="notes",
        node="one",
        life="x",
        epoch=3,
        saved={"cell": 1},
        parts={"dump": SavedPart("abc", 7)},
        left_out=("a", "b"),
        omitted=2,
    )
    assert SessionRow.of(json.loads(json.dumps(row.value()))) == row
    with pytest.raises(ValueError, match="format"):
        SessionRow.of({**row.value(), "format": 99})
