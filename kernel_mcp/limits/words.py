"""Amounts in words."""

from __future__ import annotations

from kernel_mcp.settings import GIB, KIB, MIB


def amount(size: int) -> str:
    """A number of bytes as a person says it, for example `2 GiB` or `1.5 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size} bytes"
