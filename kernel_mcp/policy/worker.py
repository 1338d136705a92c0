"""`worker FD`: a process that checks long code for the server, started by `bare_program`.

Requests arrive on a socket and are answered in order. Each message is `{"id": n}` with a descriptor
of memory that contains JSON. `{"ping": n}` is answered by `{"pong": n}`. A request has the
arguments of `check`; this is a request, then its response:

    {"code": …, "policy": {…}, "known_names": […] or null, "own_modules": […], "python": …,
     "compiled": …, "imports": true if the response is to list imports,
     "steps": texts of `NextStep` by module, as far as they are known}

    {"report": {…}, "asked": modules whose step the report needs and `steps` lacks}

The process exits when the server has gone.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_mcp.config.values import GIB
from kernel_mcp.linux.process import keep_small, trim
from kernel_mcp.policy import Diagnostic, ImportUse, Policy, Report
from kernel_mcp.policy.check import check
from kernel_specs import linux
from kernel_specs.template import packets

MOST_BYTES = GIB
"""Address-space limit of the process; the densest code of `MAX_CODE` needs a quarter of it."""
MOST_MESSAGE_BYTES = 1 << 24
_FACTS = ("allow_all", "profile", "once", "tools", "confined", "network")


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of the process: a report, and in `asked` the modules whose step it lacks."""

    report: Report
    asked: tuple[str, ...]

    @classmethod
    def of(cls, message: bytes) -> Answer:
        """Parse the response of the process."""
        told = json.loads(message)
        report = told["report"]
        return cls(
            Report(
                report["valid"],
                tuple(Diagnostic(**each) for each in report["diagnostics"]),
                tuple(ImportUse(**each) for each in report["imports"]),
                report["note"],
            ),
            tuple(told["asked"]),
        )


def question(
    code: str,
    policy: Policy,
    *,
    known_names: Collection[str] | None = None,
    own_modules: Collection[str] = (),
    python: str = "",
    compiled: bool = True,
    imports: bool = True,
    steps: Mapping[str, str],
) -> bytes:
    """Return the request to check code, as JSON; see `check`.

    Without `imports` the response does not list imports. `steps` are the known texts of
    `policy.step` by module.
    """
    facts: dict[str, Any] = {name: getattr(policy, name) for name in _FACTS}
    facts["modules"] = list(policy.modules)
    facts["deny_builtins"] = list(policy.deny_builtins)
    facts["installed"] = None if policy.installed is None else list(policy.installed)
    asked = {
        "code": code,
        "policy": facts,
        "known_names": None if known_names is None else list(known_names),
        "own_modules": list(own_modules),
        "python": python,
        "compiled": compiled,
        "imports": imports,
        "steps": steps,
    }
    return json.dumps(asked).encode()


@dataclass(slots=True)
class _Steps:
    """A `NextStep` that returns the texts in `known`, and collects other modules in `asked`."""

    known: Mapping[str, str]
    asked: dict[str, None] = field(default_factory=dict)

    def __call__(self, module: str, *, once: bool) -> str:
        if module not in self.known:
            self.asked[module] = None
        return self.known.get(module, "")


def answered(message: bytes) -> bytes:
    """Check the code of a request; return the response. Both are JSON."""
    asked = json.loads(message)
    facts = asked["policy"]
    steps = _Steps(asked["steps"])
    facts |= {name: frozenset(facts[name]) for name in ("modules", "deny_builtins")}
    facts["installed"] = None if facts["installed"] is None else frozenset(facts["installed"])
    facts["tools"] = tuple(facts["tools"])
    names = asked["known_names"]
    report = check(
        asked["code"],
        Policy(**facts, step=steps),
        known_names=None if names is None else frozenset(names),
        own_modules=frozenset(asked["own_modules"]),
        python=asked["python"],
        compiled=asked["compiled"],
    )
    told = {**report.to_json(), "note": report.note}
    if not asked["imports"]:
        told["imports"] = []
    text = "\n".join(each.message for each in report.diagnostics)
    wanted = [module for module in steps.asked if repr(module) in text]
    return json.dumps({"report": told, "asked": wanted}).encode()


def written(content: bytes) -> int:
    """Return a new descriptor of memory with this content. Raises OSError."""
    fd = os.memfd_create("code", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd


def content_of(fds: Sequence[int]) -> bytes:
    """Return the content of one descriptor of `written`, and close all. Raises ValueError."""
    try:
        (fd,) = fds
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_MESSAGE_BYTES:
            raise ValueError("this is no memory with a message")
        return os.pread(fd, status.st_size, 0)
    finally:
        linux.close_all(fds)


def main(argv: Sequence[str]) -> int:
    """Answer requests on the socket at descriptor `argv[0]` until the server closes it."""
    linux.set_name("kernel-check")
    keep_small()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    most = MOST_BYTES if most == resource.RLIM_INFINITY else min(most, MOST_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # syntax trees have no cycles
    gc.freeze()
    with socket.socket(fileno=int(argv[0])) as server:
        while (received := packets.receive(server)) is not None:
            message, fds = received
            if "ping" in message:
                packets.send(server, {"pong": message["ping"]})
                continue
            fd = written(answered(content_of(fds)))
            packets.send(server, {"id": message["id"]}, [fd])
            os.close(fd)
            trim()
    return 0
