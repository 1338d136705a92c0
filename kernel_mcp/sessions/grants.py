"""Grants of a server's sessions, compared with those at a save."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_mcp.config.grants import KINDS
from kernel_mcp.config.settings import Settings

_FULL = ("bwrap", "container")
"""Sandboxes that isolate fully: a change to one of these grants nothing more."""
_CHOSEN = ("attach", "kernel", "ask")
"""Such a kernel, and a client that asks a person, is chosen by a call: no saved session has one."""


def grants_of(settings: Settings, sandbox: str) -> dict[str, tuple[str, ...]]:
    """Return the grants of a server's sessions, by kind; `*` stands for all of a kind."""
    mounts = []
    for each in settings.mounts if sandbox != "none" else ():
        place = str(each.host) if str(each.host) == each.guest else f"{each.host} at {each.guest}"
        mounts.append(place)
        mounts += [f"{place} to write"] * each.writable
        mounts += [f"{place} not strict"] * (not each.strict)
    tools = [each.name for each in settings.tool_servers]
    tools += [f"{each.name} trusted" for each in settings.tool_servers if each.trust]
    tools += [f"{each} unasked" for each in settings.allow_tools]
    hosts = dict.fromkeys((*settings.network, *(each.host for each in settings.secrets)))
    return {
        **{each.kind: tuple(each.texts(settings)) for each in KINDS if each.kind not in _CHOSEN},
        "sandbox": (sandbox,),
        "mount": tuple(mounts),
        "tools": tuple(tools),
        "network": tuple(hosts) if sandbox != "none" else ("*",),
    }


def wider_grants(
    now: Mapping[str, tuple[str, ...]], then: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Return, in words, the grants of now that were not given at the save."""
    found = []
    for kind, opened in now.items():
        before = then.get(kind, ())
        if kind == "sandbox":
            if opened != before and not set(opened) <= set(_FULL):
                found.append(f"sandbox {', '.join(opened)}")
            continue
        more = [] if "*" in before else [each for each in opened if each not in before]
        if more:
            found.append(f"{kind} {', '.join(more)}")
    return found
