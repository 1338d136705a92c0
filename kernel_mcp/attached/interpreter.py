"""The interpreters of kernels elsewhere: which tools their sessions lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_mcp.kernels.interpreter import PYTHON_STATE, Interpreter
from kernel_mcp.notebooks.metadata import PYTHON_METADATA, language_of

ATTACHED = "attached"
"""Name of the interpreter of external kernels."""
_OTHERWISE = "create_session without attach gives a session with a kernel of its own."
_LACKING = {
    "reset": "Delete variables by code, or have its user restart it; close_session leaves it.",
    "install": "A cell with %pip install adds packages where that kernel runs.",
    "list_packages": "A cell with %pip list shows those of that kernel.",
    "write_file": "Write files by code: it runs where that kernel runs.",
    "list_files": "List folders by code: it runs where that kernel runs.",
    "undo": _OTHERWISE,
    "branch": _OTHERWISE,
}

_BY_CODE = "Do it by code: it runs where that kernel runs."
_NO_COPIES = "Its kernel cannot be copied; run the cells again after reset."
_OF_PYTHON = dict.fromkeys(("list_variables", "check_syntax", "install", "list_packages"), _BY_CODE)
REMOTE_LACKING = {
    **_LACKING,
    **dict.fromkeys(("undo", "branch"), _NO_COPIES),
    **_OF_PYTHON,
}
del REMOTE_LACKING["reset"]


def attached(place: str, notebook: Mapping[str, Any] = PYTHON_METADATA) -> Interpreter:
    """Return the interpreter of a session that joins the kernel at `place`.

    `notebook` is the metadata of its notebooks.
    """
    if (language := language_of(notebook)) == "Python":
        return Interpreter(
            ATTACHED, language, place, external=True, state=PYTHON_STATE, lacking=_LACKING
        )
    return Interpreter(
        ATTACHED,
        language,
        place,
        external=True,
        notebook=notebook,
        lacking={**_LACKING, **_OF_PYTHON},
    )
