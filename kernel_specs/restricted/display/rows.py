"""Rows of long data frames, for people who sort and filter: their own HTML has ten of them."""

from __future__ import annotations

import os
import sys
from typing import Any

TABLE = "application/vnd.kernel-mcp.table+html"
MOST_ROWS = 500
MOST_CELLS = 6000
"""Most cells of a table: formatting one takes some 10 µs."""
_USUAL_ROWS = 60
_POLARS_ROWS = "POLARS_FMT_MAX_ROWS"


def of_pandas(frame: Any) -> dict[str, Any]:
    """Return a longer table of a data frame that its own HTML cuts, unless code set its length."""
    pandas: Any = sys.modules["pandas"]
    if not isinstance(frame, pandas.DataFrame) or len(frame) <= _USUAL_ROWS:
        return {}
    most = _most_rows(min(frame.shape[1], pandas.get_option("display.max_columns") or MOST_CELLS))
    options = "display.max_rows", "display.min_rows"
    if tuple(map(pandas.get_option, options)) != (_USUAL_ROWS, 10) or most <= 10:
        return {}
    with pandas.option_context(options[0], most, options[1], most):
        return {TABLE: frame._repr_html_()}


def of_polars(frame: Any) -> dict[str, Any]:
    """Return a longer table of a data frame that its own HTML cuts, unless code set its length."""
    polars: Any = sys.modules["polars"]
    if not isinstance(frame, polars.DataFrame) or frame.height <= 10 or _POLARS_ROWS in os.environ:
        return {}
    with polars.Config(tbl_rows=_most_rows(frame.width)):
        return {TABLE: frame._repr_html_()}


def _most_rows(columns: int) -> int:
    return min(MOST_ROWS, MOST_CELLS // max(1, columns))
