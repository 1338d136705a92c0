"""`kernel-mcp setup`: print this server's entry for an MCP client, or add it to the client's file.

Nothing that a user has written is lost: other entries stay, and a file that cannot be changed
safely is refused with the reason.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from kernel_mcp.config.load import load, settings_parser
from kernel_mcp.config.settings import OPTIONS, Settings
from kernel_mcp.config.values import close_to, parse_toml
from kernel_mcp.errors import ConfigError
from kernel_mcp.linux.folders import home_folder, replace_file
from kernel_mcp.records import dataclass

Entry: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Client:
    """One MCP client.

    place     its file, below the home folder (`~/`) or the current one
    key       the object or table of its servers
    variable  environment variable with the folder of the file; empty if there is none
    typed     True if an entry names its transport
    folder    the folder in which it works, as in its entries; empty if it has none
    """

    title: str
    place: str
    key: str = "mcpServers"
    variable: str = ""
    typed: bool = False
    folder: str = "."

    @property
    def usual_flags(self) -> list[str]:
        """The server's flags if none are given."""
        return [*(("--mount", self.folder) if self.folder else ()), *_USUAL]

    @property
    def toml(self) -> bool:
        """True for a file in TOML, False for JSON."""
        return self.place.endswith(".toml")

    def file(self, environ: Mapping[str, str]) -> Path:
        """Return the path of the file. Raises ConfigError without a home folder."""
        if folder := environ.get(self.variable, ""):
            return Path(folder, Path(self.place).name).absolute()
        if not self.place.startswith("~/"):
            return Path(self.place).absolute()
        home = home_folder()
        if home is None:
            raise ConfigError(
                f"setup: this user has no home folder, in which {self.title} keeps {self.place}: "
                "set HOME"
            )
        return home / self.place[2:]


CLIENTS = {
    "claude-code": Client(
        "Claude Code", "~/.claude.json", variable="CLAUDE_CONFIG_DIR", typed=True
    ),
    "cursor": Client("Cursor", "~/.cursor/mcp.json"),
    "vscode": Client(
        "VS Code", ".vscode/mcp.json", "servers", typed=True, folder="${workspaceFolder}"
    ),
    "codex": Client("Codex", "~/.codex/config.toml", "mcp_servers", "CODEX_HOME"),
    "gemini": Client("Gemini CLI", "~/.gemini/settings.json"),
    "lmstudio": Client("LM Studio", "~/.lmstudio/mcp.json", folder=""),
}
_ALSO = {"claude": "claude-code", "code": "vscode", "geminicli": "gemini", "codexcli": "codex"}
_ABOUT = f"""\
Print the entry by which an MCP client starts this server, with the flags given here. With --write
it is added to the client's file; other entries stay as they are.
Clients: {", ".join(CLIENTS)}
"""
_EPILOG = """\
examples:
  kernel-mcp setup cursor
  kernel-mcp setup codex --write
  kernel-mcp setup claude-code --write --allow numpy,polars --mount ~/data
"""
MOST_KEPT = 20
"""Maximum number of earlier versions that are kept of a file."""
_USUAL = ("--allow", "numpy,pandas,matplotlib", "--allow-install", "*")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def run_setup(argv: Sequence[str]) -> int:
    """Run `setup` and return its exit code. Raises ConfigError."""
    parser = settings_parser("kernel-mcp setup CLIENT", _ABOUT, _EPILOG)
    parser.add_argument("client", nargs="?", default="", metavar="CLIENT")
    parser.add_argument("--write", action="store_true", help="add it to the client's file")
    parser.add_argument("--name", help="of the server in the client (default: notebook)")
    flags = vars(parser.parse_args(list(argv)))
    client = _client(flags.pop("client"))
    write, name = flags.pop("write", False), flags.pop("name", "notebook")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name}: expected letters, digits, - and _")
    if "http" in flags:
        raise ConfigError(
            "setup: a client of a server with --http needs its address and a token: see "
            "docs/clients.md"
        )
    # A wrong value is reported here, not by the client.
    _require_paths(load(flags, os.environ, Path.cwd()))
    chosen = _words(flags)
    command = [*_command(), *(chosen or client.usual_flags)]
    if any("\ud800" <= each <= "\udfff" for word in command for each in word):
        raise ConfigError("setup: a flag or a path is not UTF-8, which a client's file cannot hold")
    entry: Entry = {"type": "stdio"} if client.typed else {}
    entry |= {"command": command[0], "args": command[1:]}
    if write:
        return _write(client, name, entry, chosen=bool(chosen))
    print(f"# {client.title}: {client.place}", file=sys.stderr)
    if client.title == "Claude Code":
        line = shlex.join(["claude", "mcp", "add", "--scope", "user", name, "--", *command])
        print(f"# or by its own command: {line}", file=sys.stderr)
    merged = _toml_with if client.toml else _json_with
    print(merged("", client.key, name, entry), end="")
    return 0


def _require_paths(settings: Settings) -> None:
    """Raise ConfigError if a path does not exist; one with a variable of the client may not."""
    named = [
        *(("mount", mount.host) for mount in settings.mounts),
        *(("project", path) for path in (settings.project,) if path),
        *(("requirements", path) for path in (settings.requirements,) if path),
    ]
    for flag, path in named:
        if "${" not in str(path) and not os.path.lexists(path):
            raise ConfigError(
                f"--{flag} {path}: there is no such folder or file; make it, or name another, "
                "best by its whole path"
            )


def _client(given: str) -> Client:
    name = re.sub(r"[\s_-]", "", given.lower())
    known = {each.replace("-", ""): each for each in CLIENTS} | _ALSO
    if name in known:
        return CLIENTS[known[name]]
    close = close_to(name, known)
    meant = f"did you mean {known[close[0]]}?" if close else f"expected {', '.join(CLIENTS)}"
    raise ConfigError(f"setup: there is no client {given}; {meant}" if given else f"setup: {meant}")


def _command() -> list[str]:
    """Return the command that starts this installation; clients may have another PATH."""
    called = Path(sys.argv[0]).absolute()
    for each in (called, Path(sys.executable).with_name("kernel-mcp")):
        if each.name == "kernel-mcp" and each.is_file():
            if "archive-v0" in each.parts:  # uvx: a folder of uv's cache
                print(
                    "kernel-mcp: warning: uv may remove this copy of kernel-mcp, which uvx has "
                    "made; install one with `uv tool install`, then run its setup",
                    file=sys.stderr,
                )
            return [os.path.normpath(each)]
    return [sys.executable, "-m", "kernel_mcp"]


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return parsed flags as words of a command line."""
    switches = {option.name for option in OPTIONS if not option.metavar}
    words: list[str] = []
    for name, given in flags.items():
        for value in given if isinstance(given, list) else [given]:
            if name in switches:
                words.append(f"--{name}")
            elif value.startswith("-"):
                words.append(f"--{name}={value}")
            else:
                words += [f"--{name}", value]
    return words


def _write(client: Client, name: str, entry: Entry, *, chosen: bool) -> int:
    file = client.file(os.environ)
    place = Path(os.path.realpath(file))  # a link stays one
    try:
        old = _content(place)
        mark = codecs.BOM_UTF8 if old.startswith(codecs.BOM_UTF8) else b""
        text = old[len(mark) :].decode()
        if client.toml:
            made = mark + _toml_with(text, client.key, name, entry).encode()
        else:
            made = mark + _json_with(text, client.key, name, entry, chosen=chosen).encode()
        if made == old:
            print(f"{file} has this entry already")
            return 0
        if old and not place.stat().st_mode & stat.S_IWUSR:
            raise ValueError("it is read-only")
        place.parent.mkdir(parents=True, exist_ok=True)
        if old:
            _keep(place, old)
        if _content(place) != old:
            raise ConfigError(f"{file}: another program has just changed it; try again")
        replace_file(place, made)
    except OSError as error:
        where = error.filename or file
        raise ConfigError(f"{where}: {error.strerror or error}; nothing was written") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file}: {error}; nothing was written. Without --write the entry is printed"
        ) from None
    print(f"{file} has the entry {name} now; restart {client.title}")
    return 0


def _keep(place: Path, old: bytes) -> None:
    """Keep the content before a change beside the file, with a number if there are earlier ones."""
    base = f"{place.name}.before-kernel-mcp"
    names = (base, *(f"{base}-{number}" for number in range(2, MOST_KEPT + 1)))
    for kept in map(place.with_name, names):
        if not os.path.lexists(kept):
            replace_file(kept, old)
            return
        if kept.is_file() and kept.read_bytes() == old:
            return
    raise ValueError(f"there are {MOST_KEPT} earlier versions of it beside it: remove some")


def _content(place: Path) -> bytes:
    """Return the bytes of a file; none if it does not exist. Raises OSError, ValueError."""
    if not place.exists():
        return b""
    if not place.is_file():
        raise ValueError("it is no ordinary file")
    return place.read_bytes()


def _json_with(text: str, key: str, name: str, entry: Entry, *, chosen: bool = True) -> str:
    """Return a JSON document with the entry. Raises ValueError with the reason.

    Unless its flags are `chosen`, they replace none that an earlier entry has.
    """
    try:
        document = {}
        if text.strip():
            document = json.loads(text, object_pairs_hook=_once, parse_float=_exact)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not plain JSON in line {error.lineno}, perhaps for a comment or a last comma, which "
            "rewriting would lose"
        ) from None
    servers = document.setdefault(key, {}) if isinstance(document, dict) else None
    there = servers.get(name, {}) if isinstance(servers, dict) else None
    if not isinstance(servers, dict) or not isinstance(there, dict):
        raise ValueError(f"it has no object `{key}` of servers")
    if there and not _is_ours(there):
        raise ValueError(f"another server is called {name} there: take another --name")
    if there | entry == there:
        return text
    if not chosen and there.get("args") not in (None, [], entry["args"]):
        raise ValueError(
            f"the entry {name} has flags of its own there, which the usual ones would replace: "
            "give those that you want"
        )
    servers[name] = there | entry
    indent = re.search(r'^([ \t]+)"', text, re.MULTILINE)
    made = json.dumps(
        document,
        indent=indent[1] if indent else 2,
        ensure_ascii=bool(text) and text.isascii(),
        allow_nan=False,
    )
    return f"{made}\n".replace("\n", _line_end(text))


def _line_end(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _exact(digits: str) -> float:
    found = float(digits)
    with suppress(ArithmeticError):  # an exponent of many digits
        if Decimal(digits) == Decimal(repr(found)):
            return found
    raise ValueError("it has a number that rewriting JSON would round")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice, of which rewriting would lose one")
    return found


def _is_ours(entry: Mapping[str, Any]) -> bool:
    """Return True if an entry starts kernel-mcp."""
    args = entry.get("args")
    words = [entry.get("command"), *(args if isinstance(args, list) else [])]
    return any(Path(str(each)).name in ("kernel-mcp", "kernel_mcp") for each in words)


def _toml_with(text: str, key: str, name: str, entry: Entry) -> str:
    """Return a TOML document with a table of the entry at its end. Raises ValueError."""
    before = parse_toml(text)
    servers = before.get(key, {})
    if isinstance(servers, dict) and (there := servers.get(name)) is not None:
        if isinstance(there, dict) and there | entry == there:
            return text
        raise ValueError(
            f"it has a table [{key}.{name}] already: change that one, or take another --name"
        )
    lines = [f"[{key}.{name}]"]
    for word, value in entry.items():
        lines.append(f"{word} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f"))
    end = _line_end(text)
    begin = [text.removesuffix("\n").removesuffix("\r"), ""] if text.strip() else []
    made = end.join([*begin, *lines, ""])
    try:
        sound = parse_toml(made) == before | {key: {**servers, name: entry}}
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(f"its `{key}` is written so that no table can be appended")
    return made
