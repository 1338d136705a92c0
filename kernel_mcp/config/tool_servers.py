"""The file of `--tool-servers`: MCP servers whose tools code may call, as clients list them.

    {"mcpServers": {
        "crm": {"command": "crm-mcp", "args": ["--org", "${ORG}"], "trust": "read-only"},
        "git": {"url": "https://example.com/mcp", "headers": {"X-Key": "${KEY}"}}}}

No error contains the value of a variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kernel_mcp.config.values import texts
from kernel_mcp.errors import ConfigError
from kernel_mcp.records import dataclass
from kernel_mcp.units import MIB, duration

READ_ONLY = "read-only"
"""The value of `trust` with which tools run unasked that their server calls read-only."""
MAX_FILE_BYTES = MIB
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_GLOB = re.compile(r"[A-Za-z0-9_.*?/-]{1,200}")
_KEYS = (
    *("command", "args", "env", "cwd", "url", "headers", "type", "disabled"),
    *("trust", "rate", "per", "sandbox"),
)
_HTTP = ("http", "streamable-http", "streamableHttp")


@dataclass(frozen=True, slots=True)
class ToolServer:
    """An MCP server: a program to start (`command`), or the address of one (`url`).

    trust     `READ_ONLY`, or empty
    rate      calls per `per_s` seconds; 0 for no limit
    expanded  names and values of the variables that its entry names
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    cwd: str = ""
    url: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    trust: str = ""
    rate: int = 0
    per_s: float = 1.0
    expanded: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def about(self) -> str:
        """Its name and how it runs, in words, without a secret."""
        if self.url:
            return f"{self.name}: at {urlsplit(self.url).hostname}"
        return f"{self.name}: the program {self.command}, with the rights of the server's user"

    @property
    def secrets(self) -> list[tuple[str, str]]:
        """Names and values that no error text may contain."""
        given = [*self.expanded, *self.env.items(), *self.headers.items()]
        return [*given, *([("url", self.url)] if self.url else [])]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON for the gateway's process, with its secrets."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ToolServer:
        """Return what `to_json` has described."""
        expanded = tuple((name, value) for name, value in row["expanded"])
        return cls(**{**row, "args": tuple(row["args"]), "expanded": expanded})


def tool_names(given: object) -> tuple[str, ...]:
    """Read comma lists of patterns such as `crm.*`, one or a list. Raises ValueError."""
    expected = "expected tools such as crm.list_customers, crm.* or '*'"
    found = [part.strip() for each in texts(given, expected) for part in each.split(",")]
    for each in filter(None, found):
        if not _GLOB.fullmatch(each) or ("." not in each and each != "*"):
            raise ValueError(f"{expected}; {each[:80]!r} names no server and tool")
    return tuple(dict.fromkeys(filter(None, found)))


def read_tool_servers(
    file: Path | None, allowed: Sequence[str], environ: Mapping[str, str]
) -> tuple[ToolServer, ...]:
    """Return the servers in a file, with `${VAR}` and `${VAR:-default}` replaced.

    Entries that are `disabled` are left out. Raises ConfigError, also for `allowed` tools without
    a file.
    """
    if file is None:
        if allowed:
            raise ConfigError(
                "--allow-tool: there are no tools to allow; name their servers with "
                "--tool-servers FILE"
            )
        return ()
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"--tool-servers {file}: it has more than {MAX_FILE_BYTES} bytes")
        content = json.loads(text)
    except OSError as reason:
        raise ConfigError(f"--tool-servers {file}: {reason.strerror}") from None
    except (ValueError, RecursionError) as reason:
        raise ConfigError(f"--tool-servers {file}: not valid JSON: {reason}") from None
    rows = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfigError(
            f'--tool-servers {file}: expected {{"mcpServers": {{"NAME": {{"command": …}}}}}}, as '
            "in the configuration of an MCP client"
        )
    used = [(name, row) for name, row in rows.items() if row.get("disabled") is not True]
    return tuple(_entry(file, name, row, environ) for name, row in used)


def _entry(file: Path, name: str, row: Mapping[str, Any], environ: Mapping[str, str]) -> ToolServer:
    try:
        return _server(name, row, file.parent, environ)
    except ValueError as reason:
        raise ConfigError(f"--tool-servers {file}: {name[:40]}: {reason}") from None


def _server(
    name: str, row: Mapping[str, Any], base: Path, environ: Mapping[str, str]
) -> ToolServer:
    if not _NAME.fullmatch(name):
        raise ValueError("a name has 40 letters, digits, - and _ at most, and begins with a letter")
    if unknown := [key for key in row if key not in _KEYS]:
        raise ValueError(f"there is no key {unknown[0][:40]!r}; known are {', '.join(_KEYS)}")
    used: dict[str, str] = {}

    def expand(text: str) -> str:
        return _expanded(text, environ, used)

    command, url = expand(_text(row, "command")), expand(_text(row, "url"))
    if bool(command) == bool(url):
        raise ValueError("it has either a command, to start it, or the url of one that runs")
    _check(row, command, url)
    trust = _text(row, "trust")
    if trust not in ("", READ_ONLY):
        raise ValueError(f'trust is "{READ_ONLY}", or left out')
    rate = row.get("rate", 0)
    if not isinstance(rate, int) or isinstance(rate, bool) or rate < 0:
        raise ValueError("rate is the number of calls in the time `per`, such as 10")
    if "/" in command:
        command = str(base / Path(command).expanduser())
    return ToolServer(
        name,
        command,
        tuple(map(expand, _texts(row, "args"))),
        _expanded_map(row, "env", expand),
        str(base / Path(expand(_text(row, "cwd"))).expanduser()) if command else "",
        url,
        _expanded_map(row, "headers", expand),
        trust,
        rate,
        duration(row["per"]) if "per" in row else 1.0,
        tuple(used.items()),
    )


def _check(row: Mapping[str, Any], command: str, url: str) -> None:
    """Raise ValueError for keys that do not fit to each other, and for what is not supported."""
    kind = _text(row, "type")
    if kind not in ("", *(["stdio"] if command else _HTTP)):
        raise ValueError(f"type {kind[:40]!r}: only stdio and streamable HTTP are supported")
    for key in ("headers",) if command else ("args", "env", "cwd", "sandbox"):
        if key in row:
            raise ValueError(f"{key} is for servers {'at a url' if command else 'with a command'}")
    if row.get("sandbox", False) is not False:
        raise ValueError(
            "sandbox: programs of tool servers are not confined here; they run as the server's "
            "user. Leave it out, or start the program in a sandbox of yours by its command"
        )
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ValueError("url is no address such as https://example.com/mcp")


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{key} is a text")
    return value


def _texts(row: Mapping[str, Any], key: str) -> Sequence[str]:
    return texts(row.get(key, []), f"{key} is a list of texts")


def _expanded_map(
    row: Mapping[str, Any], key: str, expand: Callable[[str], str]
) -> Mapping[str, str]:
    value = row.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError(f"{key} is an object with texts")
    return {name: expand(each) for name, each in value.items()}


def _expanded(text: str, environ: Mapping[str, str], used: dict[str, str]) -> str:
    """Return the text with its variables replaced, once; note them in `used`.

    Raises ValueError for one that is not set.
    """
    parts = text.split("${")
    found = [parts[0]]
    for part in parts[1:]:
        inner, closed, rest = part.partition("}")
        if not closed:
            raise ValueError("a ${ has no }")
        name, with_default, default = inner.partition(":-")
        value = environ.get(name) or (default if with_default else None)
        if value is None:
            raise ValueError(
                f"the server's environment has no variable {name[:80]}; set it where the server is "
                "started, as in `env` of the client's configuration, or write ${NAME:-default}"
            )
        if name in environ:
            used[name] = value
        found += [value, rest]
    return "".join(found)
