"""Code by which the kernels of a language answer questions that Jupyter's protocol lacks.

Every snippet prints JSON and leaves no variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.resources import files

from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Language:
    """Snippets of one language; an empty one is a question that its kernels do not answer.

    start      makes a fresh kernel ready, and prints null
    variables  prints a list of objects as `list_variables` has them
    packages   prints an object of versions by name
    check      returns code that parses some code and prints null, or [line, column, message]
    """

    start: str = ""
    variables: str = ""
    packages: str = ""
    check: Callable[[str], str] | None = None


_R_VARIABLES = """\
local({
  one <- function(name) tryCatch({
    value <- get(name, envir = globalenv())
    size <- dim(value)
    text <- if (is.function(value)) "" else
      paste(utils::capture.output(utils::str(value, give.head = FALSE, max.level = 1,
        list.len = 5)), collapse = " ")
    list(name = name, type = class(value)[1],
      shape = I(if (is.null(size)) integer() else as.integer(size)),
      length = length(value), size = as.numeric(utils::object.size(value)),
      preview = substr(trimws(text), 1, 120))
  }, error = function(reason) list(name = name, type = "?", shape = I(integer()), preview = ""))
  cat(jsonlite::toJSON(lapply(ls(globalenv()), one), auto_unbox = TRUE, null = "null"))
})
"""
_R_PACKAGES = """\
local({
  found <- utils::installed.packages()[, "Version"]
  cat(jsonlite::toJSON(as.list(found[!duplicated(names(found))]), auto_unbox = TRUE))
})
"""


_R_CHECK = """\
local({
  told <- function(reason) {
    message <- conditionMessage(reason)
    place <- regmatches(message, regexec("^<text>:([0-9]+):([0-9]+): *([^\\n]*)", message))[[1]]
    if (length(place) == 4) list(as.integer(place[2]), as.integer(place[3]), place[4])
    else list(1, 0, message)
  }
  found <- tryCatch({ parse(text = TEXT); NULL }, error = told)
  cat(jsonlite::toJSON(found, auto_unbox = TRUE, null = "null"))
})
"""


def _r_check(code: str) -> str:
    """Return the snippet that parses `code`; JSON's string literals are valid in R."""
    return _R_CHECK.replace("TEXT", json.dumps(code, ensure_ascii=False))


LANGUAGES: Mapping[str, Language] = {
    "r": Language(
        start=files(__package__).joinpath("start.R").read_text("utf-8"),
        variables=_R_VARIABLES,
        packages=_R_PACKAGES,
        check=_r_check,
    ),
}
"""The known languages, by the lower-case name in a kernel spec."""
