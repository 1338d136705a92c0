"""The server's own process: its signals, its C heap, and the programs that it starts."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kernel_specs import linux


def tie_to_server() -> list[str]:
    """Return a command prefix that kills a program with the server; empty without setpriv."""
    setpriv = find_program("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]


def free_descriptors() -> int:
    """Return the number of descriptors that this process may still open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return sys.maxsize if most == resource.RLIM_INFINITY else most - held


# The C heap: return unused memory to the system. By default glibc uses a heap per thread.
SWITCH_S = 0.0005
"""Thread switch interval in seconds, a tenth of Python's default."""
_LARGE_BYTES = 1 << 20
"""Size in bytes from which freed blocks, or a free end of the heap, return to the system."""


def keep_small() -> None:
    """Use one heap for all threads, with large blocks outside; call it before threads start."""
    linux.mallopt(linux.M_ARENA_MAX, 1)
    linux.mallopt(linux.M_MMAP_THRESHOLD, _LARGE_BYTES)
    linux.mallopt(linux.M_TRIM_THRESHOLD, _LARGE_BYTES)


def allow_many_files() -> None:
    """Raise RLIMIT_NOFILE to its hard limit: a session uses some twenty descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def switch_often() -> None:
    """Set the interpreter's switch interval to `SWITCH_S`, which bounds delays by other threads."""
    sys.setswitchinterval(SWITCH_S)


def trim(*, collect: bool = True) -> None:
    """Return unused memory to the system, which takes a few milliseconds.

    With `collect` garbage cycles are freed first: some 40 ms, and 0.3 ms more for each session.
    """
    if collect:
        gc.collect()
    linux.malloc_trim()


def overwrite_arguments(given: Sequence[tuple[str, str]]) -> None:
    """Hide secrets in this process's command line, which /proc shows to every user.

    `given` has pairs of a prefix and a secret; where both follow each other, asterisks replace the
    secret. Raises OSError.
    """
    if not any(begin + rest in argument for begin, rest in given for argument in sys.orig_argv):
        return
    _overwrite(45, given)  # arg_start and arg_end of proc_pid_stat(5)


def take_variable(name: str) -> str | None:
    """Remove a variable from this process's environment and from /proc/PID/environ.

    Return its value, None if it is not set. Raises OSError.
    """
    value = os.environ.pop(name, None)
    if value is not None:
        _overwrite(47, [(f"\0{name}=", value)])  # env_start and env_end
    return value


def _overwrite(field: int, given: Sequence[tuple[str, str]]) -> None:
    """Replace secrets by asterisks in the memory between two addresses in this process's stat."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[field : field + 2])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        raw = b"\0" + memory.read(end - start)
        for begin, rest in ((os.fsencode(begin), os.fsencode(rest)) for begin, rest in given):
            raw = raw.replace(begin + rest, begin + b"*" * len(rest))
        memory.seek(start)
        memory.write(raw[1:])


# Programs to start. None is taken from the current folder, which may be an untrusted clone.
_RUN = (
    "import sys; sys.path = [place for place in sys.path if place]; from runpy import run_module; "
    "run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def find_program(name: str) -> str | None:
    """Return the path of the program with this name on PATH; None if there is none."""
    return shutil.which(name, path=search_path(os.environ))


def search_path(environ: Mapping[str, str]) -> str:
    """Return PATH without relative entries, and without those of projects and environments.

    A shell may add entries of the current project: `.venv/bin`, `node_modules/.bin`. The current
    folder counts as a project unless it is the home folder or above it. Virtual environments are
    always left out, as they may belong to a project above.
    """
    project = _project(environ)
    entries = environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(
        entry
        for entry in entries
        if entry.startswith("/") and not _leads_into(project, entry) and not _of_a_venv(entry)
    )


def foreign_environment() -> dict[str, str]:
    """Return this process's environment with a safe PATH, for programs that start others."""
    return {**os.environ, "PATH": search_path(os.environ)}


def _project(environ: Mapping[str, str]) -> str:
    """Return the current folder if it may be a project; else ""."""
    try:
        folder = os.path.realpath(Path.cwd())
    except OSError:  # the current folder was removed
        return ""
    home = os.path.realpath(environ.get("HOME") or "/")
    return "" if Path(home).is_relative_to(folder) else folder


def _of_a_venv(entry: str) -> bool:
    """Return True if a path, before or after links are resolved, is in a virtual environment."""
    try:
        places = (Path(os.path.normpath(entry)), Path(os.path.realpath(entry)))
        return any(place.with_name("pyvenv.cfg").exists() for place in places)
    except (OSError, ValueError):  # not accessible, or the root
        return False


def _leads_into(project: str, entry: str) -> bool:
    """Return True if a path, before or after links are resolved, is below the project."""
    places = (Path(os.path.normpath(entry)), Path(os.path.realpath(entry)))
    return bool(project) and any(place.is_relative_to(project) for place in places)


def own_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project.

    A module of the same name in the current folder is ignored.
    """
    return [sys.executable, "-c", _RUN, module, *arguments]


_BARE = (
    "import sys; from importlib import import_module; argv = sys.argv; "
    "sys.path.insert(0, argv.pop(1)); import kernel_mcp, kernel_specs; "
    "sys.path[:] = [*sys.path[1:], *filter(None, argv.pop(1).split(':'))]; "
    "sys.exit(import_module(argv.pop(1)).main(argv[1:]))"
)
_LIBRARIES = ("site-packages", "dist-packages")
_REQUIRED = "anyio"
"""A package that identifies the folders in which this project's requirements are installed."""
_OBEYED = ("SSL_CERT_FILE", "SSL_CERT_DIR", "UV_CONFIG_FILE", "NETRC")
"""Variables that name files with trusted certificates, package sources or credentials."""


def bare_program(module: str, *arguments: str, packages: bool = False) -> list[str]:
    """Return the command that calls `main` of a module of this project.

    Without `packages` only the standard library can be imported, which starts faster. Modules
    beside this project's folders and entries of `.pth` files are not importable.
    """
    folder = str(Path(__file__).parents[2])
    libraries = ":".join(_libraries()) if packages else ""
    words = ["-I", "-S", "-B", "-c", _BARE, folder, libraries, module]
    return [sys.executable, *words, *arguments]


def own_places() -> tuple[Path, ...]:
    """Return the paths of the code and settings that this process and its programs use.

    No session may change them.
    """
    folder = Path(__file__).parents[2]
    found = [folder / "kernel_mcp", folder / "kernel_specs"]
    found += map(Path, (sys.prefix, sys.base_prefix, *_libraries()))
    found += [Path(os.environ[name]) for name in _OBEYED if os.environ.get(name)]
    found += [Path(place) for place in os.get_exec_path() if place.startswith("/")]
    return tuple(dict.fromkeys(Path(os.path.realpath(each)) for each in found))


def import_nothing_from(folders: Sequence[Path]) -> None:
    """Remove the entries of sys.path that lie in `folders`, except those in `own_places`."""
    own = own_places()

    def changing(place: str) -> bool:
        real = Path(os.path.realpath(place))
        kept = any(real.is_relative_to(each) for each in own)
        return not kept and any(real.is_relative_to(each) for each in folders)

    sys.path[:] = [place for place in sys.path if not changing(place)]


def _libraries() -> list[str]:
    """Return the entries of sys.path in which packages are installed."""
    return [
        place for place in sys.path if place.endswith(_LIBRARIES) or Path(place, _REQUIRED).is_dir()
    ]


# Signals: supervisors block SIGINT or SIGTERM, shells ignore SIGINT for background jobs. Kernels
# would inherit this, and could not be interrupted.
_LEFT = frozenset(
    {
        signal.SIGPIPE,  # Python ignores both, and restores the default in its children
        signal.SIGXFSZ,
        signal.SIGTSTP,  # job control of a shell
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)


def is_terminal(stream: TextIO | None) -> bool:
    """Return True for a terminal; False for None, as for a closed stream."""
    return stream is not None and stream.isatty()


def has_terminal() -> bool:
    """Return True if this process has a controlling terminal, whose end sends it SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def plain_signals() -> None:
    """Unblock all signals and ignore none; no effect outside the main thread.

    Call it before the first thread and process, which would inherit both.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals() - _LEFT:
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if usual else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
