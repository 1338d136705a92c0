"""Hints about tools, for clients that ask people by them: they follow from what is open.

Without grants code reaches nothing but its session. Each grant changes the hints of the tools that
run code, for the principals that have it.
"""

from __future__ import annotations

from dataclasses import replace

from mcp_types import ToolAnnotations

from kernel_mcp.config.settings import Settings
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of a tool on a server without grants, and which grants it uses.

    reads     changes nothing
    destroys  may take away what is not made anew by calling it again
    repeats   has no further effect when it is called again with the same arguments
    runs      runs code
    writes    writes files
    installs  adds packages
    joins     joins kernels of people
    """

    reads: bool = False
    destroys: bool = False
    repeats: bool = False
    runs: bool = False
    writes: bool = False
    installs: bool = False
    joins: bool = False


READS = Effect(reads=True, repeats=True)
RUNS = Effect(runs=True)
WRITES = Effect(writes=True, repeats=True)
CHANGES = Effect()
DESTROYS = Effect(destroys=True)
INSTALLS = Effect(installs=True, repeats=True)
REPEATS = Effect(repeats=True)
ENDS = replace(DESTROYS, repeats=True)
RUNS_SCRIPTS = replace(RUNS, installs=True)
OPENS = replace(DESTROYS, installs=True, joins=True)


def hints(effect: Effect, title: str, settings: Settings) -> ToolAnnotations:
    """Return all hints about a tool with this effect on a server with these settings.

    None is left out: clients differ in what they take an absent one for, and models read none.
    """
    destroys = effect.destroys or (effect.runs and _reaches_others(settings))
    open_world = effect.runs and (_is_open(settings) or _installs_anything(settings))
    return ToolAnnotations(
        title=title,
        read_only_hint=effect.reads,
        destructive_hint=destroys or (effect.writes and _writes_host(settings)),
        idempotent_hint=effect.repeats,
        open_world_hint=open_world
        or (effect.installs and _installs(settings))
        or (effect.joins and bool(settings.attach)),
    )


def _is_open(settings: Settings) -> bool:
    """Return True if code can reach other machines, or processes outside its sandbox."""
    elsewhere = any(each.elsewhere for each in settings.kernels)
    reached = settings.network or settings.secrets or settings.attach or settings.tool_servers
    return bool(reached) or elsewhere or not settings.confined


def _writes_host(settings: Settings) -> bool:
    """Return True if code can change files of the host, those of `--workspace` included."""
    mounted = any(each.writable for each in settings.mounts)
    return mounted or settings.workspace is not None or not settings.confined


def _reaches_others(settings: Settings) -> bool:
    """Return True if code can affect more than its session: files, hosts, devices, kernels."""
    return _is_open(settings) or _writes_host(settings) or bool(settings.devices)


def _installs(settings: Settings) -> bool:
    """Return True if packages can be added from an index."""
    named = settings.allow_install or any(each != "*" for each in settings.allow)
    return bool(named) and not settings.offline


def _installs_anything(settings: Settings) -> bool:
    """Return True if a line of code can request any package from the index."""
    return "*" in settings.allow_install and not settings.offline
