"""The command line of every command that takes the settings of the server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kernel_mcp import __version__
from kernel_mcp.config.load import load, nearest
from kernel_mcp.config.options import OPTIONS, Option
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import entries, places
from kernel_mcp.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, with the flag that was perhaps meant."""

    commands: Sequence[str] = ()
    """What may stand in the place of a flag, for the same purpose."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            kind = "flag" if word.startswith("-") else "command"
            choices = known if kind == "flag" else self.commands
            message = f"there is no {kind} {word}{nearest(word.partition('=')[0], choices)}"
        raise ConfigError(message)


def settings_parser(
    prog: str, description: str, epilog: str, commands: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser of every setting's flag, grouped; values stay text for `load`.

    `commands` are other first words, one of which was perhaps meant by an unknown one.
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
        _add_flag(groups[option.group], option)
    group = groups["Running the server"]
    group.add_argument("--config", metavar="FILE", help="read settings from this TOML file")
    group.add_argument("--version", action="version", version=f"kernel-mcp {__version__}")
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    if not option.metavar:
        group.add_argument(
            option.flag, dest=option.name, action="store_const", const="true", help=_help(option)
        )
        return
    short = group.add_mutually_exclusive_group()
    short.add_argument(
        option.flag,
        dest=option.name,
        metavar=option.metavar,
        help=_help(option),
        action="append" if option.read in (entries, places) else "store",
    )
    if option.name == "profile":
        short.add_argument(
            "--strict",
            dest=option.name,
            action="store_const",
            const="strict",
            help="the same as --profile strict",
        )


def read_settings(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Settings:
    """Settings from argv, the environment and TOML. Raises ConfigError."""
    return settings_from(vars(parser.parse_args(list(argv))))


def settings_from(flags: Mapping[str, str | list[str]]) -> Settings:
    """Settings from parsed flags, the environment and TOML; says on stderr what was not taken.

    Raises ConfigError.
    """
    settings = load(flags, os.environ, Path.cwd())
    if settings.refusal is not None:
        print(f"kernel-mcp: warning: {settings.refusal}", file=sys.stderr)
    return settings


def _help(option: Option) -> str:
    return f"{option.help} (default: {option.default})".replace("%", "%%")
