"""Set up the persistence of a server by its settings, and describe it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_mcp.config.persist import Persist
from kernel_mcp.config.settings import Settings
from kernel_mcp.launch.rundir import default_base
from kernel_mcp.sessions.grants import grants_of
from kernel_mcp.sessions.persistence import Persistence
from kernel_mcp.sessions.store import SessionStore
from kernel_mcp.units import format_bytes

if TYPE_CHECKING:
    from packaging.requirements import Requirement

logger = logging.getLogger(__name__)

KEPT = "kept"
"""Name of the store's folder in the state folder."""


def store_of(settings: Settings) -> SessionStore:
    """Return the store of servers with these settings; its folder may not exist."""
    persist = settings.persist or Persist(0, math.inf)
    state = settings.state_dir or default_base()
    return SessionStore(
        Path(os.path.realpath(state / KEPT)), most_bytes=persist.bytes, most_s=persist.seconds
    )


def persistence_in_words(persistence: Persistence | None, why: str) -> str:
    """Return, for `info`, which sessions are persisted and how long; `why` if none are."""
    if persistence is None:
        return why
    size = (
        format_bytes(persistence.store.most_bytes) if persistence.store.most_bytes else "no bound"
    )
    time = f"{persistence.store.most_s / 86400:.3g} days"
    which = (
        "sessions with names" if persistence.bare else "the default session and those with names"
    )
    if persistence.by_principal:
        return f"{which}, for the principal: {size} of all, {time} after their last use"
    return (
        f"{which}, for a server in {persistence.folder}: {size} of all, {time} after their last use"
    )


def persistence_of(
    settings: Settings,
    state: Path,
    sandbox: str,
    permits: Callable[[Sequence[str]], tuple[Requirement, ...]],
) -> tuple[Persistence | None, str]:
    """Return the persistence of a server with the state folder `state`, and an empty reason.

    If nothing is persisted, return None and the reason.
    """
    if settings.persist is None:
        return None, "off (--persist off)"
    by_principal = settings.http is not None
    place = Path(os.path.realpath(state / KEPT))
    folder, bare = "", settings.no_auth  # without authentication nobody owns a default session
    if not by_principal:
        try:
            folder = os.path.realpath(Path.cwd())
        except OSError:
            return None, "off: the folder that the server works in was removed"
        bare = folder in ("/", os.path.realpath(os.environ.get("HOME") or "/"))
        if not bare and place.is_relative_to(folder):
            return (
                None,
                f"off: {place} is in the folder that the server works in, where others put files",
            )
    store = SessionStore(place, most_bytes=settings.persist.bytes, most_s=settings.persist.seconds)
    try:
        store.make()
    except OSError as reason:
        logger.warning("sessions are not kept: %s", reason)
        return None, f"off: {reason}"
    grants = grants_of(settings, sandbox)
    persistence = Persistence(
        store,
        folder=folder,
        bare=bare,
        by_principal=by_principal,
        grants=grants,
        settings=settings,
        permits=permits,
    )
    return persistence, ""
