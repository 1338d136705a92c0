"""Messages by which a kernel, or its Jupyter server, says that its variables are gone."""

from __future__ import annotations

from kernel_mcp.kernels.message_codec import Message

RESTARTED = "was restarted by another of its clients"
_DIED = "has died, and its Jupyter server starts it again"
_ENDS = {
    "restarting": _DIED,
    "autorestarting": _DIED,
    "starting": "was started anew",
    "dead": "has died",
}
"""The published states."""


def ending_of(message: Message) -> str | None:
    """Return why the variables of a kernel are gone or about to go; None for other messages."""
    if message.kind == "shutdown_reply":
        again = message.content.get("restart") is True
        return RESTARTED if again else "was shut down by another of its clients"
    if message.kind == "status":
        return _ENDS.get(str(message.content.get("execution_state")))
    return None
