"""The command `kernel-mcp`: argv in, exit code out.

Imports are deferred: `--help` and `--version` answer without the MCP SDK.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from kernel_mcp.barriers import refusal_of
from kernel_mcp.config.load import read_settings, settings_parser
from kernel_mcp.config.serving import check_serving
from kernel_mcp.errors import ConfigError
from kernel_mcp.linux.process import is_terminal, plain_signals
from kernel_mcp.telemetry.logs import log_to_stderr

EXIT_FAILED = 1
EXIT_USAGE = 2

_ABOUT = """\
An MCP server whose sessions are IPython kernels in a sandbox: variables, files and plots
stay between calls. It speaks MCP over stdin and stdout, where an MCP client starts it, or over
HTTP (--http).
"""

_EPILOG = """\
examples:
  kernel-mcp --allow numpy,pandas,matplotlib
  kernel-mcp --allow 'pandas>=2,<3' --memory 4G --timeout 30m
  kernel-mcp --python 3.12 --workspace ~/notebooks
  kernel-mcp --http 127.0.0.1:8000 --allow numpy,pandas
  claude mcp add notebook -- kernel-mcp --allow numpy,pandas --allow-install '*'

times are 30, 30s, 5m or 2h; sizes are 512M or 2G; 0 lifts a limit of a session.

Every flag is also an environment variable (--idle-timeout: KERNEL_MCP_IDLE_TIMEOUT) and a key
in kernel-mcp.toml or in [tool.kernel-mcp] of pyproject.toml in the current folder, or in the
file of --config. A flag wins over a variable, a variable over a file. A file that was found and
not named may only narrow what code may do; what it wants beyond that is ignored, and said.
"""

_WAITING = (
    "kernel-mcp: waiting for MCP messages on stdin; a client starts this command, see kernel-mcp "
    "--help. Ctrl+C ends it."
)

_COMMANDS_HELP = """\
other commands:
  kernel-mcp setup CLIENT   print the entry by which an MCP client starts this server; with --write
                            add it to the client's file
  kernel-mcp doctor         start a sandboxed kernel and report what holds and what does not
  kernel-mcp env list       kernel environments in the cache
  kernel-mcp env build      build the environment of --allow and --python now
  kernel-mcp env prune      remove cached environments that nobody used for 30 days
  kernel-mcp sessions list  sessions that are kept for the next server in their folder
  kernel-mcp sessions forget NAME
                            remove what is kept of one
  kernel-mcp sessions join  where people's programs connect to a running session
  kernel-mcp verify NOTEBOOK
                            run a notebook, or that of a receipt, again and compare
  kernel-mcp lab            JupyterLab in which running sessions are live notebooks
  kernel-mcp image build    make the image that the kernels of --sandbox container run in
  kernel-mcp token add NAME
                            print a new token of NAME for a server with --http and --tokens
  kernel-mcp token list     who has a token, and what for
  kernel-mcp token revoke NAME
                            have all tokens of NAME refused from now on
  kernel-mcp node           have sessions on this machine for the fronts of a fleet (--fleet)
  kernel-mcp fleet status   the nodes of a fleet
  kernel-mcp fleet drain NODE
                            have a node give its sessions to others
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors are one line on stderr. Exit codes: 0, 1 failed, 2 wrong usage."""
    plain_signals()
    if os.geteuid() == 0:  # kernels run as other users then, and must read files made for them
        os.umask(os.umask(0o022) & 0o022)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words in (["version"], ["-v"], ["-V"]):
        words = ["--version"]
    try:
        if words and words[0] in _COMMANDS:
            return _command(words[0])(words[1:])
        return _serve(words)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Python before 3.12 wraps what a signal raises while a class is made, as in an import.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return 130
        if isinstance(error.__cause__, SystemExit):
            raise error.__cause__ from None
        if (refusal := refusal_of(error)) is None:
            raise
        print(f"kernel-mcp: error: {refusal}", file=sys.stderr)
        return EXIT_USAGE if isinstance(refusal, ConfigError) else EXIT_FAILED


def _serve(argv: Sequence[str]) -> int:
    gc.disable()  # imports make a million objects that stay: collecting them costs 0.1 s
    epilog = f"{_EPILOG}\n{_COMMANDS_HELP}"
    settings = read_settings(settings_parser("kernel-mcp", _ABOUT, epilog, list(_COMMANDS)), argv)
    check_serving(settings)
    log_to_stderr(settings.log_level, settings.log_format)
    if settings.http is None:
        if closed := [name for name in ("stdin", "stdout") if getattr(sys, name) is None]:
            raise ConfigError(
                f"{' and '.join(closed)} cannot be used, as whoever started this closed it: a "
                "client speaks MCP there. Start it from a client, or with --http"
            )
        if is_terminal(sys.stdin):
            print(_WAITING, file=sys.stderr)
    if settings.fleet:
        from kernel_mcp.fleet.commands import run_front

        return run_front(settings)
    from kernel_mcp.linux import process
    from kernel_mcp.linux.shutdown import Shutdown
    from kernel_mcp.sandbox.base import ContainerOptions
    from kernel_mcp.sandbox.select import begin_proof

    process.keep_small()
    process.switch_often()
    ending = Shutdown(None if settings.http is None else 0)  # services are stopped at any time
    ending.take_signals()
    # runs during the import below
    sandbox = begin_proof(*settings.sandbox, container=ContainerOptions.of(settings))
    from kernel_mcp.start import serve

    if settings.http is not None:
        from kernel_mcp.start import collect_seldom
        from kernel_mcp.web import run_http

        collect_seldom()
        serve = partial(serve, run=run_http)
    return serve(settings, sandbox, ending)


_COMMANDS = {
    "serve": ("cli", "_serve"),
    "setup": ("commands.setup", "run_setup"),
    "doctor": ("commands", "run_doctor"),
    "env": ("commands", "run_env"),
    "sessions": ("commands.sessions", "run_sessions"),
    "lab": ("commands", "run_lab"),
    "verify": ("commands.verify", "run_verify"),
    "image": ("commands", "run_image"),
    "token": ("commands.token", "run_token"),
    "node": ("fleet.commands", "run_node"),
    "fleet": ("fleet.commands", "run_fleet"),
}
"""Module and function of each command: it is called with the words behind, and returns the exit
code."""


def _command(name: str) -> Callable[[Sequence[str]], int]:
    module, function = _COMMANDS[name]
    found: Callable[[Sequence[str]], int] = getattr(import_module(f"kernel_mcp.{module}"), function)
    return found
