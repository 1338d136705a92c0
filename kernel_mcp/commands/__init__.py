"""Commands other than the server: `kernel-mcp doctor`, `env`, `sessions`, `lab` and `image`."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

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
from kernel_mcp.launch.rundir import default_base
from kernel_mcp.linux.process import allow_many_files, foreign_environment, is_terminal
from kernel_mcp.output.text import one_line
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.container.engine import Engine
from kernel_mcp.sandbox.select import select_sandbox
from kernel_mcp.units import GIB, MIB, duration

if TYPE_CHECKING:
    from kernel_mcp.sessions.store import SessionStore

_DOCTOR = """\
Start a sandboxed kernel with every backend this machine has, or with those of --sandbox, and
report what holds, what does not, and what to do about it. Give it the flags of your server.
"""
_EXAMINED = (
    "allow", "profile", "python", "requirements", "project", "index-url", "find-links", "offline",
    "cache-dir", "sandbox",
    "container-engine", "container-image", "container-runtime", "no-template", "memory", "cpus",
    "mount", "network", "secret", "env", "device", "kernel",
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
        print(f"{found.path.name}  {_bytes(found.size)}  used {_ago(found.used)}")
        print(f"  {', '.join(found.requested) or 'standard library only'}")
    size = _bytes(sum(found.size for found in stored))
    kept = f"{_bytes(tree_size(downloads))} of downloads in {downloads}"
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


def _bytes(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def _ago(moment: float) -> str:
    days = (time.time() - moment) / 86400
    return f"{days:.0f} days ago" if days >= 1 else "today"


# sessions: running and persisted ones.

_SESSIONS_USAGE = "sessions: expected one of list, join, forget; see kernel-mcp sessions --help"
_SESSIONS_HELP = """\
usage: kernel-mcp sessions list|join|forget [flags]

Sessions of running servers, and those that outlive theirs: each is there again for the next server
in its folder.

  list                    all of this user, with the folder of each; and those that servers of
                          this user have now, with principal, state, memory, cells, age, and
                          the cells that tasks of clients follow
  join [SESSION]          print the connection file through which people's programs, such as
                          `jupyter console --existing FILE`, work in a running session beside
                          its agent; a handle or a name, needed where there are several
  forget NAME...          remove what is kept of sessions of the current folder; `default` is
                          the one that calls use which name none
  forget --all            remove what is kept of all sessions of this user

Each has its own flags: kernel-mcp sessions forget --help"""
_STATE = ("state-dir", "persist")


def run_sessions(argv: Sequence[str]) -> int:
    """Run one `sessions` command and return its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_SESSIONS_HELP)
        return 0
    about = {
        "list": "Sessions that are kept, and those of running servers.",
        "join": "Print the connection file of a running session, for people's programs.",
        "forget": "Remove what is kept of sessions.",
    }
    if command not in about:
        raise ConfigError(_SESSIONS_USAGE)
    parser = settings_parser(f"kernel-mcp sessions {command}", about[command], OTHERS, shown=_STATE)
    if command == "join":
        parser.add_argument("session", nargs="?", default="", help="its handle or name")
    if command == "forget":
        parser.add_argument("names", nargs="*", metavar="NAME", help="of sessions of --folder")
        parser.add_argument("--folder", metavar="DIR", help="where (default: the current folder)")
        parser.add_argument("--all", action="store_true", help="all sessions of this user")
    flags = vars(parser.parse_args(list(rest)))
    names = [str(name) for name in flags.pop("names", None) or ()]
    folder, every = flags.pop("folder", None) or ".", bool(flags.pop("all", False))
    joined = str(flags.pop("session", ""))
    from kernel_mcp.sessions.persistence_setup import store_of

    settings = settings_from(flags)
    state = _state(settings)
    if command == "join":
        return _join(state, joined)
    store = store_of(settings)
    if command == "list":
        _list_sessions(store)
        return _list_running(state)
    if not (names or every):
        raise ConfigError("sessions forget: expected names of sessions, or --all")
    return _forget_sessions(store, os.path.realpath(folder), None if every else names)


def _list_sessions(store: SessionStore) -> None:
    from kernel_mcp.sessions.words import moment

    store.collect()
    found = store.entries()
    now = store.now()
    for each in found:
        saved = each.saved
        key = "?  (never saved, or of another version of kernel-mcp)"
        if saved is not None:
            key = f"{one_line(saved.folder)}  {one_line(saved.name)}"
        left = max(0.0, (each.used + store.most_s - now) / 86400)
        ends = "in use" if each.held else f"goes in {left:.1f} days"
        names = saved.names if saved is not None else ()
        when = moment(saved.moment, now) if saved is not None and saved.moment else "never"
        print(f"{key}  {len(names)} variables, saved {when}, {_bytes(each.bytes)}, {ends}")
    count = "1 session" if len(found) == 1 else f"{len(found)} sessions"
    print(f"{count}, {_bytes(sum(each.bytes for each in found))}")


def _list_running(state: Path) -> int:
    """Print the sessions of running servers; those that do not answer are left out."""
    from kernel_mcp.sessions.admin import ask_all

    for server in ask_all(state):
        sessions = server["sessions"]
        for each in sessions:
            called = one_line(f"{each['session']}  {each['name'] or '-'}  {each['principal']}")
            size, age = _bytes(each["memory_bytes"]), _age(each["age_s"])
            facts = [each["state"], size, _cells(each["cells"]), f"{age} old"]
            if tasks := each.get("tasks"):  # a server of an earlier version has none
                facts.append(f"followed by tasks: {', '.join(map(str, tasks))}")
            if asks := each.get("asks"):
                facts.append(f"cell {asks} waits for a person's answer")
            print(f"{called}  {', '.join(facts)}")
        where = f"on {server['http']}" if server["http"] else "on stdin and stdout"
        count = "1 session" if len(sessions) == 1 else f"{len(sessions)} sessions"
        size = _bytes(sum(each["memory_bytes"] for each in sessions))
        folder = one_line(server["folder"])
        print(f"server {server['pid']} {where} in {folder}: {count} now, {size}")
    return 0


def _state(settings: Settings) -> Path:
    """Return the folder in which running servers are looked for.

    Raises ConfigError if other users could answer in their place.
    """
    if settings.state_dir is not None:
        return settings.state_dir
    path = default_base()
    with suppress(FileNotFoundError):
        found = path.lstat()
        alone = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        if not alone or found.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} is not a folder of this user alone: what answers there may be no server "
                "of this user's. Remove it (see `ls -ld`), or name the servers' with --state-dir"
            )
    return path


def _join(state: Path, session: str) -> int:
    """Print the connection file of a session; return 1 unless exactly one session matches."""
    from kernel_mcp.sessions.admin import ask_all

    answers = list(ask_all(state, {"join": session}))
    files = [str(each["file"]) for each in answers if "file" in each]
    if len(files) == 1:
        print(files[0])
        return 0
    if not answers:
        print(f"no server of this user runs with its state in {state}", file=sys.stderr)
    for each in answers:
        said = each.get("error") or f"Session {each['session']} of several servers has that name."
        print(one_line(str(said)), file=sys.stderr)
    return 1


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _forget_sessions(store: SessionStore, folder: str, names: Sequence[str] | None) -> int:
    """Remove persisted sessions of a folder, or all for None; return 1 if one could not be."""
    from kernel_mcp.sessions.manifest import SessionKey

    store.collect()
    there = {each.id: each for each in store.entries()}
    wanted = [*there] if names is None else [SessionKey(folder, name).id for name in names]
    failed = 0
    if names is None:
        store.drop_words()
    for number, each in enumerate(wanted):
        known = there.get(each)
        called = each
        if known is not None and known.saved is not None:
            called = one_line(known.saved.name)
        called = names[number] if names is not None else called
        if known is None:
            print(f"nothing is kept of {called} in {folder}", file=sys.stderr)
        elif not store.forget(each):
            print(f"{called} is in use by a server: end it first", file=sys.stderr)
        else:
            print(f"forgot {called}")
            continue
        failed = 1
    return failed


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
    state = _state(settings_from(flags))
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
