"""`kernel-mcp env list`, `env build`, `env prune`: the cache of kernel environments."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import anyio

from kernel_mcp.config.load import HELP, OTHERS, read_settings, settings_from, settings_parser
from kernel_mcp.config.settings import Settings
from kernel_mcp.config.values import GIB, MIB, duration
from kernel_mcp.environments.build import Fitting
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import sources
from kernel_mcp.errors import ConfigError
from kernel_mcp.policy.profiles import profile_entries

_USAGE = "env: expected one of list, build, prune; see kernel-mcp env --help"
_HELP = """\
usage: kernel-mcp env list|build|prune [flags]

The cache of kernel environments.

  list     what is in it: packages, size, last use
  build    build the environment of --allow and --python now
  prune    remove what nobody used for 30 days, and the remains of killed builds

Each has its own flags: kernel-mcp env build --help"""
_ABOUT_BUILD = """\
Build the environment that a server with these flags needs, so that it starts at once. Packages
that cannot be had are left out and named; the exit code is 1 then.
"""
_CACHE = ("cache-dir",)
_BUILDING = (
    "allow", "profile", "python", "index-url", "find-links", "offline", "cache-dir",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run one `env` command; its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_HELP)
        return 0
    if command == "list":
        return _list(_settings("list", "Environments in the cache.", rest, _CACHE))
    if command == "build":
        return anyio.run(_build, _settings("build", _ABOUT_BUILD, rest, _BUILDING))
    if command == "prune":
        return _prune(rest)
    raise ConfigError(_USAGE)


def _settings(name: str, about: str, argv: Sequence[str], shown: Sequence[str]) -> Settings:
    parser = settings_parser(f"kernel-mcp env {name}", about, OTHERS, shown=shown)
    return read_settings(parser, argv)


def _list(settings: Settings) -> int:
    stored = EnvironmentStore(settings.cache_dir).stored()
    for env in stored:
        print(f"{env.path.name}  {_bytes(env.size)}  used {_ago(env.used)}")
        print(f"  {', '.join(env.requested) or 'standard library only'}")
    print(f"{_environments(len(stored))}, {_bytes(sum(env.size for env in stored))}")
    return 0


async def _build(settings: Settings) -> int:
    store = EnvironmentStore(settings.cache_dir, sources=sources(settings))
    store.forget_unfit()
    spec = EnvironmentSpec.for_allow(profile_entries(settings), python=settings.python)
    fitting = Fitting(store, spec)
    started = time.perf_counter()
    env = await fitting.ensure(_tell)
    without = f" without {', '.join(fitting.unfit)}" if fitting.unfit else ""
    took = time.perf_counter() - started
    print(f"{env.python.parent.parent}  ready after {took:.1f} s{without}")
    return 1 if fitting.unfit else 0


async def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _prune(argv: Sequence[str]) -> int:
    parser = settings_parser(
        "kernel-mcp env prune",
        "Remove environments that nobody used for a while, and the remains of killed builds.",
        OTHERS,
        shown=_CACHE,
    )
    parser.add_argument("--older-than", metavar="TIME", help="unused for so long (default: 30d)")
    flags = vars(parser.parse_args(list(argv)))
    given = flags.pop("older_than", "30d")
    try:
        older_than = duration(given)
    except ValueError as error:
        raise ConfigError(f"--older-than {given}: {error}") from None
    store = EnvironmentStore(settings_from(flags).cache_dir)
    removed = anyio.run(store.prune, older_than)
    for folder in removed:
        print(f"removed {folder.name}")
    print(f"{_environments(len(removed))} removed")
    return 0


def _environments(count: int) -> str:
    return "1 environment" if count == 1 else f"{count} environments"


def _bytes(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def _ago(moment: float) -> str:
    days = (time.time() - moment) / 86400
    return f"{days:.0f} days ago" if days >= 1 else "today"
