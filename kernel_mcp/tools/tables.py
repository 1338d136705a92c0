"""Tables in answers: a line of words for each row, in pages that fit into an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias, TypeVar

from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel, Field

from kernel_mcp.output.text import escaped, one_line, weight
from kernel_mcp.tools import Whole

MatchArg = Annotated[str, Field(description="Such as df* or *.csv")]
FirstArg: TypeAlias = Whole
"""Number of the first row to return, from 0."""
FRAME_CHARS = 600
"""Characters of an answer besides its rows."""
FIELD_CHARS = 3
"""Characters of JSON between two fields that not every writer leaves out."""

R = TypeVar("R", bound=BaseModel)


def matches(name: str, match: str) -> bool:
    """Return True for a name that contains `match`, or fits it as a pattern with * and ?."""
    return match in name or fnmatchcase(name, match)


def fitting(rows: Sequence[R], line: Callable[[R], str], most: int) -> list[R]:
    """Return the first rows that fit into `most` characters, at least one if there is one.

    Each counts twice: as a line of the text, and as it is in the structured part of the answer.
    """
    left, shown = most - FRAME_CHARS, 0
    for row in rows:
        left -= weight(line(row)) + weight(row.model_dump_json(exclude_none=True))
        left -= FIELD_CHARS * len(type(row).model_fields)
        if left < 0 and shown:
            break
        shown += 1
    return [*rows[:shown]]


def more(omitted: int, offset: int, shown: int) -> str:
    """Return the sentence on rows that are not shown; empty for none."""
    if offset and not shown:
        return f"Nothing is left at offset={offset}: call it again without."
    if not omitted:
        return ""
    after = offset + shown
    return f"{omitted:,} more: read on with offset={after}, or pass a pattern as `match`."


def table_answer(lines: Sequence[str], result: BaseModel, note: str) -> CallToolResult:
    """Return an answer with a table as text, and `result` as its structured part."""
    rows = (escaped(one_line(each, 2000)) for each in lines)
    text = "\n".join([*rows, *([note] if note else [])])
    return CallToolResult(
        content=[TextContent(text=text or "(none)")],
        structured_content=result.model_dump(mode="json", exclude_none=True),
    )
