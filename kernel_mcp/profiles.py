"""What a profile installs, besides what it allows to be imported."""

from __future__ import annotations

from kernel_mcp.config.settings import Settings
from kernel_mcp.policy.stdlib import DATA_MODULES


def entries(settings: Settings) -> tuple[str, ...]:
    """All names the environment of the kernels has to serve, as `--allow` takes them."""
    if settings.profile != "data":
        return settings.allow
    return (*settings.allow, *sorted(DATA_MODULES))
