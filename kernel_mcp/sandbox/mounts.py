"""The file tree that a kernel sees under bubblewrap, as bubblewrap options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kernel_mcp.errors import LaunchError
from kernel_mcp.host_folders import Device
from kernel_mcp.host_folders.secrets import HIDING, KEPT
from kernel_mcp.linux.process import bare_program
from kernel_mcp.records import dataclass

WORKSPACE = "/workspace"
SOCKETS = "/run/kernel"
BOOT = "/opt/kernel_specs"
LAYERS = "/packages"
BLANK = "/run/blank"
"""Folder with the empty file and folder that are mounted over masked paths."""
SCRATCH = ("/tmp", "/dev/shm", "/dev/pts")
"""File systems in memory that are private to each kernel."""
WRITABLE = frozenset((WORKSPACE, SOCKETS, *SCRATCH))
"""Mount points to which a kernel may write."""
FIRST_PROCESS = "/proc/1"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "fonts",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "pki/tls/certs",
    "ssl/certs",
)
_FOLDERS = ("/etc", "/etc/pki", "/etc/pki/tls", "/etc/ssl", "/opt", "/run")
_MASKED = (
    "cmdline",
    "config.gz",
    "iomem",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "modules",
    "sched_debug",
    "timer_list",
    "vmallocinfo",
)
"""Entries of /proc about the host's kernel, not about processes of the sandbox."""
PROC = "/proc"
_FIXED = ("acpi", "asound", "bus", "driver", "fs", "irq", "mtrr", "scsi", "sys", "sysrq-trigger")
"""Entries of a writable /proc that change the host, not the tasks of the sandbox."""
_RESERVED = ("/", "/dev", "/proc", "/sys", "/tmp", "/etc", "/run", "/opt", WORKSPACE, LAYERS)


@dataclass(frozen=True, slots=True)
class Features:
    """Options of the installed bubblewrap that its oldest supported version (0.5) lacks."""

    size: bool
    disable_userns: bool


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder or file of the host that a kernel sees at `guest`.

    source  its path for bubblewrap
    covers  each masked or read-only entry: path below it, and kind (`host_folders.secrets`)
    """

    source: Path
    guest: str
    writable: bool
    covers: tuple[tuple[str, str], ...] = ()
    is_folder: bool = True


@dataclass(frozen=True, slots=True)
class Folders:
    """The mounted folders of one kernel; `blank` contains the empty entries for masked paths.

    trees   detached mounts that are attached in `stage` as 0, 1, … before anything is bound
    rules   Landlock ruleset for the host's own folders, instead of mounts; -1 for none
    """

    shown: tuple[Folder, ...] = ()
    blank: Path = Path("/")
    stage: Path = Path("/")
    trees: tuple[int, ...] = ()
    rules: int = -1

    def staged(self) -> list[str]:
        """Return the command prefix that attaches the trees in `stage`; empty without trees."""
        if not self.trees:
            return []
        numbers = ",".join(map(str, self.trees))
        return bare_program("kernel_mcp.linux.staging", str(self.stage), numbers)

    def covers(self, folder: Folder) -> Iterator[tuple[str, str, bool]]:
        """Yield the bind mounts over entries of a folder: source, target, and True if writable."""
        for path, kind in folder.covers:
            source = self.blank / kind if kind in HIDING else folder.source / path
            yield str(source), f"{folder.guest}/{path}", kind == KEPT

    @property
    def handed(self) -> tuple[int, ...]:
        """All descriptors that the sandbox's command inherits."""
        return self.trees if self.rules < 0 else (*self.trees, self.rules)


def system_options() -> list[str]:
    """Return options that show the host's system folders (/usr merged or not) and files of /etc."""
    options: list[str] = []
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for folder in _FOLDERS:
        options += ["--perms", "0755", "--dir", folder]
    for name in _ETC:
        if Path("/etc", name).exists():
            options += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    return options


def masked() -> tuple[str, ...]:
    """Return the existing files of /proc that describe the host."""
    return tuple(f"/proc/{name}" for name in _MASKED if Path("/proc", name).exists())


def opens_proc(devices: Iterable[Device]) -> bool:
    """Return True if code must write to files of its own tasks in /proc, as CUDA does."""
    return any(device.names_threads for device in devices)


def fixed() -> tuple[str, ...]:
    """Return the existing entries of a writable /proc that stay read-only."""
    return tuple(f"{PROC}/{name}" for name in _FIXED if Path(PROC, name).exists())


def proc_options() -> list[str]:
    """Return options for a /proc without files about the host, and without /proc/1.

    Process 1 is bubblewrap's. Under an ordinary user's server it has the kernel's user, so the
    kernel could read its memory (with the host's paths) and open its descriptors.
    """
    first = ["--perms", "0555", "--tmpfs", FIRST_PROCESS, "--remount-ro", FIRST_PROCESS]
    masks = [word for path in masked() for word in ("--ro-bind", "/dev/null", path)]
    return ["--proc", "/proc", *masks, *first]


def closing_options(devices: Iterable[Device]) -> list[str]:
    """Return options that make /proc read-only, or only its `fixed` entries."""
    if not opens_proc(devices):
        return ["--remount-ro", PROC]
    return [word for path in fixed() for word in ("--ro-bind", path, path)]


def scratch_options(folder: str, size: int, features: Features) -> list[str]:
    """Return options for a private tmpfs, writable for all; `size` in bytes, 0 for no limit."""
    limit = ["--size", str(size)] if size and features.size else []
    return [*limit, "--perms", "1777", "--tmpfs", folder]


def runtime_options(paths: Iterable[Path]) -> list[str]:
    """Return options that bind host paths read-only at the same place, symlinks with their targets.

    Parents are created with mode 0755. Raises LaunchError for a path that cannot be bound.
    """
    wanted: set[str] = set()
    for path in paths:
        name = os.path.normpath(path)
        real = os.path.realpath(path)
        if not path.is_absolute() or name in _RESERVED or real in _RESERVED:
            raise LaunchError(
                f"{path} cannot be made readable in the sandbox: it has to be an absolute path "
                "to a folder or file of its own; check what --python and --kernel name"
            )
        if not path.exists():
            raise LaunchError(f"{path} does not exist, but the kernel's interpreter needs it")
        wanted |= {name, real}
    options: list[str] = []
    made: set[str] = set()
    bound: list[str] = []
    for name in sorted(wanted):
        if _below(name, (*_SYSTEM, *bound)):
            continue
        for parent in _parents(name):
            if parent not in made and parent not in ("/tmp", *_FOLDERS):
                made.add(parent)
                options += ["--perms", "0755", "--dir", parent]
        if Path(name).is_symlink() and Path(name).is_file():
            # a program finds its library through the symlinks to it
            options += ["--symlink", str(Path(name).readlink()), name]
            continue
        options += ["--ro-bind", name, name]
        bound.append(name)
    return options


def replaced_options(replaced: Iterable[tuple[Path, Path]]) -> list[str]:
    """Return options that bind files over other files, which must be bound already."""
    return [word for pair in replaced for word in ("--ro-bind", *map(str, pair))]


def layer_options(layers: Iterable[Path]) -> list[str]:
    """Return options that bind package layers read-only; later changes on the host are visible."""
    options: list[str] = []
    for number, layer in enumerate(layers):
        options += ["--ro-bind", str(layer), f"{LAYERS}/{number}"]
    return ["--perms", "0755", "--dir", LAYERS, *options] if options else []


def folder_options(folders: Folders) -> list[str]:
    """Return options that bind mounted folders, outer ones first, each with its masked paths."""
    options: list[str] = []
    made = {"/tmp", *_FOLDERS}
    if folders.shown:
        options += ["--ro-bind", str(folders.blank), BLANK]
    for folder in folders.shown:
        for parent in _parents(folder.guest):
            inside = _below(parent, [each.guest for each in folders.shown])
            if parent not in made and not inside:
                made.add(parent)
                options += ["--perms", "0755", "--dir", parent]
        bind = "--bind" if folder.writable else "--ro-bind"
        options += [bind, str(folder.source), folder.guest]
        for source, target, writable in folders.covers(folder):
            options += ["--bind" if writable else "--ro-bind", source, target]
    return options


def device_options(devices: Iterable[Device]) -> list[str]:
    """Return options that bind devices; they must follow the option `--dev /dev`."""
    options: list[str] = []
    for device in devices:
        for parent in _parents(device.guest):
            if parent != "/dev":
                options += ["--perms", "0755", "--dir", parent]
        options += ["--dev-bind", str(device.source), device.guest]
    return options


def account_files(uid: int, gid: int, hosts: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """Return files of /etc about users and hosts, by name; no content is from the host.

    `hosts` are further pairs of an address and its name in the sandbox.
    """
    further = "".join(f"{address} {name}\n" for address, name in hosts)
    return {
        "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\n"
        f"kernel:x:{uid}:{gid}:kernel:{WORKSPACE}:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
        "group": f"root:x:0:\nkernel:x:{gid}:\nnogroup:x:65534:\n",
        "hosts": f"127.0.0.1 localhost sandbox\n::1 localhost\n{further}",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }


def _parents(name: str) -> Sequence[str]:
    return [str(parent) for parent in reversed(Path(name).parents) if str(parent) != "/"]


def _below(name: str, folders: Iterable[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)
