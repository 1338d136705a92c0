"""Snippets of code, in which words in capitals stand for values."""

from __future__ import annotations

import json
import re

_WORD = re.compile(r"\b[A-Z]{4,7}\b")


def filled(snippet: str, **values: str | int) -> str:
    """Return a snippet with its values, as literals of JSON; those are valid in R.

    A word stands for the value of its name in lower case.
    """

    def literal(found: re.Match[str]) -> str:
        name = found[0].lower()
        return json.dumps(values[name], ensure_ascii=False) if name in values else found[0]

    return _WORD.sub(literal, snippet)
