"""Merge flags, environment variables and TOML into one `Settings`.

Every setting has one name. `idle-timeout` is the flag `--idle-timeout`, the variable
`KERNEL_MCP_IDLE_TIMEOUT` and the key `idle-timeout` of a TOML file. A flag overrides a variable, a
variable overrides a file, and a file overrides the default.

A file in the current folder that no flag names came with that folder, which may be a clone of
anything. It may only narrow the operator's settings (`Option.narrows`); the keys that would do
more are ignored and reported.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from kernel_mcp import __version__, extensions
from kernel_mcp.config.attachments import Attachment, attachments
from kernel_mcp.config.kernelspecs import kernelspecs
from kernel_mcp.config.mounts import Mount, mounts
from kernel_mcp.config.narrowing import never
from kernel_mcp.config.options import ENV_PREFIX, IgnoredKeys, Option, variable_of
from kernel_mcp.config.requirements import entries, python
from kernel_mcp.config.secrets import EnvVariable, HeaderSecret, header_secrets, variables
from kernel_mcp.config.settings import OPTIONS, TOOL_GROUPS, Limits, Settings
from kernel_mcp.config.spelling import explained, nearest, replacement, spellings
from kernel_mcp.config.tool_servers import read_tool_servers, tool_names
from kernel_mcp.config.values import devices, hosts, parse_toml, places
from kernel_mcp.errors import ConfigError
from kernel_mcp.linux import gpus
from kernel_mcp.linux.folders import from_home
from kernel_mcp.linux.process import overwrite_arguments, take_variable

CONFIG_NAME = "kernel-mcp.toml"
TABLE = "kernel-mcp"
MAX_FILE_BYTES = 1024 * 1024
"""Largest configuration file that is read; those of projects have some KiB."""
MAX_VARIABLES = 16 * 1024
"""Characters of all values of `--env` together: they are sent to a template in one packet."""
MAX_SHOWN = 100
"""Characters of a key or a value in an error, which is one line."""

_LISTS = (
    attachments,
    devices,
    entries,
    header_secrets,
    hosts,
    kernelspecs,
    mounts,
    places,
    tool_names,
    variables,
)
"""Readers of settings that may be given more than once."""
HELP = ("-h", "--help", "help")
OTHERS = "The other flags of the server are taken too, and change nothing here."

_BY_NAME = {option.name: option for option in OPTIONS}
_LIMITS = frozenset(entry.name for entry in fields(Limits))

_NO_GPU = {
    "landlock": "CUDA names its threads in /proc, where code under Landlock may write nothing",
    "container": "kernels have the libraries of their image, not those of this machine's driver",
}
"""Reasons why code in a sandbox of this kind cannot use a GPU."""


def load(flags: Mapping[str, str | list[str]], environ: Mapping[str, str], cwd: Path) -> Settings:
    """Merge all sources into `Settings`; `flags` maps option names (and `config`) to their text.

    Raises ConfigError, one line that names the source of the bad value.
    """
    set_in = _variables(environ)
    file = flags.get("config") or environ.get(variable_of("config"))
    values = _from_file(Path(str(file)), cwd) if file else {}
    for option in OPTIONS:
        if option.name in set_in:
            source = f"{option.variable}={set_in[option.name]}"
            values[option.field] = _read(option, set_in[option.name], source, cwd)
    for option in OPTIONS:
        if option.name in flags:
            given = flags[option.name]
            shown = given if isinstance(given, str) else ",".join(given)
            values[option.field] = _read(option, given, f"{option.flag} {shown}", cwd)
    refusal = None
    if not file:
        found, refusal = _discovered(cwd, values)
        values = {**found, **values}
    if values.get("gpu"):
        values = _with_gpu(values)
    values, unmounted = _without_home(values, environ.get("HOME", ""))
    named = _file_at(Path(str(file)), cwd) if file else None
    made = replace(_settings(values), ignored_keys=refusal, file=named, unmounted=unmounted)
    return _checked(made, environ)


def _without_home(values: Mapping[str, Any], home: str) -> tuple[dict[str, Any], str]:
    """Return the values without a read-only `--mount .` of a folder that holds the home folder.

    Clients start servers in the folder of a project, or, without one, in such a folder. The second
    value is the reason, empty if nothing was left out.
    """
    real = Path(os.path.realpath(home or "/"))
    closed = {real, *real.parents}
    gone = [
        each
        for each in values.get("mounts", ())
        if each.here and not each.writable and each.host in closed
    ]
    if not gone:
        return dict(values), ""
    left = tuple(each for each in values["mounts"] if each not in gone)
    return {**values, "mounts": left}, (
        f"--mount . shows nothing: {gone[0].host} is, or holds, the home folder, with keys and "
        "settings of all kinds. Start the client in the folder of a project, or name a folder"
    )


def _with_gpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add devices, mount and libraries of this machine's GPU driver. Raises ConfigError."""
    sandbox = values.get("sandbox", Settings().sandbox)
    if reason := _NO_GPU.get(sandbox[0]):
        raise ConfigError(f"--gpu and --sandbox {sandbox[0]}: {reason}. Take --sandbox bwrap")
    found = gpus.driver()
    mounted, folder = values.get("mounts", ()), found.folder
    known = [each.host for each in mounted]
    if folder is not None and not gpus.of_system(folder) and folder not in known:
        mounted = (*mounted, Mount(folder, str(folder)))
    devices = dict.fromkeys((*values.get("devices", ()), *found.devices))
    return {**values, "devices": tuple(devices), "mounts": mounted, "driver": folder}


def _settings(values: Mapping[str, Any]) -> Settings:
    limits = Limits(
        address_space=not values.get("devices"),
        **{name: value for name, value in values.items() if name in _LIMITS},
    )
    rest = {name: value for name, value in values.items() if name not in _LIMITS}
    settings = replace(Settings(limits=limits), **rest)
    if settings.http is not None and not settings.several and "ask" not in values:
        settings = replace(settings, ask=())
    most = settings.max_timeout_s
    if "timeout_s" in values and "max_timeout_s" not in values:
        most = settings.timeout_s
    return replace(settings, max_timeout_s=most, timeout_s=min(settings.timeout_s, most))


def _checked(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Return the settings with values from the server's environment filled in for `--env`.

    Raises ConfigError for settings that contradict each other.
    """
    if settings.max_sessions < 1:
        raise ConfigError("max-sessions 0: a server needs room for at least one session")
    unchecked = {
        "attach": (settings.attach, "what code may do in an attached kernel is limited by nothing"),
        "kernel": (settings.kernels, "only Python code is checked by a profile"),
    }
    for name, (given, why) in unchecked.items():
        if given and settings.profile in ("strict", "guarded"):
            raise ConfigError(
                f"--{name} and --profile {settings.profile}: {why}; leave one of the two out"
            )
    for named in settings.kernels:  # imported before the parts of the server that import at once
        if named.backend:
            extensions.load(extensions.INTERPRETERS, named.backend)
    for group in settings.tools:
        if group not in TOOL_GROUPS:
            extensions.load(extensions.TOOLS, group)
    known = []
    secret = {each.name for each in settings.secrets}
    for each in settings.variables:
        if each.name in secret:
            raise ConfigError(
                f"--env {each.name}, --secret {each.name}: code would read what it is to use "
                "without reading it; leave one of the two out"
            )
        if each.value is None and each.name not in environ:
            raise ConfigError(
                f"--env {each.name}: the server has no such variable; set it where the server is "
                f"started, or give a value: --env {each.name}=VALUE"
            )
        known.append(each if each.value is not None else EnvVariable(each.name, environ[each.name]))
    if sum(len(repr(each.value)) for each in known) > MAX_VARIABLES:
        raise ConfigError(
            f"--env: the values have more than {MAX_VARIABLES:,} characters together; mount a file "
            "that holds them (--mount FILE)"
        )
    return replace(settings, variables=tuple(known))


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings among the environment variables; an empty one counts as not set.

    Raises ConfigError for an unknown one.
    """
    known = {option.variable: option.name for option in OPTIONS}
    known[variable_of("config")] = "config"
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in known:
            name = variable.removeprefix(ENV_PREFIX).lower().replace("_", "-")
            names = {name: name for name in known}
            meant = nearest(variable, spellings(variable_of, "={}") | names)
            raise ConfigError(
                f"{variable}: there is no such environment variable{replacement(name) or meant}"
            )
        if text.strip():
            found[known[variable]] = text
    return found


def _discovered(cwd: Path, own: Mapping[str, Any]) -> tuple[dict[str, Any], IgnoredKeys | None]:
    """Return the accepted values of a file in `cwd`, by field, and the refused keys if any.

    The file is `kernel-mcp.toml` or else `pyproject.toml` with `[tool.kernel-mcp]`. `own` are the
    operator's values by field. Raises ConfigError.
    """
    for name in (CONFIG_NAME, "pyproject.toml"):
        file = cwd / name
        try:
            found = file.is_file()
        except PermissionError as reason:
            raise ConfigError(
                f"cannot look for {file}: {reason.strerror}; start the server in a folder that its "
                "user may enter"
            ) from reason
        if found and (table := _table(file)) is not None:
            return _narrowing(table, file, _settings(own))
    return {}, None


def _narrowing(
    table: Mapping[str, Any], file: Path, own: Settings
) -> tuple[dict[str, Any], IgnoredKeys | None]:
    values: dict[str, Any] = {}
    refused: list[str] = []
    for key, given in table.items():
        option = _option(key, file)
        if option.narrows is never:  # its value is not even parsed
            refused.append(key)
            continue
        value = _from_table(option, given, file)
        holder = own.limits if option.field in _LIMITS else own
        if option.narrows(value, getattr(holder, option.field)):
            values[option.field] = value
        else:
            refused.append(key)
    return values, IgnoredKeys(file, tuple(refused)) if refused else None


def _file_at(file: Path, cwd: Path) -> Path:
    try:
        return cwd / from_home(file)
    except ValueError as error:
        raise ConfigError(f"--config {error}") from None


def _from_file(file: Path, cwd: Path) -> dict[str, Any]:
    file = _file_at(file, cwd)
    if not file.is_file():
        problem = "it is no ordinary file" if file.exists() else "there is no such file"
        raise ConfigError(f"--config {file}: {problem}")
    table = _table(file)
    if table is None:
        raise ConfigError(f"--config {file}: it has no table [tool.{TABLE}]")
    return _values(table, file)


def _table(file: Path) -> dict[str, Any] | None:
    """Return the settings in a TOML file: `[tool.kernel-mcp]` if that exists, else all of it.

    None for a pyproject.toml without that table. Raises ConfigError.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: larger than the {MAX_FILE_BYTES} bytes that are read of it")
        content = parse_toml(text.decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also for numbers with too many digits
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
        meant = replacement(name) or nearest(name, spellings(str, ' = "{}"'))
        raise ConfigError(f"{file}: there is no setting {name!r}{meant}")
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
        if isinstance(value, Path):
            return base / from_home(value)
        if option.read is devices and isinstance(value, tuple):
            return tuple(Path(os.path.normpath(base / from_home(each))) for each in value)
    except ValueError as error:
        if option.read in (variables, attachments, kernelspecs):
            source = option.flag  # without its values, which may be secret
        was = replacement(f"{option.name} {given}") if isinstance(given, str) else ""
        gone = f"; there is no {given}{was}" if was else ""
        raise ConfigError(f"{source}: {error}{gone}") from None
    except OverflowError:
        raise ConfigError(f"{source}: the number is too large") from None
    if option.read is python and "/" in str(value):
        return str(base / str(value))
    if option.read is places and isinstance(value, tuple):
        return tuple(place if "://" in place else str(base / place) for place in value)
    if option.read is attachments and isinstance(value, tuple):
        return tuple(_absolute(each, base) for each in value)
    if option.read is kernelspecs and isinstance(value, tuple):
        return tuple(each.below(base) for each in value)
    if option.read is mounts and isinstance(value, tuple):
        return tuple(_placed(each, base) for each in value)
    return value


def _absolute(one: Attachment, base: Path) -> Attachment:
    if one.is_server:
        return one
    return replace(one, place=os.path.normpath(base / one.place))


def _placed(mount: Mount, base: Path) -> Mount:
    """Return the mount with links of the host path resolved; sessions see the path as given."""
    named = os.path.normpath(base / mount.host)
    try:
        host = os.path.realpath(named)
    except OSError as reason:  # a link that this user may not read
        raise ConfigError(f"--mount {named}: {reason.strerror}") from reason
    return replace(mount, host=Path(host), guest=mount.guest or named)


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, with the flag that was probably meant."""

    commands: Sequence[str] = ()
    """Subcommands, which are suggested for a misspelt first word."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = "=".join(unknown.split()[0].split("=")[:2])  # without the value of --env
            kind = "flag" if word.startswith("-") else "command"
            known = {name: name for name in self.commands}
            if kind == "flag":
                flags = {flag: flag for each in self._actions for flag in each.option_strings}
                known = spellings("--{}".format, " {}") | flags
            name = word.partition("=")[0]
            instead = explained(name.removeprefix("--")) or nearest(name, known)
            message = f"there is no {kind} {word}{instead}"
        raise ConfigError(message)


def settings_parser(
    prog: str,
    description: str,
    epilog: str,
    commands: Sequence[str] = (),
    shown: Collection[str] = tuple(_BY_NAME),
) -> argparse.ArgumentParser:
    """Return a parser of all settings' flags, grouped; values stay text for `load`.

    `commands` are suggested for a misspelt first word. The help lists the flags in `shown`; the
    other flags of a server are accepted, too.
    """
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} [flags]",
    )
    parser.commands = commands
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group.lower())
        _add_flag(groups[option.group], option, hidden=option.name not in shown)
    group = groups["Running the server"]
    group.add_argument("--config", metavar="FILE", help="read settings from this TOML file")
    group.add_argument("--version", action="version", version=f"kernel-mcp {__version__}")
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option, *, hidden: bool) -> None:
    shown = argparse.SUPPRESS if hidden else _help(option)
    if not option.metavar:
        group.add_argument(
            option.flag, dest=option.name, action="store_const", const="true", help=shown
        )
        return
    group.add_argument(
        option.flag,
        dest=option.name,
        metavar=option.metavar,
        help=shown,
        action="append" if option.read in _LISTS else "store",
    )


def read_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """Return the settings from argv, the environment and TOML. Raises ConfigError."""
    return settings_from(vars(parser.parse_args(list(argv))))


def settings_from(flags: Mapping[str, str | list[str]]) -> Settings:
    """Return the settings from parsed flags, the environment and files; warn of ignored keys.

    Warnings go to stderr. Values of secrets are removed from the environment, so that no child
    process inherits them. Raises ConfigError.
    """
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the folder that kernel-mcp was started in has been removed; start it in another one, "
            "which `cd` changes to"
        ) from None
    settings = load(flags, os.environ, cwd)
    servers = read_tool_servers(settings.tool_file, settings.allow_tools, os.environ)
    _hide_arguments(settings)
    values = {name: take_variable(name) for name in {each.name for each in settings.secrets}}
    secrets = tuple(_valued(each, values) for each in settings.secrets)
    settings = replace(settings, secrets=secrets, tool_servers=servers)
    for remark in filter(None, (settings.ignored_keys, settings.unmounted)):
        print(f"kernel-mcp: warning: {remark}", file=sys.stderr)
    return settings


def _hide_arguments(settings: Settings) -> None:
    try:
        tokens = [("token=", each.token) for each in settings.attach if each.token]
        overwrite_arguments([*((f"{name}=", value) for name, value in settings.environ), *tokens])
    except OSError as reason:
        print(
            "kernel-mcp: warning: values of --env and tokens of --attach stay in this process's "
            f"command line, which every user of this machine can read ({reason}): set them by "
            f"environment variables ({variable_of('attach')})",
            file=sys.stderr,
        )


def _valued(secret: HeaderSecret, values: Mapping[str, str | None]) -> HeaderSecret:
    value = values[secret.name]
    if value is None:
        raise ConfigError(
            f"--secret {secret}: the server's environment has no variable {secret.name}; set it "
            "where the server is started, as in `env` of the client's configuration"
        )
    try:
        return secret.with_value(value)
    except ValueError as error:
        raise ConfigError(f"--secret {secret}: {error}") from None


def _help(option: Option) -> str:
    return f"{option.help} (default: {option.default})".replace("%", "%%")
