"""The table of all settings that the operator decides, with the flag of each.

The fields of `Settings` and `Limits` define the flags and `--help`, the environment variables and
the keys of TOML files. `make reference` writes docs/flags.md from them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from kernel_mcp import extensions
from kernel_mcp.config.attachments import Attachment, attachments
from kernel_mcp.config.kernelspecs import NamedKernelspec, kernelspecs
from kernel_mcp.config.mounts import Mount, mounts
from kernel_mcp.config.narrowing import (
    among,
    asks_less,
    fewer_hosts,
    no_further,
    no_more,
    no_more_or_unlimited,
    only_off,
    only_on,
)
from kernel_mcp.config.options import IgnoredKeys, Option, flag
from kernel_mcp.config.persist import SAVED_BYTES, Persist, persist, persists_less
from kernel_mcp.config.quotas import Quotas, quotas
from kernel_mcp.config.requirements import entries, python
from kernel_mcp.config.secrets import EnvVariable, HeaderSecret, header_secrets, variables
from kernel_mcp.config.tool_servers import ToolServer, tool_names
from kernel_mcp.config.values import (
    address,
    asking,
    characters,
    choice,
    choices_in_order,
    devices,
    hosts,
    memory,
    path,
    places,
    processes,
    some_of,
    switch,
    url,
    word,
)
from kernel_mcp.linux.gpus import LIBRARY_PATH
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB, count, duration, idle_duration, limit_duration, number, size

PROFILES = ("strict", "guarded", "default")
"""Profiles, the strictest first."""
SANDBOXES = ("auto", "bwrap", "landlock", "container", "none")
CHAINED = ("bwrap", "landlock")
"""Sandboxes of which one may follow the other in `--sandbox`; the rest stand alone."""
ENGINES = ("auto", "podman", "docker")
TOOL_GROUPS = ("core", "packages", "files", "branches", "notebooks")
"""Groups of tools; `core` runs code and is always available."""
CHECKPOINTS = ("off", "auto")
"""Values of `--checkpoints`, the one without copies of kernels first."""
MAX_OUTPUT = 30_000
"""Default of `--max-output`, in characters."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

_IMPORTS = "What code may import"
_INSTALLS = "What agents may install"
_USE = "What a session may use"
_TIMES = "How long things take"
GRANTS = "What code sees of your world"
"""Group of the settings that let code use what is outside its sandbox."""
_PLACES = "Where things live"
_SERVER = "Running the server"
_HTTP = "Serving over HTTP"
_FLEET = "Many machines"


# fmt: off
@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one kernel. A value of 0 means no limit.

    tmp_bytes       size of /tmp and of /dev/shm (part of memory)
    open_files      file descriptors of one process
    address_space   False for no limit on a process's address space: GPU drivers map more than RAM
    """

    memory_bytes: int = flag(
        "memory", memory, _USE, "SIZE", "2G",
        "memory of one session, and the most that one may ask for: more is a `MemoryError`, or the "
        "end of its kernel when its processes together go a fifth beyond",
        narrows=no_more_or_unlimited,
    )
    cpu_seconds: float = flag(
        "cpu", limit_duration, _USE, "SECONDS", "no limit",
        "processor time of one cell, all its threads and processes together, and the most that a "
        "session may ask for", value=0.0, narrows=no_more_or_unlimited,
    )
    cpus: float = flag(
        "cpus", number, _USE, "N", "2",
        "processors that one session may keep busy, such as 1.5, and the most that one may ask "
        "for; requires a cgroup (0 for no limit)", narrows=no_more_or_unlimited,
    )
    pids: int = flag(
        "pids", processes, _USE, "N", "512", "processes and threads of one session",
        narrows=no_more_or_unlimited,
    )
    disk_bytes: int = flag(
        "disk", size, _USE, "SIZE", "1G",
        "workspace folder of one session: a cell that goes beyond is interrupted, then killed",
        narrows=no_more_or_unlimited,
    )
    tmp_bytes: int = 512 * MIB
    open_files: int = 4096
    address_space: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the operator decides; built by `load` from flags, environment and TOML.

    Bytes, seconds and counts of 0 lift the limit where the help says so; an idle time of infinity
    is `never`. `file` is that of `--config`; `ignored_keys` are those of a file in the current
    folder. `driver` is the folder of GPU libraries that the loader does not find by itself.
    `unmounted` is why `--mount .` shows nothing, if it does. `tool_servers` are those in the file.
    """

    allow: tuple[str, ...] = flag(
        "allow", entries, _IMPORTS, "NAMES", "the standard library alone",
        "packages installed for the kernels, and modules that `guarded` and `strict` let code "
        "import besides: a comma list, repeatable, versions allowed ('pandas>=2,<3'); '*' lifts "
        "the profile", value=(), narrows=among,
    )
    profile: str = flag(
        "profile", choice(*PROFILES), _IMPORTS, "|".join(PROFILES), "default",
        "what code may do within the sandbox: `strict` (computing only, no files, no `eval`), "
        "`guarded` (a list of modules, no shell), `default` (the whole standard library, shell "
        "commands, magics and all that is installed; `guarded` under `--sandbox none`)",
        narrows=no_further(PROFILES),
    )
    python: str = flag(
        "python", python, _IMPORTS, "VERSION|PATH", "the server's own version",
        "Python of the kernels: a version from 3.10 to 3.15 or the path of an interpreter; the "
        "path of a virtual or conda environment (`./.venv`) has them use its packages, read-only",
        value="",
    )
    requirements: Path | None = flag(
        "requirements", path, _IMPORTS, "FILE", "none",
        "install what this file lists for the kernels, besides `--allow`: names, versions, markers "
        "and hashes; wheels from the operator's index alone", value=None,
    )
    project: Path | None = flag(
        "project", path, _IMPORTS, "DIR", "none",
        "install what DIR/uv.lock has for the project in DIR, without the project itself: wheels "
        "from the operator's index alone, by the hashes of the lock", value=None,
    )
    allow_install: tuple[str, ...] = flag(
        "allow-install", entries, _INSTALLS, "NAMES", "those of `--allow`",
        "packages agents may add with `install`, `create_session` and `run_script`, with versions "
        "if wanted: a comma list, repeatable, '*' permits all; code may import what was added",
        value=(), narrows=among,
    )
    index_url: str = flag(
        "index-url", url, _INSTALLS, "URL", "that of uv",
        "package index for environments and installs", value="",
    )
    find_links: tuple[str, ...] = flag(
        "find-links", places, _INSTALLS, "DIR|URL", "nowhere else",
        "also look for wheels here; repeatable", value=(),
    )
    offline: bool = flag(
        "offline", switch, _INSTALLS, "", "off",
        "download nothing: only cached packages are available", narrows=only_on,
    )
    allow_source_builds: bool = flag(
        "allow-source-builds", switch, _INSTALLS, "", "off",
        "let `install` build packages that have no wheel, in a sandbox with network",
        narrows=only_off,
    )
    install_bytes: int = flag(
        "install-size", size, _INSTALLS, "SIZE", "2G",
        "disk space of the packages that one session adds, downloaded or unpacked, by `install`, "
        "`create_session` or `run_script`", narrows=no_more_or_unlimited,
    )
    limits: Limits = dataclasses.field(default_factory=Limits)
    timeout_s: float = flag(
        "timeout", duration, _TIMES, "TIME", "10m",
        "limit of a cell whose call names none: it is interrupted, then its kernel is killed",
        narrows=no_more,
    )
    max_timeout_s: float = flag(
        "max-timeout", duration, _TIMES, "TIME", "1h, or `--timeout` where that is set",
        "longest limit that a call or a session may ask for; `--timeout` is never above it",
        value=3600.0, narrows=no_more,
    )
    wait_s: float = flag(
        "wait", duration, _TIMES, "TIME", "50s",
        "answer `running` after this long and let the cell go on", narrows=no_more,
    )
    grace_s: float = flag(
        "grace", duration, _TIMES, "TIME", "3s",
        "from the interrupt of a cell to the kill of its kernel", narrows=no_more,
    )
    idle_timeout_s: float = flag(
        "idle-timeout", idle_duration, _TIMES, "TIME", "1h",
        "hibernate a session that did nothing for this long and would lose nothing: its variables "
        "go to disk and come back with its next cell; `never` keeps it as it is", narrows=no_more,
    )
    mounts: tuple[Mount, ...] = flag(
        "mount", mounts, GRANTS, "HOST[:GUEST][:ro|rw][:strict]", "none",
        "show this folder or file of the host to all sessions, at the same path or at GUEST; `rw` "
        "lets them change it, and they begin in the first folder if it is `rw`. Known secrets in "
        "it are covered (SECURITY.md has the list), with `strict` so that nothing that appears "
        "beside one is readable in running sessions; repeatable", value=(),
    )
    network: tuple[str, ...] = flag(
        "network", hosts, GRANTS, "none|LIST|'*'", "none",
        "where code may connect, by HTTP and TLS: names, `*.example.com`, or '*' for all public "
        "addresses, on ports 80 and 443; `HOST:PORT` for any protocol, as of a database; a comma "
        "list, repeatable. A session may ask for less", narrows=fewer_hosts,
    )
    devices: tuple[Path, ...] = flag(
        "device", devices, GRANTS, "PATH", "none",
        "let code use this character device of the host, such as a GPU's; memory is limited by the "
        "control group alone then; repeatable", value=(),
    )
    gpu: bool = flag(
        "gpu", switch, GRANTS, "", "off",
        "let code use the NVIDIA GPUs of this machine: their devices, as by `--device`, and their "
        "driver's libraries; the server does not start where there are none",
    )
    variables: tuple[EnvVariable, ...] = flag(
        "env", variables, GRANTS, "NAME[=VALUE]", "none",
        "let code find this variable in `os.environ`, without VALUE as the server has it; its "
        "value is masked in outputs, which is a courtesy and no boundary; repeatable", value=(),
    )
    secrets: tuple[HeaderSecret, ...] = flag(
        "secret", header_secrets, GRANTS, "NAME@HOST[:HEADER]", "none",
        "let code use the server's environment variable NAME in that header (`Authorization`) of "
        "HTTPS requests to HOST, which it may then connect to, and never read it: it sees a "
        "placeholder, which a proxy replaces; a comma list, repeatable", value=(),
    )
    attach: tuple[Attachment, ...] = flag(
        "attach", attachments, GRANTS, "FILE|URL", "none",
        "let `create_session(attach=...)` join this running kernel (its connection file), or those "
        "of this Jupyter server (`http://localhost:8888/?token=...`): what runs there runs outside "
        "the sandbox, with all rights of that kernel's user; repeatable", value=(),
    )
    kernels: tuple[NamedKernelspec, ...] = flag(
        "kernel", kernelspecs, GRANTS, "NAME=KERNELSPEC", "none",
        "let `create_session(language=NAME)` start the kernel of this Jupyter kernel spec in the "
        "sandbox, such as `r=ir`: the name, folder or `kernel.json` of one; `+PATH` for each path "
        "that it reads outside `/usr`. Or one outside the sandbox, on a Jupyter server "
        "(`NAME=URL`) or by a back-end of another distribution (`NAME=BACKEND:TEXT`); repeatable",
        value=(),
    )
    tool_file: Path | None = flag(
        "tool-servers", path, GRANTS, "FILE", "none",
        "let code call the tools of these MCP servers (`from tools import crm`): a JSON file with "
        "`mcpServers`, as clients have it. They run outside the sandbox; what they reach, code "
        "reaches", value=None,
    )
    allow_tools: tuple[str, ...] = flag(
        "allow-tool", tool_names, GRANTS, "SERVER.TOOL", "none",
        "let code call these tools of `--tool-servers` unasked, such as `crm.*`: others are asked "
        "of the person, or refused; a comma list, repeatable", value=(),
    )
    ask: tuple[float, ...] = flag(
        "ask", asking, GRANTS, "TIME|off", "10m; off over HTTP without `--tokens` or `--issuer`",
        "let code ask the person at the client (`input()`, `getpass()`, debuggers) and wait this "
        "long; the code gets what is typed. With tokens it takes the door `ask`",
        value=(600.0,), narrows=asks_less,
    )
    workspace: Path | None = flag(
        "workspace", path, _PLACES, "DIR", "a private folder, removed with the server",
        "keep the files of sessions in folders of their names below DIR, those of the default "
        "session in `DIR/default`; a session of that name finds them again", value=None,
    )
    cache_dir: Path | None = flag(
        "cache-dir", path, _PLACES, "DIR", "the user's cache folder, or one in /var/tmp",
        "keep kernel environments and downloads here", value=None,
    )
    cache_bytes: int = flag(
        "cache-size", size, _PLACES, "SIZE", "10G",
        "disk space of environments made for agents and of downloads, also of any one environment: "
        "beyond it the longest unused go, as they do after 30 days",
    )
    state_dir: Path | None = flag(
        "state-dir", path, _PLACES, "DIR", "a folder of yours in /var/tmp",
        "sockets, logs and private files of running servers (at most 49 characters)", value=None,
    )
    persist: Persist | None = flag(
        "persist", persist, _PLACES, "SIZE,TIME|off", "2G,7d",
        "keep sessions in the folder for state, so that a server that starts in the same working "
        "folder goes on with them: so much of all of them, so long after their last use; "
        "hibernated sessions may have as much", narrows=persists_less,
    )
    sandbox: tuple[str, ...] = flag(
        "sandbox", choices_in_order(SANDBOXES, CHAINED, extensions.SANDBOXES), _SERVER,
        "|".join(SANDBOXES), "auto",
        "how kernels are confined: `auto` is `bwrap`; `bwrap,landlock` takes the first of them "
        "that works (landlock has gaps, see `kernel-mcp doctor`); `none` is no boundary at all: "
        "code may do all that you may",
    )
    container_engine: str = flag(
        "container-engine", choice(*ENGINES), _SERVER, "|".join(ENGINES), "auto",
        "what runs the kernels of `--sandbox container`; `auto` prefers podman",
    )
    container_image: str = flag(
        "container-image", word, _SERVER, "NAME", "kernel-mcp",
        "image that those kernels run in; `kernel-mcp image build` makes it",
    )
    container_runtime: str = flag(
        "container-runtime", word, _SERVER, "NAME", "that of the engine",
        "OCI runtime of their containers, such as `runc`, `crun` or `runsc`", value="",
    )
    no_template: bool = flag(
        "no-template", switch, _SERVER, "", "off",
        "start every kernel cold instead of forking it from a process that has imported everything",
    )
    checkpoints: str = flag(
        "checkpoints", choice(*CHECKPOINTS), _SERVER, "|".join(CHECKPOINTS), "auto",
        "copies of kernels by fork, to which a session goes back when its kernel dies, for `undo` "
        "and `branch`: `auto` makes one in a pause, or when it costs less than 5 % of the work it "
        "protects; requires a template", narrows=no_further(CHECKPOINTS),
    )
    tools: tuple[str, ...] = flag(
        "tools", some_of(*TOOL_GROUPS, group=extensions.TOOLS), _SERVER,
        "GROUPS", ",".join(TOOL_GROUPS),
        "tools that clients see: `core` runs code and keeps sessions, `packages` has `install` and "
        "`list_packages`, `files` reads and writes files and exports notebooks, `branches` has "
        "`undo`, `branch` and `adopt`, `notebooks` opens, edits and runs `.ipynb` files",
        narrows=among,
    )
    max_output: int = flag(
        "max-output", characters, _SERVER, "CHARS", str(MAX_OUTPUT),
        "text of one answer; what is left out is counted and can be read on", narrows=no_more,
    )
    audit_log: Path | None = flag(
        "audit-log", path, _SERVER, "FILE", "none kept",
        "add a JSON line to FILE for each session, cell, file, refusal, connection and others",
        value=None,
    )
    audit_code: bool = flag(
        "audit-code", switch, _SERVER, "", "off", "code in that file, and not only its SHA-256"
    )
    max_sessions: int = flag(
        "max-sessions", count, _SERVER, "N", "16",
        "sessions with a kernel at once; one more, and the longest idle one hibernates",
        narrows=no_more,
    )
    warm: int = flag(
        "warm", count, _SERVER, "N", "2",
        "kernels started ahead, so that a new session has one at once; one until the first session "
        "begins, then none until the second, 0 for none at all", narrows=no_more,
    )
    log_level: str = flag(
        "log-level", choice(*LOG_LEVELS), _SERVER, "|".join(LOG_LEVELS), "warning",
        "what goes to stderr",
    )
    log_format: str = flag(
        "log-format", choice(*LOG_FORMATS), _SERVER, "|".join(LOG_FORMATS), "text",
        "lines of the log: `json` has an object each, with the ids of request and session",
    )
    http: tuple[str, int] | None = flag(
        "http", address, _HTTP, "HOST:PORT", "stdin and stdout",
        "serve streamable HTTP at `/mcp` instead, with a token that is made at the start and "
        "printed unless `--tokens` or `--issuer` say who may call", value=None,
    )
    tokens: Path | None = flag(
        "tokens", path, _HTTP, "FILE", "none",
        "principals and the hashes of their tokens, which `kernel-mcp token add` writes; read "
        "again when it changes", value=None,
    )
    issuer: str = flag(
        "issuer", url, _HTTP, "URL", "none",
        "take access tokens (JWT) of this OAuth 2.1 authorization server; `--public-url` is their "
        "audience", value="",
    )
    no_auth: bool = flag(
        "no-auth", switch, _HTTP, "", "off",
        "serve everyone who connects: on loopback alone, and without mounts, network, devices, "
        "variables, secrets and attached kernels",
    )
    public_url: str = flag(
        "public-url", url, _HTTP, "URL", "that of `--http`",
        "where clients reach the server, such as behind a proxy: its host is allowed, links and "
        "metadata begin with it", value="",
    )
    proxies: tuple[str, ...] = flag(
        "trusted-proxy", hosts, _HTTP, "ADDRESSES", "none",
        "believe `X-Forwarded-For` and `X-Forwarded-Proto` of these proxies: addresses or "
        "networks; a comma list, repeatable", value=(),
    )
    quotas: Quotas = flag(
        "quota", quotas, _HTTP, "NAME=N,...", "those of the server",
        "what one principal may use: `sessions`, `asleep`, `memory`, `disk`, `cpu` (processors), "
        "`cells` at once, `rate` (calls a second), `body` (bytes of requests at once); a row of "
        "`--tokens` has its own", value=Quotas(),
    )
    sse: bool = flag(
        "sse", switch, _HTTP, "", "off",
        "also serve the old HTTP+SSE transport at `/sse`, whose messages have at most 1 MiB",
    )
    drain_s: float = flag(
        "drain", duration, _HTTP, "TIME", "20s",
        "how long an end by SIGTERM takes at most: calls that run are answered, or told before it "
        "is over that the server stops",
    )
    fleet: str = flag(
        "fleet", word, _FLEET, "HOST:PORT", "none: sessions are on this machine",
        "serve the sessions of a fleet, the Ray cluster whose head has this address; its nodes "
        "have the settings of sessions", value="",
    )
    fleet_place: str = flag(
        "fleet-place", word, _FLEET, "IP", "the one that Ray finds",
        "this machine's address in that cluster, where it has several", value="",
    )
    fleet_store: str = flag(
        "fleet-store", word, _FLEET, "DIR|URL", "none",
        "where nodes save sessions for each other: a shared folder, or an object store", value="",
    )
    fleet_key: Path | None = flag(
        "fleet-key", path, _FLEET, "FILE", "the token of the cluster",
        "keys of the store, one a line: the first signs, any of them verifies", value=None,
    )
    driver: Path | None = None
    file: Path | None = None
    ignored_keys: IgnoredKeys | None = None
    unmounted: str = ""
    tool_servers: tuple[ToolServer, ...] = ()

    @property
    def patience(self) -> float:
        """Factor on the time that shutdown may take: 1 on stdio, whose clients wait briefly.

        A service may have hundreds of sessions, and its supervisor waits longer.
        """
        return 1.0 if self.http is None else 6.0

    @property
    def several(self) -> bool:
        """True if there may be several principals, as there may be behind a fleet's frontends."""
        known = self.tokens is not None or bool(self.issuer)
        return bool(self.fleet_store) or (self.http is not None and known)

    @property
    def saved_bytes(self) -> int:
        """Bound on the variables of all hibernated sessions together; 0 is no limit."""
        return SAVED_BYTES if self.persist is None else self.persist.bytes

    @property
    def trusted_paths(self) -> tuple[Path, ...]:
        """The operator's files and folders that servers run, or read settings or packages from."""
        given = [self.file] if self.file is not None else []
        sources = [each.removeprefix("file://") for each in (self.index_url, *self.find_links)]
        given += [Path(each) for each in sources if each.startswith("/")]
        return tuple(Path(os.path.realpath(path)) for path in given)

    @property
    def environ(self) -> tuple[tuple[str, str], ...]:
        """Names and values of `variables`."""
        return tuple((each.name, each.value or "") for each in self.variables)

    @property
    def kernel_environment(self) -> tuple[tuple[str, str], ...]:
        """Names and values that code finds in its environment."""
        libraries = [(LIBRARY_PATH, str(self.driver))] if self.driver is not None else []
        return (*self.environ, *libraries)

    @property
    def masked_values(self) -> tuple[tuple[str, str], ...]:
        """Names and values that are kept out of outputs and logs."""
        servers = (*self.attach, *(each.server for each in self.kernels if each.server))
        tokens = (("Jupyter token", each.token) for each in servers if each.token)
        expanded = (pair for each in self.tool_servers for pair in each.expanded)
        secrets = ((each.name, each.value) for each in self.secrets)
        return (*self.environ, *secrets, *tokens, *expanded)

    @property
    def confined(self) -> bool:
        """True if kernels run in a sandbox. Where none works, the server does not start."""
        return self.sandbox != ("none",)
# fmt: on


def _options(table: type[Settings | Limits]) -> Iterator[Option]:
    for entry in dataclasses.fields(table):
        if entry.name == "limits":
            yield from _options(Limits)
        elif (option := entry.metadata.get("option")) is not None:
            yield dataclasses.replace(option, field=entry.name)


OPTIONS = tuple(_options(Settings))
"""Every setting in the order of `--help`."""
