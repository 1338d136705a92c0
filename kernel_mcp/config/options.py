"""Every setting of the server: its name, its reader and its words in `--help`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernel_mcp.config.narrowing import (
    Narrows,
    among,
    never,
    no_further,
    no_more,
    no_more_or_unlimited,
    only_off,
    only_on,
)
from kernel_mcp.config.values import (
    choice,
    count,
    duration,
    entries,
    idle_duration,
    limit_duration,
    number,
    path,
    places,
    python,
    size,
    switch,
    url,
    word,
)

ENV_PREFIX = "KERNEL_MCP_"

SANDBOXES = ("auto", "bwrap", "landlock", "container", "none")
ENGINES = ("auto", "podman", "docker")
PROFILES = ("strict", "default", "data", "open")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its name in all three places, its reader and the words of `--help`.

    `narrows` says whether a value from a file that nobody named, which came with the current
    folder, permits no more than what holds without it; any other is refused there.
    """

    name: str
    field: str
    read: Callable[[Any], object]
    group: str
    metavar: str
    help: str
    default: str
    narrows: Narrows = never

    @property
    def flag(self) -> str:
        """The command-line form."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper().replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(
        "allow", "allow", entries, "What code may import", "NAMES",
        "add modules or packages to the standard library code may import; packages are installed "
        "for the kernels: a comma list, repeatable, '*' allows every import",
        "curated standard library",
        narrows=among,
    ),
    Option(
        "profile", "profile", choice(*PROFILES), "What code may import", "|".join(PROFILES),
        "the list that --allow adds to: `strict` computes only, without files; `data` adds and "
        "installs numpy, pandas and their kin; `open` refuses nothing", "default",
        narrows=no_further(PROFILES),
    ),
    Option(
        "python", "python", python, "What code may import", "VERSION",
        "Python of the kernels: a version from 3.10 to 3.14 or the path of an interpreter",
        "the server's own version",
    ),
    Option(
        "allow-install", "allow_install", entries, "What agents may install", "NAMES",
        "packages that agents may add to a session, with version limits if wanted: a comma list, "
        "repeatable, '*' permits all; code may import what was added",
        "the packages of --allow",
        narrows=among,
    ),
    Option(
        "index-url", "index_url", url, "What agents may install", "URL",
        "package index for environments and installs", "that of uv",
    ),
    Option(
        "find-links", "find_links", places, "What agents may install", "DIR|URL",
        "also look for wheels here; repeatable", "nowhere else",
    ),
    Option(
        "offline", "offline", switch, "What agents may install", "",
        "download nothing: only cached packages can be had", "off",
        narrows=only_on,
    ),
    Option(
        "allow-source-builds", "allow_source_builds", switch, "What agents may install", "",
        "let `install` build packages that have no wheel, in a sandbox with network", "off",
        narrows=only_off,
    ),
    Option(
        "install-size", "install_bytes", size, "What agents may install", "SIZE",
        "disk space of the packages that one session adds", "2G",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "install-timeout", "install_timeout_s", duration, "What agents may install", "TIME",
        "hard limit of one installation", "5m",
        narrows=no_more,
    ),
    Option(
        "memory", "memory_bytes", size, "What a session may use", "SIZE",
        "memory of one session", "2G",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "cpu", "cpu_seconds", limit_duration, "What a session may use", "SECONDS",
        "processor time of one cell, all its threads and processes together", "no limit",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "cpus", "cpus", number, "What a session may use", "N",
        "processors one session may keep busy, such as 1.5", "no limit",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "pids", "pids", count, "What a session may use", "N",
        "processes and threads of one session", "512",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "disk", "disk_bytes", size, "What a session may use", "SIZE",
        "workspace folder of one session", "1G",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "timeout", "timeout_s", duration, "How long things take", "TIME",
        "hard limit of a cell: it is interrupted, then its kernel is killed", "10m",
        narrows=no_more,
    ),
    Option(
        "wait", "wait_s", duration, "How long things take", "TIME",
        "answer `running` after this long and let the cell go on", "50s",
        narrows=no_more,
    ),
    Option(
        "grace", "grace_s", duration, "How long things take", "TIME",
        "from the interrupt of a cell to the kill of its kernel", "3s",
        narrows=no_more,
    ),
    Option(
        "idle-timeout", "idle_timeout_s", idle_duration, "How long things take", "TIME",
        "hibernate a session that did nothing for this long: its variables go to disk and come "
        "back with its next cell; `never` keeps it as it is", "1h",
        narrows=no_more,
    ),
    Option(
        "workspace", "workspace", path, "Where things live", "DIR",
        "keep the files of the sessions in folders below DIR",
        "a private folder, removed with the server",
    ),
    Option(
        "cache-dir", "cache_dir", path, "Where things live", "DIR",
        "keep kernel environments here", "the user's cache folder",
    ),
    Option(
        "cache-size", "cache_bytes", size, "Where things live", "SIZE",
        "disk space of environments made for agents and of downloads: beyond it, and after 30 "
        "days without use, they are removed", "10G",
    ),
    Option(
        "state-dir", "state_dir", path, "Where things live", "DIR",
        "keep sockets, logs and files of running servers here (at most 49 characters)",
        "a folder of yours in /var/tmp",
    ),
    Option(
        "sandbox", "sandbox", choice(*SANDBOXES), "Running the server", "|".join(SANDBOXES),
        "how kernels are confined; `none` gives code all that you may do yourself", "auto",
    ),
    Option(
        "container-engine", "container_engine", choice(*ENGINES), "Running the server",
        "|".join(ENGINES),
        "what runs the kernels of `--sandbox container`; `auto` prefers podman", "auto",
    ),
    Option(
        "container-image", "container_image", word, "Running the server", "NAME",
        "image that those kernels run in; `kernel-mcp image build` makes one", "kernel-mcp",
    ),
    Option(
        "container-runtime", "container_runtime", word, "Running the server", "NAME",
        "OCI runtime of their containers, such as runc, crun or runsc", "that of the engine",
    ),
    Option(
        "allow-weaker-sandbox", "allow_weaker_sandbox", switch, "Running the server", "",
        "let `--sandbox auto` fall back on landlock, which has gaps (see kernel-mcp doctor)", "off",
        narrows=only_off,
    ),
    Option(
        "no-template", "no_template", switch, "Running the server", "",
        "start every kernel cold instead of forking it from a process that has imported everything",
        "off",
    ),
    Option(
        "audit-log", "audit_log", path, "Running the server", "FILE",
        "add a JSON line to FILE for every session, cell, install, file written, refusal, kill and "
        "hibernation",
        "none kept",
    ),
    Option(
        "max-sessions", "max_sessions", count, "Running the server", "N",
        "sessions with a kernel at once; one more, and the longest idle one hibernates", "16",
        narrows=no_more,
    ),
    Option(
        "hibernate-sessions", "hibernate_sessions", count, "Running the server", "N",
        "hibernated sessions kept, the newest; 0 ends idle sessions instead", "64",
        narrows=no_more,
    ),
    Option(
        "hibernate-size", "hibernate_bytes", size, "Running the server", "SIZE",
        "variables of one hibernated session; what does not fit is lost", "256M",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "hibernate-disk", "hibernate_total_bytes", size, "Running the server", "SIZE",
        "variables of all hibernated sessions; the oldest sessions are dropped beyond it", "2G",
        narrows=no_more_or_unlimited,
    ),
    Option(
        "warm", "warm", count, "Running the server", "N",
        "kernels started ahead, so that a new session has one at once; 0 for none", "2",
        narrows=no_more,
    ),
    Option(
        "log-level", "log_level", choice(*LOG_LEVELS), "Running the server", "LEVEL",
        "what goes to stderr: " + ", ".join(LOG_LEVELS), "warning",
    ),
)  # fmt: skip
