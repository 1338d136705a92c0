"""The programs that a server and its processes execute, by strace, and which are confined."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_CALL = re.compile(r"^(\d+) +(?:<\.\.\. )?(execve|clone3?|v?fork)\b(.*)$")
_RESULT = re.compile(r"= (\d+)(?: |$)")
_EXECUTED = re.compile(r'\("([^"]*)", \[(.*)\]')


@dataclass(frozen=True)
class Execution:
    """One program that was started; `confined` when bubblewrap had been before it."""

    program: str
    arguments: str
    confined: bool


def strace() -> str:
    """The program, installed if that may be done; skips where it cannot be had."""
    if shutil.which("strace") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-qq", "-y", "strace"], check=False)
    found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed, and cannot be installed by this user")
    return found


def traced(log: Path, argv: list[str]) -> list[str]:
    """The command that runs `argv` and notes in `log` what is executed."""
    options = ["-f", "-qq", "--seccomp-bpf", "-s", "400", "--signal=none", "-o", str(log)]
    return [strace(), *options, "-e", "trace=execve,clone,clone3,fork,vfork", "--", *argv]


def executions(log: Path) -> list[Execution]:
    """Everything that was executed.

    A process in a PID namespace tells of its children by other numbers. So only what descends from
    the first process by known numbers, without bubblewrap between, counts as not confined.
    """
    free: set[str] = set()
    begun: dict[str, str] = {}
    found: list[Execution] = []
    for line in log.read_text(errors="replace").splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        pid, call, rest = match.groups()
        if not found:
            free.add(pid)
        if "<unfinished" in rest:
            begun[pid] = rest
            if call == "execve":
                continue
        resumed = "resumed>" in rest
        result = _RESULT.search(rest)
        if result is None:
            continue
        if call != "execve":
            if pid in free:
                free.add(result[1])
            continue
        words = _EXECUTED.search(begun.pop(pid, "") if resumed else rest)
        if words is not None:
            found.append(Execution(words[1], words[2], pid not in free))
            if Path(words[1]).name == "bwrap":
                free.discard(pid)
    return found
