"""Compare the environment of a kernel with that of a save: can it load the variables?"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from kernel_mcp.sessions.manifest import Saved

if TYPE_CHECKING:
    from kernel_mcp.kernels.kernel import Kernel

IMPLEMENTATION = "cpython"


def python_of(version: str) -> tuple[str, str, str]:
    """Return the Python version, implementation and machine that a dump made here requires."""
    return version, IMPLEMENTATION, platform.machine()


def other_python(version: str, saved: Saved) -> str:
    """Return the reason why a kernel of this Python cannot load the save; empty if it can."""
    if not version or minor(version) == minor(saved.python[0]):
        return ""
    return f"they were saved by Python {minor(saved.python[0])} and cannot be read by {version}"


CompatibilityCheck: TypeAlias = "Callable[[Kernel], tuple[str, str]]"
"""Returns the reason why a kernel cannot load a save, and the changed packages; empty for none."""


def compatibility_check(saved: Saved) -> CompatibilityCheck:
    """Return a function that compares kernels with the environment of the save."""

    def judge(kernel: Kernel) -> tuple[str, str]:
        environment = kernel.environment
        return other_python(environment.version, saved), changed(environment.packages, saved)

    return judge


def changed(packages: Sequence[str], saved: Saved) -> str:
    """Return packages that have other versions than at the save, in words; up to 10."""
    then = dict(each.partition("==")[::2] for each in saved.environment)
    now = dict(each.partition("==")[::2] for each in packages)
    found = [
        f"{name} {before} is {now.get(name, 'not there')} now"
        for name, before in then.items()
        if now.get(name) != before
    ]
    return ", ".join(found[:10])


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
