"""Handles of a fleet: each contains the name of the node on which the session began."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.tools.resources import session_of

NODE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
"""Valid names of nodes: DNS labels of at most 32 characters."""
_HANDLE = re.compile(rf"s-[A-Za-z0-9_-]{{12}}\.({NODE.pattern})")


def check_node(name: str) -> str:
    """Return the name of a node unchanged. Raises ConfigError if it is not valid."""
    if not NODE.fullmatch(name):
        raise ConfigError(
            f"--name {name}: the name of a node stands in handles: it takes 1 to 32 lower-case "
            "letters, digits and hyphens, and begins and ends with none of those"
        )
    return name


def new_handle(node: str) -> str:
    """Return a new, unguessable handle for a session that begins on a node."""
    return f"s-{secrets.token_urlsafe(9)}.{node}"


def node_of(handle: str) -> str:
    """Return the node on which a session began; empty if `handle` is not one, as for a name."""
    found = _HANDLE.fullmatch(handle)
    return found[1] if found else ""


NO_SESSION = frozenset({"create_session", "list_sessions", "run_script"})
"""Tools whose calls do not refer to an existing session."""


def session_named(tool: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the session of a call: handle or name, or empty for the default session.

    None if the call does not refer to a session.
    """
    if tool in NO_SESSION:
        return None
    found = arguments.get("branch" if tool == "adopt" else "session", "")
    path = arguments.get("path", "")
    if tool == "read_file" and isinstance(path, str) and (of_path := session_of(path)):
        found = of_path
    return found if isinstance(found, str) else ""
