"""boot.json as frozen values, and the magics that every policy permits."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_specs.shims.pip import ADVICE

_SAFE_MAGICS = frozenset(
    {"capture", "matplotlib", "pdoc", "pinfo", "pinfo2", "precision", "psource"}
    | {"reset", "reset_selective", "time", "timeit", "who", "who_ls", "whos", "xmode"}
)
"""Magics that stay within Python; every policy permits them."""
_PLOT_SETTING = re.compile(r"InlineBackend\.\w+ *=[\w\s'\"{},.:\[\]-]*")
"""Arguments of `%config` that every policy permits: they hold no call."""


class CommandNotAllowedError(PermissionError):
    """A shell command or a magic that reaches beyond Python, refused by the policy."""

    __module__ = "builtins"  # shown to the user without the name of this file

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not available in this session: shell commands and magics that start "
            "processes are off. Start the server with --allow '*' to permit them, or use Python."
        )


def is_harmless(name: str, line: str = "") -> bool:
    """Return True if every policy permits the magic `name`; `line` is the text after it."""
    if name == "config":
        return _PLOT_SETTING.fullmatch(line) is not None
    return name in _SAFE_MAGICS


INSTALLERS = ("pip", "uv", "conda", "mamba", "micromamba")
"""Magics that start a program of the same name."""
READ_ONLY, FILE = "/", "file:///"
"""Values of `lacks` in an error message: writing to a path of the host failed, or opening one."""
TOO_LARGE = "/large"
"""Value of `lacks` in an error message: a file would have been larger than --disk permits."""
NO_LOOP = "/loop"
"""Value of `lacks`: code asked for the running event loop in a cell that awaits nothing."""
NETWORK, HOST = "://", "://host"
"""Values of `lacks`: another machine could not be reached, or the proxy refused it."""
_CHANGE = re.compile(
    r"(?:^|[;&|(]|\bsudo\s|\btime\s)\s*(?:[^\s;&|(]*python[\d.]*[\"']?\s+-m\s+)?(?:[\w./]*/)?"
    r"(?:(?:uv\s+)?pip[\d.]*\s+(?:-\S+\s+)*(?!(?:list|freeze|show|-\S+)(?!\S))"
    r"|(?:uv|(?:micro)?mamba|conda)\s+(?:-\S+\s+)*(?!pip(?!\S)|list(?!\S)|-))\w"
)


class InstallationError(RuntimeError):
    """Running code has tried to add or remove packages."""

    __module__ = "builtins"


def refuse_installation(command: str) -> None:
    """Raise InstallationError for a shell command that adds or removes packages."""
    if _CHANGE.search(command):
        raise InstallationError(ADVICE)


VERSION = 1
ENDS = ("shell", "control", "iopub")
"""Channels of a kernel that does not listen, in the order in which the host sends their sockets."""


class BootError(Exception):
    """The kernel cannot start with this configuration; the text is sent to the host."""


@dataclass(frozen=True)
class ImportPolicy:
    """The import policy of user code. `modules` holds top-level or dotted names.

    `deny_builtins` are builtins that user code may not call.
    """

    allow_all: bool = True
    modules: tuple[str, ...] = ()
    profile: str = "default"
    deny_builtins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessLimits:
    """Resource limits of the process. A value of 0 means no limit."""

    memory_bytes: int = 0
    cpus: int = 0
    pids: int = 0
    open_files: int = 0
    file_bytes: int = 0
    cpu_seconds: int = 0


@dataclass(frozen=True)
class OutputSettings:
    """Settings of output: how text is split into messages.

    chunk_bytes    text collected before a message is sent
    flush_seconds  longest time that text waits
    message_bytes  largest message; bigger displays are replaced by a note
    """

    chunk_bytes: int = 64 * 1024
    flush_seconds: float = 0.05
    message_bytes: int = 12 * 1024 * 1024


@dataclass(frozen=True)
class BootConfig:
    """The configuration that the host has written to boot.json.

    start     the folder in which cells begin: the workspace, or a mount that they may write
    confined  False without a boot.json: an ordinary Jupyter kernel, nothing is restricted
    layers    extra sys.path entries
    support   folder of the kernel's own packages and its place in sys.path, `first` or `last`;
              empty if it is there already
    ready_fd  socket that the ready packet is sent to; -1 for none
    sealed    the host sends the sockets over ready_fd: this process can make no Unix socket
    connected  the host sends the `ENDS` of connections over ready_fd: this process listens nowhere
    lifeline  the host requests checkpoints over ready_fd, which stays open
    tools     the host sends the socket where its gateway calls, before those of the channels
    strict    mounts in which only files can be read that the ruleset sent over ready_fd allows
    ring_fd   shared memory that keeps the end of the output for the host; -1 for none
    runtime   path prefixes of code that may import anything
    variables  environment variables, set over those that every kernel has
    shuffle   seed of the order in which folders are listed; 0 for that of the file system
    seed      seed of the random generators; 0 for the entropy of the system
    """

    confined: bool = False
    policy: ImportPolicy = field(default_factory=ImportPolicy)
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    output: OutputSettings = field(default_factory=OutputSettings)
    workspace: str = ""
    start: str = ""
    tmp: str = field(default_factory=tempfile.gettempdir)
    layers: tuple[str, ...] = ()
    support: tuple[str, ...] = ()
    ready_fd: int = -1
    ring_fd: int = -1
    sealed: bool = False
    connected: bool = False
    lifeline: bool = False
    tools: bool = False
    strict: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict, repr=False)
    shuffle: int = 0
    seed: int = 0


def load(connection_file: Path) -> BootConfig:
    """Read boot.json beside the connection file; return the defaults if there is none.

    Raises BootError when the file is there but unusable: a kernel never starts with less
    confinement than it was meant to have.
    """
    path = connection_file.with_name("boot.json")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return BootConfig()
    except OSError as error:
        raise BootError(f"cannot read boot.json: {error}") from error
    try:
        return parse(_mapping(json.loads(content)))
    except (TypeError, ValueError) as error:
        raise BootError(f"boot.json is not valid: {type(error).__name__}: {error}") from error


def parse(data: dict[str, Any]) -> BootConfig:
    """Return a BootConfig. Raises ValueError or TypeError for invalid data."""
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r}, this kernel understands {VERSION}")
    policy = _mapping(data.get("policy", {}))
    default = BootConfig()
    return BootConfig(
        confined=True,
        policy=ImportPolicy(
            allow_all=policy.get("allow_all") is True,
            modules=_strings(policy.get("modules", [])),
            profile=str(policy.get("profile", "default")),
            deny_builtins=_strings(policy.get("deny_builtins", [])),
        ),
        limits=ProcessLimits(
            **{name: int(value) for name, value in _mapping(data.get("limits", {})).items()}
        ),
        output=OutputSettings(**data.get("output", {})),
        workspace=str(data.get("workspace", "")),
        start=str(data.get("start") or data.get("workspace", "")),
        tmp=str(data.get("tmp") or default.tmp),
        layers=_strings(data.get("layers", [])),
        support=_strings(data.get("support", [])),
        ready_fd=int(data.get("ready_fd", -1)),
        ring_fd=int(data.get("ring_fd", -1)),
        sealed=data.get("sealed") is True,
        connected=data.get("connected") is True,
        lifeline=data.get("lifeline") is True,
        tools=data.get("tools") is True,
        strict=_strings(data.get("strict", [])),
        runtime=_strings(data.get("runtime", [])),
        variables={
            str(name): str(value) for name, value in _mapping(data.get("variables", {})).items()
        },
        shuffle=int(data.get("shuffle", 0)),
        seed=int(data.get("seed", 0)),
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {repr(value)[:80]}")
    return value


def _strings(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"expected a list of strings, got {repr(values)[:80]}")
    return tuple(values)
