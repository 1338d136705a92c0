"""The command `kernel-mcp`: argv in, exit code out.

Nothing heavy is imported before it is needed: `--help` and `--version` answer without the MCP SDK.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kernel_mcp import __version__
from kernel_mcp.configuration import load, nearest
from kernel_mcp.errors import ConfigError, KernelMcpError
from kernel_mcp.linux.process import plain_signals
from kernel_mcp.options import OPTIONS, Option
from kernel_mcp.settings import Settings
from kernel_mcp.values import entries, places

EXIT_FAILED = 1
EXIT_USAGE = 2

_ABOUT = """\
An MCP server whose sessions are IPython kernels in a sandbox: variables, files and plots
stay between calls. It speaks MCP over stdin and stdout; an MCP client starts it.
"""

_EPILOG = """\
examples:
  kernel-mcp --allow numpy,pandas,matplotlib
  kernel-mcp --allow 'pandas>=2,<3' --memory 4G --timeout 30m
  kernel-mcp --python 3.12 --workspace ~/notebooks
  claude mcp add notebook -- kernel-mcp --allow numpy,pandas

times are 30, 30s, 5m or 2h; sizes are 512M or 2G; 0 lifts a limit of a session.

Every flag is also an environment variable (--idle-timeout: KERNEL_MCP_IDLE_TIMEOUT) and a key
in kernel-mcp.toml or in [tool.kernel-mcp] of pyproject.toml in the current folder, or in the
file of --config. A flag wins over a variable, a variable over a file. A file that was found and
not named may only narrow what code may do; what it wants beyond that is ignored, and said.
"""

_COMMANDS_HELP = """\
other commands:
  kernel-mcp demo           analyse a CSV through a real server and show the transcript
  kernel-mcp doctor         start a sandboxed kernel and report what holds and what does not
  kernel-mcp env list       kernel environments in the cache
  kernel-mcp env build      build the environment of --allow and --python now
  kernel-mcp env prune      remove cached environments that nobody used for 30 days
  kernel-mcp image build    make the image that the kernels of --sandbox container run in
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, with the flag that was perhaps meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            kind = "flag" if word.startswith("-") else "command"
            choices = known if kind == "flag" else list(_COMMANDS)
            message = f"there is no {kind} {word}{nearest(word.partition('=')[0], choices)}"
        raise ConfigError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors are one line on stderr. Exit codes: 0, 1 failed, 2 wrong usage."""
    plain_signals()
    words = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(words[0]) if words else None
    try:
        if command is not None:
            return command(words[1:])
        return _serve(words)
    except ConfigError as error:
        print(f"kernel-mcp: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KernelMcpError as error:
        print(f"kernel-mcp: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def settings_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser of every setting's flag, grouped; values stay text for `configuration.load`."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} [flags]",
    )
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


def _serve(argv: Sequence[str]) -> int:
    epilog = f"{_EPILOG}\n{_COMMANDS_HELP}"
    settings = read_settings(settings_parser("kernel-mcp", _ABOUT, epilog), argv)
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    from kernel_mcp.boundary import begin_proof
    from kernel_mcp.linux import process
    from kernel_mcp.sandbox.engine import ContainerOptions

    process.keep_small()
    # runs while the import below takes its time
    sandbox = begin_proof(
        settings.sandbox,
        allow_weaker=settings.allow_weaker_sandbox,
        container=ContainerOptions.of(settings),
    )
    gc.disable()  # the import makes a million objects that stay: collecting them costs 0.1 s
    from kernel_mcp.server import serve

    gc.freeze()
    gc.enable()
    return serve(settings, sandbox)


def _demo(argv: Sequence[str]) -> int:
    from kernel_mcp.demo import main as demo

    return demo(argv)


def _doctor(argv: Sequence[str]) -> int:
    from kernel_mcp.doctor import main as doctor

    return doctor(argv)


def _env(argv: Sequence[str]) -> int:
    from kernel_mcp.environments.commands import main as env

    return env(argv)


def _image(argv: Sequence[str]) -> int:
    from kernel_mcp.sandbox.image import main as image

    return image(argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "demo": _demo,
    "doctor": _doctor,
    "env": _env,
    "image": _image,
}
