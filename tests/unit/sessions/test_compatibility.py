"""A kernel's environment is compared with that of a save."""

from __future__ import annotations

from kernel_mcp.sessions.compatibility import changed
from kernel_mcp.sessions.manifest import Saved


def test_packages_of_other_versions_are_named() -> None:
    saved = Saved("/p", "default", environment=("numpy==1.26", "rich==13", "same==1"))
    assert changed(("numpy==2.0", "same==1"), saved) == (
        "numpy 1.26 is 2.0 now, rich 13 is not there now"
    )
