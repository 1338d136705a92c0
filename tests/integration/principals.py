"""Principals of a server: their tokens, made as an operator makes them."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_mcp.identity import new_token
from tests.integration.httpserver import ROOT, HttpServer, http_server

MADE = re.compile(r"kmcp_[\w-]+")


def add(file: Path, name: str, *flags: str) -> str:
    """The token of a new principal."""
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp", "token", "add", name, "--tokens", str(file), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (token,) = set(MADE.findall(done.stdout + done.stderr))
    return str(token)


def revoke(file: Path, name: str) -> None:
    """Revoke all tokens of a principal."""
    words = [sys.executable, "-m", "kernel_mcp", "token", "revoke", name, "--tokens", str(file)]
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)


@contextmanager
def two_principals(folder: Path, *flags: str) -> Iterator[tuple[HttpServer, str, str]]:
    """A server with two principals and the token of each."""
    file = folder / "tokens"
    tokens = add(file, "one"), add(file, "other")
    with http_server("--tokens", str(file), *flags, token=tokens[0]) as server:
        yield server, *tokens


def many(file: Path, count: int) -> list[str]:
    """The tokens of so many principals, whose rows are written all at once."""
    tokens = [new_token() for _ in range(count)]
    rows = [
        {"principal": f"p{number}", "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for number, token in enumerate(tokens)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file.chmod(0o600)
    return tokens
