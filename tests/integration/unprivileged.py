"""Run a command as an ordinary user, for tests that themselves run as root."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.run_folder import own_folder

USER = 12_345 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""One for each process that runs tests: Linux counts what a user has."""
REPOSITORY = Path(__file__).parents[2]
HOME = own_folder() / f"home-{USER}"
"""No other user's: its caches are refused to whom they do not belong."""


def as_ordinary_user(argv: list[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """The command that runs `argv` in the repository, with `variables`, without any privilege.

    Folders that only root may pass, such as its home, are replaced by ones that show no more
    than the interpreter and the repository.
    """
    more = [f"{name}={value}" for name, value in (variables or {}).items()]
    if os.geteuid() != 0:  # an ordinary user's tests are as they should be
        return ["env", *more, *argv] if more else argv
    needed = {Path(sys.prefix), Path(sys.base_prefix), REPOSITORY}
    closed = {
        parent
        for path in needed
        for parent in path.parents
        if parent.stat().st_mode & 0o005 != 0o005
    }
    HOME.mkdir(mode=0o700, exist_ok=True)
    os.chown(HOME, USER, USER)
    options: list[str] = []
    for folder in sorted(closed, key=lambda path: len(path.parts)):
        if not any(parent in closed for parent in folder.parents):
            options += ["--perms", "0755", "--tmpfs", str(folder)]
    made: set[Path] = set()
    for path in sorted(needed):
        if any(parent in closed for parent in path.parents):
            for parent in reversed(path.parents):
                if any(above in closed for above in parent.parents) and parent not in made:
                    made.add(parent)
                    options += ["--perms", "0755", "--dir", str(parent)]
            options += ["--bind", str(path), str(path)]
    return [
        *("bwrap", "--dev-bind", "/", "/", *options, "--chdir", str(REPOSITORY), "--"),
        *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
        *("--inh-caps=-all", "--"),  # the bounding set of ordinary users is full
        *("env", "-i", f"HOME={HOME}", "PATH=/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"),
        *(f"PYTHONPATH={REPOSITORY}", f"LOGNAME=kernel-mcp-{USER}"),
        f"XDG_CACHE_HOME={HOME}/.cache",
        "KERNEL_MCP_PERSIST=off",
        *more,
        *argv,
    ]


def as_lone_user(argv: list[str]) -> list[str]:
    """The same, where no other process of the user counts towards the limits of the user.

    Linux counts those of each user namespace for themselves.
    """
    if os.geteuid() == 0:
        return as_ordinary_user(argv)
    apart = ("--unshare-user", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc")
    return ["bwrap", *apart, "--", *argv]
