"""Programs of packages, made to start with the interpreter that kernels use.

uv is only ever given a base interpreter, so it writes that one into the first line of programs.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 1024 * 1024
"""A script larger than that is none that was made for an entry point."""
_LINE_CHARS = 127
"""Linux reads no more of a first line (BINPRM_BUF_SIZE)."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def retarget(folder: Path, *, base: Path, python: Path) -> None:
    """Have the scripts in `folder` that start with `base` start with `python`; blocks.

    Links are not followed. What is no script of `base` is left as it is.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        content = _script(path)
        rest = None if content is None else _body(content, base)
        if rest is None:
            continue
        mode = stat.S_IMODE(path.lstat().st_mode)
        path.unlink()
        path.write_bytes(_head(python) + rest)
        path.chmod(mode)


def _script(path: Path) -> bytes | None:
    """The content of a plain file of reasonable size that begins as scripts do."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return None
        content = file.read(MAX_BYTES)
    return content if content.startswith(b"#!") else None


def _body(content: bytes, base: Path) -> bytes | None:
    """What follows the lines that start `base`, None when they start something else.

    Where a path is too long or has spaces, uv has a shell start it in lines that Python reads as
    a text.
    """
    first, _, rest = content.partition(b"\n")
    names = {str(base).encode(), shlex.quote(str(base)).encode()}
    if _interpreter(first[2:].strip(), names):
        return rest
    if first.strip() == b"#!/bin/sh":
        second, _, rest = rest.partition(b"\n")
        third, _, rest = rest.partition(b"\n")
        command = second.removeprefix(b"'''exec' ")
        if command != second and third == b"' '''" and _interpreter(command, names):
            return rest
    return None


def _interpreter(words: bytes, names: Sequence[bytes] | set[bytes]) -> bool:
    return any(words == name or words.startswith(name + b" ") for name in names)


def _head(python: Path) -> bytes:
    line = f"#!{python}"
    if len(line) <= _LINE_CHARS and " " not in line:
        return f"{line}\n".encode()
    return f"#!/bin/sh\n'''exec' {shlex.quote(str(python))} \"$0\" \"$@\"\n' '''\n".encode()
