"""Kinds of grants: what of the operator's world code may use, as the settings say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernel_mcp.config.settings import Settings
from kernel_mcp.records import dataclass


@dataclass(frozen=True, slots=True)
class GrantKind:
    """One kind of grant.

    kind   its word, for people and in names of grants
    field  field of the settings with its values
    name   returns the name of a value; None if all values of the kind are one grant
    text   returns a value as text, without anything secret
    """

    kind: str
    field: str
    name: Callable[[Any], str] | None = None
    text: Callable[[Any], str] = str

    def texts(self, settings: Settings) -> list[str]:
        """Return the values of the settings as texts."""
        return [self.text(value) for value in getattr(settings, self.field)]

    def named(self, settings: Settings) -> Iterator[tuple[str, Any]]:
        """Yield each value of the settings with the name of its grant, such as `mount:/data`."""
        for value in getattr(settings, self.field):
            yield (self.kind if self.name is None else f"{self.kind}:{self.name(value)}"), value


def _name(value: Any) -> str:
    return str(value.name)


KINDS = (
    GrantKind("mount", "mounts", lambda mount: str(mount.guest)),
    GrantKind("network", "network"),
    GrantKind("device", "devices", str),
    GrantKind("env", "variables", _name, _name),
    GrantKind("secret", "secrets", _name),
    GrantKind("attach", "attach"),
    GrantKind("kernel", "kernels", _name),
    GrantKind("tools", "tool_servers", _name, _name),
    GrantKind("ask", "ask", text=lambda seconds: f"{seconds:g} s"),
)


def grant_names(settings: Settings, grants: Sequence[str] = ("*",)) -> frozenset[str]:
    """Return the names of those of `Principal.grants` that this server has."""
    names = frozenset(name for kind in KINDS for name, _ in kind.named(settings))
    return names if "*" in grants else names.intersection(grants)


def granted(
    settings: Settings,
    network: Sequence[str] | None = None,
    tools: Sequence[str] | None = None,
) -> dict[str, list[str]]:
    """Return what is granted, by kind, as texts without anything secret.

    `network` and `tools` are the hosts and tool servers that a session has asked for; None stands
    for all of the settings.
    """
    found = {kind.kind: kind.texts(settings) for kind in KINDS}
    if network is not None:
        found["network"] = list(network)
    if tools is not None:
        found["tools"] = list(tools)
    return {kind: texts for kind, texts in found.items() if texts}


def restricted_to(settings: Settings, grants: Sequence[str]) -> Settings:
    """Return the settings restricted to the grants of a principal; see `Principal.grants`."""
    known = grant_names(settings, grants)
    kept: dict[str, Any] = {
        kind.field: tuple(value for name, value in kind.named(settings) if name in known)
        for kind in KINDS
    }
    return replace(settings, **kept)
