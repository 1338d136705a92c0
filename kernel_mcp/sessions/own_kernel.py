"""Tools that require a kernel of the session's own, and alternatives with an external one."""

from __future__ import annotations

from kernel_mcp.errors import InputError
from kernel_mcp.kernels.factory import KernelRequest

OWN_KERNEL = "create_session without attach gives one with a kernel of its own."
INSTEAD = {
    "reset": "Delete variables by code, or have its user restart it; close_session leaves it.",
    "install": "A cell with %pip install adds packages where that kernel runs.",
    "list_packages": "A cell with %pip list shows those of that kernel.",
    "write_file": "Write files by code: it runs where that kernel runs.",
    "list_files": "List folders by code: it runs where that kernel runs.",
}
"""Alternatives to tools that are not available with an attached kernel, by tool."""


def require_own(request: KernelRequest, what: str) -> None:
    """Raise InputError if the kernel is attached; `what` names the tool, for the error text."""
    if request.attach:
        raise InputError(
            f"{what} is not available: this session is attached to an external kernel "
            f"({request.attach}). {INSTEAD.get(what, OWN_KERNEL)}"
        )
