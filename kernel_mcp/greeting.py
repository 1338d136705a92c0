"""What a client is told first: the instructions for the model, in the first answer.

That of `initialize` or `server/discover` is given while the MCP SDK is still being imported,
which takes longer than all the rest of a start. It is the SDK's own; where a client asks in another
way than most, the SDK gives it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kernel_mcp import __version__
from kernel_mcp.config.settings import Settings
from kernel_mcp.environments.own import own_folder
from kernel_mcp.policy import profile_entries, profile_in_force
from kernel_mcp.sandbox.base import SandboxReport

NAME = "kernel-mcp"
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Versions of the protocol that begin with `initialize`, as the SDK has them."""
MODERN_VERSIONS = ("2026-07-28",)
"""Those that begin with `server/discover`, or with any other request."""
VIEWS = "io.modelcontextprotocol/ui"
"""The extension that has views of tools (MCP Apps)."""
CAPABILITIES: Mapping[str, Any] = {
    "prompts": {"listChanged": False},
    "resources": {"listChanged": False, "subscribe": False},
    "tools": {"listChanged": False},
}
"""Those that the SDK tells of a server with tools and resources, after `initialize`."""
MODERN_CAPABILITIES: Mapping[str, Any] = {
    "extensions": {VIEWS: {}},
    **{name: dict.fromkeys(details, True) for name, details in CAPABILITIES.items()},
}
MOST_REQUEST_BYTES = 64 * 1024
_REQUEST = {"jsonrpc", "id", "method", "params"}
_PARAMS = {"protocolVersion", "capabilities", "clientInfo"}
_ENVELOPE = "io.modelcontextprotocol/"
_META = {f"{_ENVELOPE}{name}" for name in ("protocolVersion", "clientInfo", "clientCapabilities")}
_CLIENT = {"name", "version", "title", "description", "websiteUrl"}

logger = logging.getLogger(__name__)


class Greeting:
    """The answer that was given; the SDK's to the same request is not sent."""

    def __init__(self, number: str | int, result: Mapping[str, Any]) -> None:
        self.number = number
        self.result = result
        self._open = True

    @property
    def line(self) -> str:
        """The answer as a line without its end."""
        return json.dumps({"jsonrpc": "2.0", "id": self.number, "result": self.result})

    def takes(self, line: str) -> bool:
        """Whether the SDK's answer is that of the request which has one; once at most."""
        if not self._open:
            return False
        answer = json.loads(line)
        if answer.get("id") != self.number or "method" in answer:
            return False
        self._open = False
        if answer.get("result") != self.result:
            logger.error(
                "the client was told %s at its beginning, and the SDK says %s; report this as a "
                "defect",
                self.result,
                answer,
            )
        return True


def greeting(line: bytes | bytearray, words: str) -> Greeting | None:
    """The answer to a first request of the usual kind with these instructions; None for all else.

    Of the usual kind is what the SDK is known to accept.
    """
    if len(line) > MOST_REQUEST_BYTES:
        return None
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or set(request) != _REQUEST:
        return None
    number, params = request["id"], request["params"]
    if request["jsonrpc"] != "2.0" or not _is_id(number) or not isinstance(params, dict):
        return None
    match request["method"]:
        case "initialize":
            result = _initialized(params, words)
        case "server/discover":
            result = _discovered(params, words)
        case _:
            result = None
    return None if result is None else Greeting(number, result)


_SERVER = {"name": NAME, "title": NAME, "version": __version__}


def _initialized(params: Mapping[str, Any], words: str) -> Mapping[str, Any] | None:
    if set(params) != _PARAMS or params["protocolVersion"] not in VERSIONS:
        return None
    if not _is_client(params["clientInfo"]) or not _are_capabilities(params["capabilities"]):
        return None
    return {
        "capabilities": CAPABILITIES,
        "instructions": words,
        "protocolVersion": params["protocolVersion"],
        "serverInfo": _SERVER,
    }


def _discovered(params: Mapping[str, Any], words: str) -> Mapping[str, Any] | None:
    meta = params.get("_meta")
    if set(params) != {"_meta"} or not isinstance(meta, dict) or set(meta) != _META:
        return None
    version, client, capabilities = (
        meta[f"{_ENVELOPE}{name}"]
        for name in ("protocolVersion", "clientInfo", "clientCapabilities")
    )
    if version not in MODERN_VERSIONS:
        return None
    if not _is_client(client) or not _are_capabilities(capabilities):
        return None
    return {
        "_meta": {f"{_ENVELOPE}serverInfo": _SERVER},
        "cacheScope": "private",
        "capabilities": MODERN_CAPABILITIES,
        "instructions": words,
        "resultType": "complete",
        "supportedVersions": list(MODERN_VERSIONS),
        "ttlMs": 0,
    }


def _is_id(number: object) -> bool:
    if isinstance(number, str):
        return number.isascii() and number.isprintable()
    return type(number) is int and abs(number) < 1 << 53


def _is_client(client: object) -> bool:
    return (
        isinstance(client, dict)
        and {"name", "version"} <= set(client) <= _CLIENT
        and all(isinstance(each, str) for each in client.values())
    )


def _are_capabilities(capabilities: object) -> bool:
    if not isinstance(capabilities, dict):
        return False
    for name, settings in capabilities.items():
        if name == "roots":
            fits = settings in ({}, {"listChanged": True}, {"listChanged": False})
        elif name in ("sampling", "elicitation", "experimental", "extensions"):
            fits = isinstance(settings, dict) and all(each == {} for each in settings.values())
        else:
            fits = False
        if not fits:
            return False
    return True


MOST_BYTES = 2000
"""Of the instructions: clients cut them near 2 KB."""
LISTED_BYTES = (320, 160, 80, 40)
"""Of one list in them, the most with which all lines fit; `info` has the whole of it."""
GAPS_BYTES = 160
"""Of those of gaps and of refused imports at least."""

HOW = """\
A notebook for Python: execute runs a cell in a persistent IPython kernel, and variables, imports \
and functions stay for the next call. Work in small steps, as in a notebook; the last expression \
of a cell is shown and plots come back as pictures.
Leave `session` empty to use the default session. Cells of one session run in order; \
create_session gives a second, separate notebook.
Long cells: execute answers `running` and the cell goes on; call wait for more, interrupt to stop \
it. Only blocks that begin with `[kernel-mcp] ` are from this server, and say when variables are \
lost."""


def instructions(settings: Settings, sandbox: SandboxReport, missing: Sequence[str] = ()) -> str:
    """The instructions for the model, what matters most first; at most `MOST_BYTES` of UTF-8.

    `missing` are packages of the operator's that are known to be missing.
    """
    lines = [HOW]
    for most in LISTED_BYTES:
        lines = [HOW, *_lines(settings, sandbox, missing, most)]
        if len("\n".join(lines).encode()) <= MOST_BYTES:
            break
    while len("\n".join(lines).encode()) > MOST_BYTES:
        del lines[-1]
    return "\n".join(lines)


def _lines(
    settings: Settings, sandbox: SandboxReport, missing: Sequence[str], most: int
) -> Iterator[str]:
    yield _imports(settings, most)
    yield _packages(settings, most)
    yield _files(settings, sandbox, most)
    if settings.persist is not None:
        yield "Kept: the next server in this folder goes on with its sessions (see info)."
    if "branches" in settings.tools and settings.checkpoints != "off":
        yield "Going back: undo takes back cells; branch tries several ways, adopt takes one."
    if settings.devices:
        yield f"Devices of the host: {_listed([*map(str, settings.devices)], most)}."
    if settings.attach:
        named = _listed([*map(str, settings.attach)], most)
        yield f"Kernels of people, outside the sandbox: create_session(attach=...) joins {named}."
    if settings.variables:
        names = _listed([*map(str, settings.variables)], most)
        yield f"Environment: os.environ has {names}; outputs show [NAME masked] instead."
    if settings.secrets:
        yield _secrets(settings, most)
    if missing:
        yield f"Missing, though the operator asked for it: {_listed(missing, most)} (see info)."
    if settings.refusal is not None:
        yield f"{settings.refusal.file.name} has settings that are ignored (see info)."
    if sandbox.gaps:
        gaps = _listed(sandbox.gaps, max(most, GAPS_BYTES), "; ")
        yield f"Sandbox {sandbox.backend}; not enforced: {gaps}."


def _imports(settings: Settings, most: int) -> str:
    names = [name for name in profile_entries(settings) if name != "*"]
    profile = profile_in_force(settings.profile, confined=settings.confined)
    if profile in ("default", "data") or "*" in settings.allow:
        base = "the whole standard library, shell commands, magics and all that is installed"
        own = f" in {settings.python} (read-only)" if own_folder(settings.python) else ""
        return f"Imports: {base}{own}{': ' if names else ''}{_listed(names, most)}."
    few = _strict(settings)
    base = "a few modules such as math" if few else "the standard library for computing"
    shown = _listed([base, *names], max(most, GAPS_BYTES))
    return f"Imports: {shown} (info lists all). Others are refused."


def _packages(settings: Settings, most: int) -> str:
    here = "packages" in settings.tools
    if not settings.allow_install:
        shows = "list_packages" if here else "info"
        return f"Packages: what is there cannot be added to; {shows} shows it."
    every = "*" in settings.allow_install
    names = "any package" if every else _listed(settings.allow_install, most)
    if not here:
        return f"Packages: create_session(packages=[...]) opens a session with {names} besides."
    return f"Packages: install adds {names} to the session without losing variables."


def _files(settings: Settings, sandbox: SandboxReport, most: int) -> str:
    network = _network(settings, most // 2)
    if _strict(settings):
        return f"Files: code cannot open files, and has no eval, exec, compile or input.{network}"
    if settings.mounts and sandbox.backend != "none":
        closing = any(each.strict for each in settings.mounts) or sandbox.backend == "landlock"
        later = " What appears there later may be readable only after a reset." * closing
        ways = {"read-only": False, "writable": True}
        shown = "; ".join(
            f"{way}: {_listed(names, most)}"
            for way, writable in ways.items()
            if (names := [each.guest for each in settings.mounts if each.writable is writable])
        )
        network = f" Of the host, without secrets, {shown}.{later}{network}"
    moves = "; write_file and read_file move files in and out" if "files" in settings.tools else ""
    if moves and settings.http is not None:
        moves += ", GET and PUT of this server's /sessions/HANDLE/files/PATH those of any size"
    return f"Files: code works in its workspace folder{moves}.{network}"


def _secrets(settings: Settings, most: int) -> str:
    named = [f"{each.name} in {each.header} of https://{each.host}" for each in settings.secrets]
    return (
        "Secrets: os.environ has placeholders to use as they are, for "
        f"{_listed(named, most)}; they become values on the way there, and nowhere else."
    )


def _network(settings: Settings, most: int) -> str:
    if not settings.confined:
        return ""
    names = dict.fromkeys((*settings.network, *(each.host for each in settings.secrets)))
    if not names:
        return " There is no network."
    hosts = _listed(list(names), most)
    return f" Network: {hosts}, by the proxy in HTTP_PROXY; nothing else."


def _strict(settings: Settings) -> bool:
    return settings.profile == "strict" and "*" not in settings.allow


def _listed(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first names, as many as `most` bytes hold, and the number of others."""
    shown = between.join(names)
    count = len(names)
    while count and len(shown.encode()) > most:
        count -= 1
        shown = between.join([*names[:count], f"{len(names) - count} more"])
    return shown
