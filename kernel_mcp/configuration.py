"""Flags, environment variables and TOML become one `Settings`.

Every setting has one name. `idle-timeout` is the flag `--idle-timeout`, the variable
`KERNEL_MCP_IDLE_TIMEOUT` and the key `idle-timeout` of a TOML file; a flag wins over a variable,
a variable over a file, a file over the default.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.settings import Limits, Settings
from kernel_mcp.values import (
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KERNEL_MCP_"
CONFIG_NAME = "kernel-mcp.toml"
TABLE = "kernel-mcp"

SANDBOXES = ("auto", "bwrap", "landlock", "container", "none")
ENGINES = ("auto", "podman", "docker")
PROFILES = ("strict", "default", "data", "open")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its name in all three places, its reader and the words of `--help`."""

    name: str
    field: str
    read: Callable[[Any], object]
    group: str
    metavar: str
    help: str
    default: str

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
    ),
    Option(
        "profile", "profile", choice(*PROFILES), "What code may import", "|".join(PROFILES),
        "the list that --allow adds to: `strict` computes only, without files; `data` adds and "
        "installs numpy, pandas and their kin; `open` refuses nothing", "default",
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
    ),
    Option(
        "allow-source-builds", "allow_source_builds", switch, "What agents may install", "",
        "let `install` build packages that have no wheel, in a sandbox with network", "off",
    ),
    Option(
        "install-size", "install_bytes", size, "What agents may install", "SIZE",
        "disk space of the packages that one session adds", "2G",
    ),
    Option(
        "install-timeout", "install_timeout_s", duration, "What agents may install", "TIME",
        "hard limit of one installation", "5m",
    ),
    Option(
        "memory", "memory_bytes", size, "What a session may use", "SIZE",
        "memory of one session", "2G",
    ),
    Option(
        "cpu", "cpu_seconds", limit_duration, "What a session may use", "SECONDS",
        "processor time of one cell, all its threads and processes together", "no limit",
    ),
    Option(
        "cpus", "cpus", number, "What a session may use", "N",
        "processors one session may keep busy, such as 1.5", "no limit",
    ),
    Option(
        "pids", "pids", count, "What a session may use", "N",
        "processes and threads of one session", "512",
    ),
    Option(
        "disk", "disk_bytes", size, "What a session may use", "SIZE",
        "workspace folder of one session", "1G",
    ),
    Option(
        "timeout", "timeout_s", duration, "How long things take", "TIME",
        "hard limit of a cell: it is interrupted, then its kernel is killed", "10m",
    ),
    Option(
        "wait", "wait_s", duration, "How long things take", "TIME",
        "answer `running` after this long and let the cell go on", "50s",
    ),
    Option(
        "grace", "grace_s", duration, "How long things take", "TIME",
        "from the interrupt of a cell to the kill of its kernel", "3s",
    ),
    Option(
        "idle-timeout", "idle_timeout_s", idle_duration, "How long things take", "TIME",
        "hibernate a session that did nothing for this long: its variables go to disk and come "
        "back with its next cell; `never` keeps it as it is", "1h",
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
    ),
    Option(
        "no-template", "no_template", switch, "Running the server", "",
        "start every kernel cold instead of forking it from a process that has imported everything",
        "off",
    ),
    Option(
        "audit-log", "audit_log", path, "Running the server", "FILE",
        "add a JSON line to FILE for every session, cell, install, file written, refusal and kill",
        "none kept",
    ),
    Option(
        "max-sessions", "max_sessions", count, "Running the server", "N",
        "sessions with a kernel at once; one more, and the longest idle one hibernates", "16",
    ),
    Option(
        "hibernate-sessions", "hibernate_sessions", count, "Running the server", "N",
        "hibernated sessions kept, the newest; 0 ends idle sessions instead", "64",
    ),
    Option(
        "hibernate-size", "hibernate_bytes", size, "Running the server", "SIZE",
        "variables of one hibernated session; what does not fit is lost", "256M",
    ),
    Option(
        "hibernate-disk", "hibernate_total_bytes", size, "Running the server", "SIZE",
        "variables of all hibernated sessions; the oldest sessions are dropped beyond it", "2G",
    ),
    Option(
        "warm", "warm", count, "Running the server", "N",
        "kernels started ahead, so that a new session has one at once; 0 for none", "2",
    ),
    Option(
        "log-level", "log_level", choice(*LOG_LEVELS), "Running the server", "LEVEL",
        "what goes to stderr: " + ", ".join(LOG_LEVELS), "warning",
    ),
)  # fmt: skip

_BY_NAME = {option.name: option for option in OPTIONS}
_LIMITS = frozenset(entry.name for entry in fields(Limits))


def load(flags: Mapping[str, str | list[str]], environ: Mapping[str, str], cwd: Path) -> Settings:
    """Merge all sources into `Settings`; `flags` maps option names (and `config`) to their text.

    Raises ConfigError, one line that names the source of the bad value.
    """
    variables = _variables(environ)
    file = flags.get("config") or environ.get(ENV_PREFIX + "CONFIG")
    values = _from_file(Path(str(file)), cwd) if file else _discovered(cwd)
    for option in OPTIONS:
        if option.name in variables:
            source = f"{option.variable}={variables[option.name]}"
            values[option.field] = _read(option, variables[option.name], source, cwd)
    for option in OPTIONS:
        if option.name in flags:
            given = flags[option.name]
            shown = given if isinstance(given, str) else ",".join(given)
            values[option.field] = _read(option, given, f"{option.flag} {shown}", cwd)
    limits = Limits(**{name: values.pop(name) for name in list(values) if name in _LIMITS})
    return _checked(replace(Settings(limits=limits), **values))


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """`; did you mean X?` for a name that is close to a known one, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(settings: Settings) -> Settings:
    if settings.max_sessions < 1:
        raise ConfigError("max-sessions 0: a server needs room for at least one session")
    return settings


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings among the environment variables; an empty one counts as not set."""
    known = {option.variable: option.name for option in OPTIONS}
    known[ENV_PREFIX + "CONFIG"] = "config"
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in known:
            raise ConfigError(
                f"{variable}: there is no such environment variable{nearest(variable, known)}"
            )
        if text.strip():
            found[known[variable]] = text
    return found


def _discovered(cwd: Path) -> dict[str, Any]:
    """Settings of `kernel-mcp.toml` or else `[tool.kernel-mcp]` of `pyproject.toml` in `cwd`.

    Nobody named this file: it came with the folder, which may be a clone of anything. So it may
    not lift the sandbox, choose a program to run, or place files outside its own folder.
    """
    for name in (CONFIG_NAME, "pyproject.toml"):
        file = cwd / name
        if file.is_file() and (table := _table(file)) is not None:
            _refuse_unsafe(table, file)
            return _values(table, file)
    return {}


def _from_file(file: Path, cwd: Path) -> dict[str, Any]:
    file = cwd / file.expanduser()
    if not file.is_file():
        raise ConfigError(f"--config {file}: there is no such file")
    table = _table(file)
    if table is None:
        raise ConfigError(f"--config {file}: it has no table [tool.{TABLE}]")
    return _values(table, file)


def _table(file: Path) -> dict[str, Any] | None:
    """The settings in a TOML file: the whole of it, or `[tool.kernel-mcp]` where that exists."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise ConfigError(f"{file}: not valid TOML: {reason}") from error
    tool = content.get("tool")
    table = tool.get(TABLE) if isinstance(tool, dict) else None
    if table is None and file.name != "pyproject.toml":
        table = content
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{file}: tool.{TABLE} must be a table")
    return table


def _values(table: Mapping[str, Any], file: Path) -> dict[str, Any]:
    values = {}
    for key, given in table.items():
        option = _BY_NAME.get(key)
        if option is None:
            raise ConfigError(f"{file}: there is no setting {key!r}{nearest(key, _BY_NAME)}")
        values[option.field] = _read(option, given, f"{file}: {key} = {given!r}", file.parent)
    return values


def _refuse_unsafe(table: Mapping[str, Any], file: Path) -> None:
    def refuse(key: str) -> None:
        raise ConfigError(
            f"{file}: {key} = {table[key]!r} is not taken from a file found in the current "
            f"folder; give it as --{key}, or name the file with --config {file.name}"
        )

    if str(table.get("sandbox", "")).strip().lower() in ("none", "landlock"):
        refuse("sandbox")
    for key in (
        "allow-weaker-sandbox", "container-engine", "container-image", "container-runtime",
    ):  # fmt: skip
        if key in table:
            refuse(key)
    if "/" in str(table.get("python", "")):
        refuse("python")
    for key in ("index-url", "find-links", "allow-source-builds"):
        if key in table:
            refuse(key)
    for key in ("workspace", "cache-dir", "state-dir", "audit-log"):
        folder = table.get(key)
        if isinstance(folder, str):
            inside = os.path.realpath(file.parent)
            if not Path(os.path.realpath(file.parent / folder)).is_relative_to(inside):
                refuse(key)


def _read(option: Option, given: object, source: str, base: Path) -> object:
    try:
        value = option.read(given)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if option.read is python and "/" in str(value):
        return str(base / str(value))
    if option.read is places and isinstance(value, tuple):
        return tuple(place if "://" in place else str(base / place) for place in value)
    return base / value.expanduser() if isinstance(value, Path) else value
