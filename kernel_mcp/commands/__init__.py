"""Commands other than the server: `kernel-mcp doctor`, `env`, `lab` and `image`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import anyio

from kernel_mcp.barriers import in_full, refusal_of
from kernel_mcp.config.load import HELP, OTHERS, read_settings, settings_from, settings_parser
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.build import Fitting
from kernel_mcp.environments.folder import tree_size
from kernel_mcp.environments.metadata import EnvironmentSpec
from kernel_mcp.environments.store import EnvironmentStore
from kernel_mcp.environments.uv import sources
from kernel_mcp.errors import ConfigError, SandboxUnavailable
from kernel_mcp.extensions import install_line
from kernel_mcp.linux.process import allow_many_files, foreign_environment, is_terminal
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.container.engine import Engine
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.units import duration, in_mebibytes

_DOCTOR = """\
Start a sandboxed kernel with every backend this machine has, or with those of --sandbox, and
report what holds, what does not, and what to do about it. Give it the flags of your server.
"""
_EXAMINED = (
    "allow", "profile", "python", "requirements", "project", "index-url", "find-links", "offline",
    "cache-dir", "sandbox",
    "container-engine", "container-image", "container-runtime", "no-template", "memory", "cpus",
    "mount", "network", "secret", "env", "device", "kernel",
    "tool-servers",
)  # fmt: skip
_DOCTOR_EPILOG = """\
exit code: 0 when the sandbox holds that a server with these flags would use, else 1
"""
_EXAMINING = "kernel-mcp doctor: trying kernels in the sandboxes of this machine, up to a minute …"


def run_doctor(argv: Sequence[str]) -> int:
    """Run `doctor` and return its exit code. Raises ConfigError."""
    parser = settings_parser("kernel-mcp doctor", _DOCTOR, _DOCTOR_EPILOG, shown=_EXAMINED)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what is well, too")
    flags = vars(parser.parse_args(list(argv)))
    as_json, verbose = bool(flags.pop("json", False)), bool(flags.pop("verbose", False))
    print(_EXAMINING, file=sys.stderr, flush=True)
    settings = settings_from(flags)
    from kernel_mcp.commands.doctor import diagnosis as report
    from kernel_mcp.commands.doctor import examine

    allow_many_files()
    logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr)

    async def progress(text: str) -> None:
        if is_terminal(sys.stderr):
            print(text, file=sys.stderr, flush=True)

    try:
        diagnosis = anyio.run(examine.examine_all, settings, progress)
    except Exception as error:
        if refusal_of(error) is not None:
            raise
        logging.getLogger(__name__).debug("the examination failed", exc_info=error)
        print(f"kernel-mcp doctor: the examination failed: {in_full(error)}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report.as_json(diagnosis), indent=2))
    else:
        print(report.as_text(diagnosis, colour=is_terminal(sys.stdout), verbose=verbose))
    return 0 if diagnosis.holds else 1


# env: the cache of kernel environments.

_ENV_USAGE = "env: expected one of list, build, prune; see kernel-mcp env --help"
_ENV_HELP = """\
usage: kernel-mcp env list|build|prune [flags]

The cache of kernel environments.

  list     what is in it: packages, size, last use, and downloads
  build    build the environment of --allow and --python now
  prune    remove what nobody used for 30 days, and the remains of killed builds

Each has its own flags: kernel-mcp env build --help"""
_ENV_BUILD = """\
Build the environment that a server with these flags needs, so that it starts at once. Packages
that cannot be had are left out and named; the exit code is 1 then.
"""
_CACHE = ("cache-dir",)
_BUILDING = (
    "allow", "profile", "python", "requirements", "project", "index-url", "find-links", "offline",
    "cache-dir",
)  # fmt: skip


def run_env(argv: Sequence[str]) -> int:
    """Run one `env` command and return its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_ENV_HELP)
        return 0
    if command == "list":
        return _list(_env_settings("list", "Environments in the cache.", rest, _CACHE))
    if command == "build":
        return anyio.run(_build, _env_settings("build", _ENV_BUILD, rest, _BUILDING))
    if command == "prune":
        return _prune(rest)
    raise ConfigError(_ENV_USAGE)


def _env_settings(name: str, about: str, argv: Sequence[str], shown: Sequence[str]) -> Settings:
    parser = settings_parser(f"kernel-mcp env {name}", about, OTHERS, shown=shown)
    return read_settings(parser, argv)


def _list(settings: Settings) -> int:
    store = EnvironmentStore(settings.cache_dir)
    stored, downloads = store.stored(), store.downloads
    for found in stored:
        print(f"{found.path.name}  {in_mebibytes(found.size)}  used {_ago(found.used)}")
        print(f"  {', '.join(found.requested) or 'standard library only'}")
    size = in_mebibytes(sum(found.size for found in stored))
    kept = f"{in_mebibytes(tree_size(downloads))} of downloads in {downloads}"
    print(f"{_environments(len(stored))}, {size}; {kept}")
    return 0


async def _build(settings: Settings) -> int:
    store = EnvironmentStore(settings.cache_dir, sources=sources(settings))
    store.forget_unfit()
    listed = await store.read_pinned(settings)
    spec = EnvironmentSpec.for_allow(settings.allow, python=settings.python, pinned=listed)
    fitting = Fitting(store, spec)
    started = time.perf_counter()
    built = await fitting.ensure(_tell)
    without = f" without {', '.join(fitting.unfit)}" if fitting.unfit else ""
    took = time.perf_counter() - started
    print(f"{built.python.parent.parent}  ready after {took:.1f} s{without}")
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


def _ago(moment: float) -> str:
    days = (time.time() - moment) / 86400
    return f"{days:.0f} days ago" if days >= 1 else "today"


# lab: running sessions as live notebooks.

_LAB = f"""\
Start JupyterLab on loopback, with a random token, in which each running session of this user is a
live notebook: the cells of its agent appear as they run, and cells of yours run in the session.
JupyterLab has no terminals, no kernels and no files but those, and nothing that a session puts out
can run in it. Needs the extra `lab`:
{install_line("lab")}
"""
_LAB_PORT = 8888


def run_lab(argv: Sequence[str]) -> int:
    """Run `lab` and return its exit code. Raises ConfigError."""
    parser = settings_parser("kernel-mcp lab", _LAB, OTHERS, shown=("state-dir",))
    parser.add_argument("--port", type=int, metavar="N", help=f"default: {_LAB_PORT}, or the next")
    flags = vars(parser.parse_args(list(argv)))
    port = flags.pop("port", None) or _LAB_PORT
    from kernel_mcp.commands.sessions import state_folder

    state = state_folder(settings_from(flags))
    missing = [name for name in ("jupyterlab", "jupyter_server_ydoc") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"lab: {' and '.join(missing)} cannot be imported: {install_line('lab')}")
    from kernel_mcp.lab.app import run_lab as run

    return run(state, port)


# image: the image for the kernels of `--sandbox container`.

CONTAINERFILE = Path(__file__).with_name("Containerfile")
_IMAGE_BUILD = """\
Build the image that kernels run in under --sandbox container, name it as --container-image says,
and start a process in it as a test. It holds a C library, certificates and fonts: interpreter and
packages are mounted.
"""
_IMAGE_EPILOG = """\
examples:
  kernel-mcp image build
  kernel-mcp image build --engine docker --from debian:trixie-slim
  debootstrap --variant=minbase bookworm root && tar -C root -c . > root.tar
  kernel-mcp image build --from root.tar
"""
_IMAGE_USAGE = "image: expected build; see kernel-mcp image build --help"
_IMAGE_HELP = """\
usage: kernel-mcp image build [flags]

  build    make the image that the kernels of --sandbox container run in

Its flags: kernel-mcp image build --help"""
_CONTAINERS = ("container-engine", "container-image", "container-runtime")


def run_image(argv: Sequence[str]) -> int:
    """Run `image build` and return its exit code. Raises ConfigError, SandboxUnavailable."""
    if argv and argv[0] in HELP:
        print(_IMAGE_HELP)
        return 0
    if not argv or argv[0] != "build":
        raise ConfigError(_IMAGE_USAGE)
    parser = settings_parser(
        "kernel-mcp image build", _IMAGE_BUILD, f"{_IMAGE_EPILOG}\n{OTHERS}", shown=_CONTAINERS
    )
    group = parser.add_argument_group("the image")
    group.add_argument(
        "--engine", dest="container-engine", metavar="podman|docker", help="--container-engine"
    )
    group.add_argument(
        "--from",
        dest="base",
        metavar="IMAGE|TAR",
        help="base image of the Containerfile, or a root filesystem to take as it is "
        "(default: debian:bookworm-slim)",
    )
    flags = vars(parser.parse_args(list(argv[1:])))
    base = str(flags.pop("base", ""))
    options = ContainerOptions.of(settings_from(flags))
    engine = Engine.find(options)
    command = build_command(engine, options.image, base)
    done = subprocess.run(command, env=foreign_environment(), check=False)
    if done.returncode != 0:
        raise SandboxUnavailable(
            f"{engine.kind} could not build the image (exit code {done.returncode}); what it wrote "
            "says why. Without a registry, give a root filesystem with --from"
        )
    select_sandbox("container", container=options)
    print(f"the image {options.image} is ready; a process ran in it", file=sys.stderr)
    return 0


def build_command(engine: Engine, name: str, base: str) -> list[str]:
    """Return the engine's command line; a `base` that is a file is imported. Raises ConfigError."""
    if base.startswith("-"):
        raise ConfigError(f"--from {base}: expected the name of an image or a tar file")
    if base and Path(base).is_file():
        return engine.command("import", base, name)
    if base.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.zst")):
        raise ConfigError(f"--from {base}: there is no such file")
    chosen = ["--build-arg", f"BASE={base}"] if base else []
    words = ["--tag", name, "--file", str(CONTAINERFILE), *chosen, str(CONTAINERFILE.parent)]
    return engine.command("build", *words)
