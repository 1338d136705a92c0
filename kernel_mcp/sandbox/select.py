"""Choose a backend and make sure that it really works."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernel_mcp.errors import ConfigError, SandboxUnavailable
from kernel_mcp.sandbox.advice import diagnose
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.bwrap import BwrapSandbox
from kernel_mcp.sandbox.none import NoSandbox
from kernel_mcp.sandbox.run import run_confined

BACKENDS: Mapping[str, Callable[[], Sandbox]] = {"bwrap": BwrapSandbox.detect, "none": NoSandbox}
AUTOMATIC = ("bwrap",)
"""Backends that `auto` may choose, best first."""


def select_sandbox(name: str = "auto") -> Sandbox:
    """The backend of that name, proven by a process that ran in it; blocks for some 10 ms.

    Raises SandboxUnavailable with the remedy, ConfigError for an unknown name.
    """
    if name == "auto":
        return _first_that_works()
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"there is no sandbox {name!r}; choose one of {known}")
    sandbox = BACKENDS[name]()
    _probe(sandbox)
    return sandbox


def _first_that_works() -> Sandbox:
    refusals: list[str] = []
    for name in AUTOMATIC:
        found = _try(name)
        if not isinstance(found, SandboxUnavailable):
            return found
        refusals.append(str(found))
    raise SandboxUnavailable("\n".join(refusals))


def _try(name: str) -> Sandbox | SandboxUnavailable:
    try:
        return select_sandbox(name)
    except SandboxUnavailable as refusal:
        return refusal


def _probe(sandbox: Sandbox) -> None:
    """Run a process that does nothing. Raises SandboxUnavailable."""
    done = run_confined(sandbox, ["/bin/sh", "-c", "exit 0"])
    if done.returncode != 0:
        raise SandboxUnavailable(diagnose(done.stderr))
