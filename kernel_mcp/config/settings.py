"""Frozen configuration values: `Limits` for one kernel, `Settings` for the server."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What one kernel may use. A value of 0 means no limit.

    memory_bytes    private memory of the kernel and its children
    cpu_seconds     processor time of one cell, all threads and children together
    cpus            processors used at a time, 1.5 is one and a half
    pids            processes and threads
    disk_bytes      workspace folder
    tmp_bytes       /tmp and /dev/shm, each (part of memory)
    open_files      file descriptors of one process
    """

    memory_bytes: int = 2 * GIB
    cpu_seconds: float = 0.0
    cpus: float = 0.0
    pids: int = 512
    disk_bytes: int = 1 * GIB
    tmp_bytes: int = 512 * MIB
    open_files: int = 4096


@dataclass(frozen=True, slots=True)
class Refusal:
    """Keys of a configuration file that nobody named, found in the current folder, and not taken.

    Such a file may narrow what the operator permits, never widen it or name a place or a program.
    """

    file: Path
    keys: tuple[str, ...]

    def __str__(self) -> str:
        it = "it" if len(self.keys) == 1 else "them"
        flags = ", ".join(f"--{key}" for key in self.keys)
        return (
            f"{', '.join(self.keys)} in {self.file} ignored: a file that was found in the current "
            "folder may narrow what code may do, but not widen it, nor choose places and programs. "
            f"If you trust it, start the server with --config {shlex.quote(str(self.file))}; or "
            f"set {it} yourself: {flags}."
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the operator decides; built by `configuration` from flags, environment and TOML.

    allow           import or distribution names, with optional version specifiers; `*` allows all
    timeout_s       default hard limit of a cell (wall clock)
    wait_s          default time after which `execute` answers `running`
    grace_s         time between an interrupt and the kill that follows it
    start_timeout_s time a kernel may take from its launch to being ready
    idle_timeout_s  idle time after which a session's kernel is collected; infinity for never
    max_sessions    sessions per server that may have a kernel at once
    hibernate_sessions     hibernated sessions kept beside them, the newest; 0 ends idle sessions
    hibernate_bytes        variables of one hibernated session; 0 for no limit
    hibernate_total_bytes  variables of all hibernated sessions; 0 for no limit
    warm            kernels kept in reserve for new sessions; 0 for none
    workspace       parent folder of the session folders, kept when sessions end; None for a
                    private folder that is removed with the server
    state_dir       where the server keeps sockets and logs of this run; None for the default
    cache_dir       where kernel environments are kept; None for the default
    sandbox         auto, bwrap, landlock, container or none
    container_engine   auto, podman or docker, for `container`
    container_image    name of the image that its kernels run in
    container_runtime  OCI runtime of its containers, such as runc; empty for the engine's default
    allow_weaker_sandbox  whether auto may choose landlock where bwrap does not work
    no_template     start every kernel cold instead of forking it from a template
    profile         the list of modules that `allow` adds to: strict, default, data or open
    audit_log       file to which every session, cell, install, file and refusal is noted; or None
    allow_install   packages agents may add beside those of `allow`; `*` permits all
    allow_source_builds  whether what has no wheel may be built, in the sandbox of installers
    index_url       package index instead of uv's default; empty for that
    find_links      folders and pages with wheels, used beside the index
    offline         nothing is downloaded: only what uv has cached counts
    install_bytes   packages that one session may add, downloaded or unpacked; 0 for no limit
    cache_bytes     environments made for agents and uv's cache together, also any one environment;
                    0 for no limit
    install_timeout_s  time one installation may take
    python          interpreter for kernels: version or path; empty for the server's own version
    output_chars    budget of text in one answer
    refusal         what a configuration file in the current folder wanted and did not get
    """

    allow: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    timeout_s: float = 600.0
    wait_s: float = 50.0
    grace_s: float = 3.0
    start_timeout_s: float = 60.0
    idle_timeout_s: float = 3600.0
    max_sessions: int = 16
    hibernate_sessions: int = 64
    hibernate_bytes: int = 256 * MIB
    hibernate_total_bytes: int = 2 * GIB
    warm: int = 2
    workspace: Path | None = None
    state_dir: Path | None = None
    cache_dir: Path | None = None
    sandbox: str = "auto"
    container_engine: str = "auto"
    container_image: str = "kernel-mcp"
    container_runtime: str = ""
    allow_weaker_sandbox: bool = False
    no_template: bool = False
    profile: str = "default"
    audit_log: Path | None = None
    allow_install: tuple[str, ...] = ()
    allow_source_builds: bool = False
    index_url: str = ""
    find_links: tuple[str, ...] = ()
    offline: bool = False
    install_bytes: int = 2 * GIB
    cache_bytes: int = 10 * GIB
    install_timeout_s: float = 300.0
    python: str = ""
    log_level: str = "warning"
    output_chars: int = 30_000
    refusal: Refusal | None = None
