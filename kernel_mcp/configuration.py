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
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kernel_mcp.errors import ConfigError
from kernel_mcp.options import ENV_PREFIX, OPTIONS, Option
from kernel_mcp.settings import Limits, Settings
from kernel_mcp.values import places, python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "kernel-mcp.toml"
TABLE = "kernel-mcp"

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
    for key in ("index-url", "find-links", "allow-source-builds", "audit-log"):
        if key in table:
            refuse(key)
    for key in ("workspace", "cache-dir", "state-dir"):
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
