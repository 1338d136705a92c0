"""Flags, environment variables and TOML become one `Settings`.

Every setting has one name. `idle-timeout` is the flag `--idle-timeout`, the variable
`KERNEL_MCP_IDLE_TIMEOUT` and the key `idle-timeout` of a TOML file; a flag wins over a variable,
a variable over a file, a file over the default.

A file that nobody named, found in the current folder, came with that folder, which may be a clone
of anything. It may only narrow what holds without it (`Option.narrows`); the keys that would do
more are left out and told.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kernel_mcp.config.narrowing import never
from kernel_mcp.config.options import ENV_PREFIX, OPTIONS, Option
from kernel_mcp.config.settings import Limits, Refusal, Settings
from kernel_mcp.config.values import places, python
from kernel_mcp.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_NAME = "kernel-mcp.toml"
TABLE = "kernel-mcp"
MAX_FILE_BYTES = 1024 * 1024
"""Of a configuration file: those of projects have some KiB."""
MAX_SHOWN = 100
"""Characters of a key or a value in an error, which is one line."""

_BY_NAME = {option.name: option for option in OPTIONS}
_LIMITS = frozenset(entry.name for entry in fields(Limits))


def load(flags: Mapping[str, str | list[str]], environ: Mapping[str, str], cwd: Path) -> Settings:
    """Merge all sources into `Settings`; `flags` maps option names (and `config`) to their text.

    Raises ConfigError, one line that names the source of the bad value.
    """
    variables = _variables(environ)
    file = flags.get("config") or environ.get(ENV_PREFIX + "CONFIG")
    values = _from_file(Path(str(file)), cwd) if file else {}
    for option in OPTIONS:
        if option.name in variables:
            source = f"{option.variable}={variables[option.name]}"
            values[option.field] = _read(option, variables[option.name], source, cwd)
    for option in OPTIONS:
        if option.name in flags:
            given = flags[option.name]
            shown = given if isinstance(given, str) else ",".join(given)
            values[option.field] = _read(option, given, f"{option.flag} {shown}", cwd)
    refusal = None
    if not file:
        found, refusal = _discovered(cwd, values)
        values = {**found, **values}
    return _checked(replace(_settings(values), refusal=refusal))


def _settings(values: Mapping[str, Any]) -> Settings:
    limits = Limits(**{name: value for name, value in values.items() if name in _LIMITS})
    rest = {name: value for name, value in values.items() if name not in _LIMITS}
    return replace(Settings(limits=limits), **rest)


def nearest(name: str, known: Iterable[str]) -> str:
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


def _discovered(cwd: Path, own: Mapping[str, Any]) -> tuple[dict[str, Any], Refusal | None]:
    """What `kernel-mcp.toml` or else `[tool.kernel-mcp]` of `pyproject.toml` in `cwd` may set.

    `own` are the operator's values by field. The second is what was refused, None for nothing.
    """
    for name in (CONFIG_NAME, "pyproject.toml"):
        file = cwd / name
        if file.is_file() and (table := _table(file)) is not None:
            return _narrowing(table, file, _settings(own))
    return {}, None


def _narrowing(
    table: Mapping[str, Any], file: Path, own: Settings
) -> tuple[dict[str, Any], Refusal | None]:
    values: dict[str, Any] = {}
    refused: list[str] = []
    for key, given in table.items():
        option = _option(key, file)
        if option.narrows is never:  # whatever it says, it is not even read
            refused.append(key)
            continue
        value = _from_table(option, given, file)
        holder = own.limits if option.field in _LIMITS else own
        if option.narrows(value, getattr(holder, option.field)):
            values[option.field] = value
        else:
            refused.append(key)
    return values, Refusal(file, tuple(refused)) if refused else None


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
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: larger than the {MAX_FILE_BYTES} bytes that are read of it")
        content = tomllib.loads(text.decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of numbers with too many digits, too
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
        option = _option(key, file)
        values[option.field] = _from_table(option, given, file)
    return values


def _option(key: str, file: Path) -> Option:
    option = _BY_NAME.get(key)
    if option is None:
        name = key[:MAX_SHOWN]
        raise ConfigError(f"{file}: there is no setting {name!r}{nearest(name, _BY_NAME)}")
    return option


def _from_table(option: Option, given: object, file: Path) -> object:
    try:
        shown = repr(given)[:MAX_SHOWN]
    except ValueError:  # a number with too many digits
        shown = "…"
    return _read(option, given, f"{file}: {option.name} = {shown}", file.parent)


def _read(option: Option, given: object, source: str, base: Path) -> object:
    try:
        value = option.read(given)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    except OverflowError:
        raise ConfigError(f"{source}: the number is too large") from None
    if option.read is python and "/" in str(value):
        return str(base / str(value))
    if option.read is places and isinstance(value, tuple):
        return tuple(place if "://" in place else str(base / place) for place in value)
    return base / value.expanduser() if isinstance(value, Path) else value
