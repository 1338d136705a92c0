"""Limits that a session asks for: memory, processors, time and network, within the operator's."""

from __future__ import annotations

from dataclasses import replace

from kernel_mcp.config.narrowing import no_more_or_unlimited
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.config.values import hosts
from kernel_mcp.errors import InputError
from kernel_mcp.tool_context import ToolContext
from kernel_mcp.tools.arguments import Share
from kernel_mcp.units import format_bytes


def own_words(limits: Limits | None, timeout_s: float) -> str:
    """Return a sentence on the limits that a session has asked for; empty for none."""
    words = [f"{timeout_s:g} s for a cell"] if timeout_s else []
    if limits is not None:
        time = f"{limits.cpu_seconds:g} s of their time for a cell" if limits.cpu_seconds else ""
        cpus = f"{limits.cpus:g} processors" if limits.cpus else ""
        memory = f"memory {format_bytes(limits.memory_bytes)}" if limits.memory_bytes else ""
        words = [*filter(None, (memory, cpus, time)), *words]
    return f" Limits: {', '.join(words)}." if words else ""


def own_timeout(settings: Settings, timeout_s: float | None) -> float:
    """Return the seconds a call has asked for, 0 for none. Raises InputError if too many."""
    if timeout_s is not None and timeout_s > settings.max_timeout_s:
        raise _too_much(
            "timeout", f"{timeout_s:g} s", f"{settings.max_timeout_s:g} s", "max-timeout"
        )
    return timeout_s or 0.0


def own_network(services: ToolContext, network: list[str] | None) -> tuple[str, ...] | None:
    """Return the hosts to which a session that asks for these may connect; None for no request.

    Raises InputError for hosts that the operator has not granted, and without a sandbox.
    """
    if network is None:
        return None
    if not services.settings.confined:
        raise InputError(
            "network: there is no sandbox here (--sandbox none) that could limit it. Leave it out."
        )
    wanted = hosts(network)
    services.assembly.network.rules_for(wanted)
    return wanted


def own_tools(settings: Settings, tools: list[str] | None) -> tuple[str, ...] | None:
    """Return the tool servers of a session that asks for these; None for no request.

    Raises InputError for one that the operator has not granted.
    """
    known = [each.name for each in settings.tool_servers]
    for name in tools or ():
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none (--tool-servers)"
            raise InputError(f"tools: this server has no tool server {name[:40]!r}; {there}.")
    return None if tools is None else tuple(dict.fromkeys(tools))


def own_limits(services: ToolContext, memory: int | None, cpu: Share | None) -> Limits | None:
    """Return the limits of a session that asks for these; None if they are the server's own.

    `memory` is in bytes. Raises InputError for more than the operator permits, and for limits that
    cannot be enforced.
    """
    own = services.settings.limits
    cpu = cpu or Share()
    wanted = replace(
        own,
        memory_bytes=own.memory_bytes if memory is None else memory,
        cpus=cpu.cpus or own.cpus,
        cpu_seconds=cpu.seconds or own.cpu_seconds,
    )
    if not no_more_or_unlimited(wanted.memory_bytes, own.memory_bytes):
        asked = format_bytes(wanted.memory_bytes) if memory else "no limit"
        raise _too_much("memory", asked, format_bytes(own.memory_bytes), "memory")
    if not no_more_or_unlimited(wanted.cpus, own.cpus):
        raise _too_much("cpu", f"{cpu.cpus:g} processors", f"{own.cpus:g}", "cpus")
    if not no_more_or_unlimited(wanted.cpu_seconds, own.cpu_seconds):
        raise _too_much("cpu", f"{cpu.seconds:g} s", f"{own.cpu_seconds:g} s", "cpu")
    if cpu.cpus and not services.assembly.resources.limits_processors:
        raise InputError(
            f"cpu={cpu.cpus:g} cannot be enforced: no control group limits processors here. Leave "
            "it out, or limit the processor time of a cell, such as cpu='30s'."
        )
    return None if wanted == own else wanted


def _too_much(name: str, asked: str, most: str, flag: str) -> InputError:
    return InputError(
        f"{name}: {asked} is more than the operator permits. Ask for at most {most} (--{flag}), or "
        "leave it out."
    )
