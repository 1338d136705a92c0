"""Documents as others send them, and what a fixed seed makes of them: stretched, nested, cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

CHARS = 100_000
"""Of a document."""

_CELL = {
    "cell_type": "code", "execution_count": 1, "id": "a1", "metadata": {"tags": ["x"]},
    "outputs": [{"output_type": "display_data", "metadata": {},
                 "data": {"text/html": "<p>1", "text/plain": ["1\n"]}}],
    "source": ["import a\n", "x = 'é'\n"],
}  # fmt: skip

REAL = {
    "table": '<div><style>.x {color: red}</style><table border="1"><thead><tr>'
    '<th colspan="2">a</th>'
    '</tr></thead><tbody><tr><td>K&ouml;ln &#8364;</td><td><img src="x" alt="A plot"></td></tr>'
    "</tbody></table><!-- no --><pre>a\n b</pre></div>",
    "picture": '<svg xmlns="http://www.w3.org/2000/svg" width="10" viewBox="0 0 10 10"><title>t'
    '</title><path d="M 0 0 L 10 10"/><text x="1">words</text></svg>',
    "notebook": json.dumps(
        {"cells": [_CELL, _CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1
    ),
    "traceback": "-----\nValueError      Traceback (most recent call last)\nCell In[3], line 2\n"
    "      1 def f():\n----> 2     raise ValueError('x')\n\nFile /usr/lib/python3.11/"
    "json/a.py:12, in "
    "loads(s)\n     11 a\n---> 12 b\n\nModuleNotFoundError: No module named 'a.b'\n",
    "progress": "\r 10%|█         | 1/10 [00:01<00:09,  1.00it/s]\x1b[A\x1b[K"
    "\x08\x08\x1b[31mred\x1b[0m"
    "\x1b]0;title\x07\x1b(B\r\n[kernel-mcp] hello\n",
    "code": "# /// script\n# dependencies = ['a>=1', \"b[c]\"]\n# ///\n%pip install -q a 'b>=2'\n"
    "from a.b import (c,\n  d)\n%timeit -n 10 f(x)\n!ls -l\nx = {'a': [1, 2, (3,)]}\nx?\n",
    "project": '[project]\nname = "a"\ndependencies = ["x>=1,<2; python_version < \'3.9\'"]\n'
    "[tool.uv.sources]\nx = { index = 'i' }\n[[package]]\nversion = 1.5\n"
    "t = 1979-05-27T07:32:00Z\n",
    "rows": 'a,"b ""c""",d\n1,2,3\na/__init__.py,sha256=x,12\n',
    "packages": "pandas>=2,<3, matplotlib ~= 3.0 polars[pandas, numpy]==1.*\nx (>=1)\n",
    "head": "GET http://a.example/x?y HTTP/1.1\r\nHost: a.example\r\nA: b, c\r\n"
    "Range: bytes=0-1\r\n"
    'If-Match: W/"a", "b"\r\nContent-Length: 10\r\nConnection: keep-alive, te\r\n',
    "message": '{"jsonrpc":"2.0","id":"a","method":"tools/call","params":'
    '{"name":"execute","arguments":'
    '{"code":"x\\n\\ud800\\udc00"}}}',
    "uv": "Resolved 10 packages in 1ms\nDownloading a (1.0MiB)\nBecause a==1 has no wheels with a "
    "matching tag and you require a, we can conclude\nHash mismatch for `a`\n",
}  # fmt: skip
"""Real documents of each kind, in short."""

_PIECES = (
    "<a ", "</", "<!--", "&#", "&", "<td>", "\x1b[", "\x1b]", "\r", "\x08", "\n", " ", "\t", "[",
    "{",
    "(", '"', "'", '"""', "\\", "9", "-", "-a1 ", "a", ".", ",", "é", "\u200b", "[kernel", "\ud800",
    "=", "%", "?", "#", "---> 1 ", "File ", "x = [", '{"a":', "a.b.", "&&", "bytes=", ":", "\x1b[9",
    "install ", "pip install ", "1,", "# /// a\n", "not ", "[[", "0x", "e", "\0", "a=b\n",
)  # fmt: skip
"""Pieces that make up most of a document."""


def documents(count: int) -> Iterator[str]:
    """Yield as many documents, always the same ones."""
    for seed in range(count):
        yield document(random.Random(seed))


def document(rng: random.Random) -> str:
    """One of `CHARS` characters or less."""
    text = rng.choice(list(REAL.values()))
    for _ in range(rng.randint(1, 3)):
        text = rng.choice((_stretched, _of_pieces, _repeated, _mixed, _without, _cut))(rng, text)
    return text[:CHARS]


def _stretched(rng: random.Random, text: str) -> str:
    """A short part of it, again and again in its place."""
    start = rng.randrange(len(text) or 1)
    part = text[start : start + rng.randint(1, 30)] or "x"
    return text[:start] + part * (CHARS // len(part) - 1) + text[start:]


def _of_pieces(rng: random.Random, text: str) -> str:
    start = rng.randrange(len(text) or 1)
    pieces = "".join(rng.choice(_PIECES) for _ in range(rng.choice((1, 1, 2, 3))))
    return text[:start] + pieces * (CHARS // len(pieces) - 20) + text[start:]


def _repeated(rng: random.Random, text: str) -> str:
    return text * (rng.randint(1, CHARS) // (len(text) or 1) + 1)


def _mixed(rng: random.Random, text: str) -> str:
    others = [rng.choice(list(REAL.values())) for _ in range(20)]
    parts = [other[rng.randrange(len(other)) :][:60] for other in others]
    return text[: CHARS // 2] + "".join(parts) * (CHARS // 2000)


def _without(rng: random.Random, text: str) -> str:
    return text.replace(rng.choice("\"'<>[](){}\n,;:= "), rng.choice(("", " ", "\n")))


def _cut(rng: random.Random, text: str) -> str:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[start:end] + text[:start]
