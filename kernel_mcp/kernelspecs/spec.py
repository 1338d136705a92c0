"""Kernel specs that the operator has named: which program a kernel is, and what it reads."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernel_mcp.config.kernelspecs import NamedKernelspec
from kernel_mcp.errors import ConfigError
from kernel_mcp.linux.process import find_program
from kernel_mcp.records import dataclass

SPEC_FILE = "kernel.json"
MOST_SPEC_BYTES = 64 * 1024
SYSTEM_FOLDERS = ("/usr/local/share/jupyter", "/usr/share/jupyter")
"""Jupyter's data folders of the system (jupyter_core.paths.SYSTEM_JUPYTER_PATH)."""
SYSTEM_FILES: Mapping[str, tuple[str, ...]] = {
    "R": ("/etc/R", "/etc/fonts", "/etc/os-release", "/var/lib/dpkg/status"),
}
"""Paths outside /usr that a distribution's programs read, by language."""

SIGINT_ENDS = frozenset(("deno", "xpython_launcher"))
"""Programs and modules of kernels that do not survive an interrupt, nor listen on Unix sockets."""
TERMINALS = frozenset(("bash_kernel", "octave_kernel"))
"""Modules of kernels that make a terminal."""


@dataclass(frozen=True, slots=True)
class Kernelspec:
    """A kernel spec, resolved on this machine.

    name          by which sessions ask for it
    spec          name of the kernel spec, as notebooks record it
    argv          command line, its program as an absolute path
    env           environment variables
    readonly      host paths that it reads
    by_message    True if an interrupt is a message instead of a signal
    """

    name: str
    spec: str
    language: str
    display_name: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    readonly: tuple[Path, ...]
    by_message: bool = False

    @property
    def survives(self) -> bool:
        """False if an interrupt ends the kernel."""
        return SIGINT_ENDS.isdisjoint(self._programs)

    def hindrance(self, sandbox: str) -> str:
        """Return why the kernel cannot start in a sandbox; empty if nothing is known against it."""
        if sandbox == "container" and self.argv[0].startswith("/usr/"):
            return "its image has no programs of this machine's /usr"
        if sandbox == "landlock" and not TERMINALS.isdisjoint(self._programs):
            return "there are no terminals, and this kernel makes one"
        if sandbox in ("landlock", "none") and not self.survives:
            return "a kernel has Unix sockets, on which this one cannot listen"
        return ""

    @property
    def _programs(self) -> set[str]:
        return {Path(each).name for each in self.argv}

    @property
    def notebook(self) -> dict[str, dict[str, str]]:
        """The fields `kernelspec` and `language_info` of notebooks, as far as the spec has them."""
        named = {"name": self.spec, "display_name": self.display_name, "language": self.language}
        return {"kernelspec": named, "language_info": {"name": self.language}}


def read_kernelspec(named: NamedKernelspec) -> Kernelspec:
    """Find and read a kernel spec. Raises ConfigError.

    The program is looked up beside the data folder that has the kernel spec, then on PATH without
    the entries of projects.
    """
    file = _file(named)
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_SPEC_BYTES + 1)
        if len(content) > MOST_SPEC_BYTES:
            raise ValueError(f"it has more than {MOST_SPEC_BYTES:,} bytes")
        found = _object(json.loads(content))
        argv = _texts(found.get("argv"))
        env = {**_time_zone(), **_object(found.get("env", {}))}
        own = _object(_object(found.get("metadata", {})).get("kernel_mcp", {}))
        declared = _texts(own.get("readonly", []))
        if not argv:
            raise ValueError("it has no argv")
        if not any("{connection_file}" in each for each in argv):
            raise ValueError("its argv has no {connection_file}, by which its kernel is reached")
        if any("=" in name or "\0" in f"{name}{value}" for name, value in env.items()):
            raise ValueError("its env has a name or a value that no environment variable can have")
        argv[0] = _program(argv[0], file.parent)
    except FileNotFoundError:
        raise ConfigError(f"--kernel {named}: there is no file {file}") from None
    except (OSError, ValueError, RecursionError) as reason:
        raise ConfigError(f"--kernel {named}: {file}: {reason}") from None
    language = str(found.get("language") or named.name)
    missing = [each for each in named.readonly if not each.exists()]
    if missing:
        raise ConfigError(f"--kernel {named}: there is no {missing[0]}")
    reads = [
        *named.readonly,
        *(Path(each) for each in (*declared, *SYSTEM_FILES.get(language, ()))),
        *_runtime(Path(argv[0])),
        file.parent,
    ]
    return Kernelspec(
        name=named.name,
        spec=file.parent.name,
        language=language,
        display_name=str(found.get("display_name") or language),
        argv=tuple(each.replace("{resource_dir}", str(file.parent)) for each in argv),
        env=tuple((str(name), str(value)) for name, value in env.items()),
        readonly=tuple(dict.fromkeys(each for each in reads if _is_needed(each))),
        by_message=found.get("interrupt_mode") == "message",
    )


def _file(named: NamedKernelspec) -> Path:
    """Return the path of kernel.json. Raises ConfigError."""
    if "/" in named.spec:
        path = Path(named.spec)
        return path if path.name == SPEC_FILE else path / SPEC_FILE
    folders = [Path(each, "kernels") for each in _data_folders()]
    for folder in folders:
        file = folder / named.spec / SPEC_FILE
        if file.is_file():
            return file
    there = sorted(
        {each.parent.name for folder in folders for each in folder.glob(f"*/{SPEC_FILE}")}
    )
    known = f"there are {', '.join(there)}" if there else "none is installed"
    raise ConfigError(
        f"--kernel {named}: there is no kernel spec {named.spec!r}: {known}. Install the kernel, "
        "or give the path of its folder or of its kernel.json."
    )


def _data_folders() -> Iterator[str]:
    """Yield Jupyter's data folders: of JUPYTER_PATH, the user, this environment, the system."""
    yield from (each for each in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if each)
    home = Path(os.environ.get("HOME") or "/")
    data = os.environ.get("XDG_DATA_HOME") or str(home / ".local" / "share")
    yield os.environ.get("JUPYTER_DATA_DIR") or str(Path(data, "jupyter"))
    yield str(Path(sysconfig.get_path("data"), "share", "jupyter"))
    yield from SYSTEM_FOLDERS


def _program(name: str, folder: Path) -> str:
    """Return the absolute path of the kernel's program. Raises ValueError."""
    if Path(name).is_absolute():
        found = name if Path(name).is_file() and os.access(name, os.X_OK) else None
    else:
        # PREFIX/share/jupyter/kernels/NAME belongs to the environment PREFIX
        prefix = folder.parents[3] if len(folder.parents) > 3 else folder
        beside = prefix / "bin" / name
        found = str(beside) if os.access(beside, os.X_OK) else find_program(name)
    if found is None:
        raise ValueError(f"there is no program {name!r}")
    return found


def _runtime(program: Path) -> Iterator[Path]:
    """Yield the host paths that a program needs: its virtual environment, and that one's base."""
    root = program.parent.parent
    settings = root / "pyvenv.cfg"
    if not settings.is_file():
        yield program
        yield Path(os.path.realpath(program))
        return
    yield root
    for line in settings.read_text("utf-8", "replace").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home":
            yield Path(os.path.realpath(value.strip())).parent


def _time_zone() -> dict[str, str]:
    """Return the variable with the name of the time zone, which R asks programs for without it."""
    name = os.environ.get("TZ") or os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    return {"TZ": name} if name else {}


def _is_needed(path: Path) -> bool:
    """Return True for a path that exists, and that sandboxes do not show anyway."""
    return path.exists() and not path.is_relative_to("/usr")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is not the JSON object of a kernel spec")
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("it has a list that is not one of texts")
    return list(value)
