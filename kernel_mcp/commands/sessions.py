"""`kernel-mcp sessions`: running sessions and persisted ones."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_mcp.config.load import HELP, OTHERS, settings_from, settings_parser
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.rundir import default_base
from kernel_mcp.linux.process import is_terminal
from kernel_mcp.output.text import one_line
from kernel_mcp.sessions.admin import ask_all
from kernel_mcp.units import duration, in_mebibytes

if TYPE_CHECKING:
    from kernel_mcp.sessions.store import SessionStore

_USAGE = "sessions: expected one of list, top, join, stop, forget; see kernel-mcp sessions --help"
_HELP = """\
usage: kernel-mcp sessions list|top|join|stop|forget [flags]

Sessions of running servers, and those that outlive theirs: each is there again for the next server
in its folder.

  list                    all of this user, with the folder of each; and those that servers of
                          this user have now, with principal, state, process, processor time,
                          the running cell, and what of the operator's the code may use
  top                     those of running servers by use of the processor, again every 2 s
  join [SESSION]          print the connection file through which people's programs, such as
                          `jupyter console --existing FILE`, work in a running session beside
                          its agent; a handle or a name, needed where there are several
  stop [SESSION]          interrupt what runs in a session, save it and end it: one by its handle
                          or name, those of --principal NAME, those opened --older-than TIME ago
  forget NAME...          remove what is kept of sessions of the current folder; `default` is
                          the one that calls use which name none
  forget --all            remove what is kept of all sessions of this user

Each has its own flags: kernel-mcp sessions forget --help"""
_ABOUT = {
    "list": "Sessions that are kept, and those of running servers.",
    "top": "Sessions of running servers, those first that use the processor most; Ctrl-C ends it.",
    "join": "Print the connection file of a running session, for people's programs.",
    "stop": "Interrupt what runs in sessions of running servers, save them and end them. Their "
    "owners are told at their next call. With several conditions, all have to hold.",
    "forget": "Remove what is kept of sessions.",
}
_SHOWN = ("state-dir", "persist")
TOP_S = 2.0
"""Seconds between two lists of `top`."""


def run_sessions(argv: Sequence[str]) -> int:
    """Run one `sessions` command and return its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_HELP)
        return 0
    if command not in _ABOUT:
        raise ConfigError(_USAGE)
    parser = settings_parser(
        f"kernel-mcp sessions {command}", _ABOUT[command], OTHERS, shown=_SHOWN
    )
    if command in ("join", "stop"):
        parser.add_argument("session", nargs="?", default="", help="its handle or name")
    if command == "stop":
        parser.add_argument("--principal", metavar="NAME", help="all sessions of this principal")
        parser.add_argument("--older-than", metavar="TIME", help="opened so long ago, as 2h or 1d")
    if command == "forget":
        parser.add_argument("names", nargs="*", metavar="NAME", help="of sessions of --folder")
        parser.add_argument("--folder", metavar="DIR", help="where (default: the current folder)")
        parser.add_argument("--all", action="store_true", help="all sessions of this user")
    flags = vars(parser.parse_args(list(rest)))
    names = [str(name) for name in flags.pop("names", None) or ()]
    folder, every = flags.pop("folder", None) or ".", bool(flags.pop("all", False))
    session, principal = str(flags.pop("session", "")), flags.pop("principal", None)
    older = flags.pop("older_than", None)
    from kernel_mcp.sessions.persistence_setup import store_of

    settings = settings_from(flags)
    state = state_folder(settings)
    if command == "join":
        return _join(state, session)
    if command == "stop":
        return _stop(state, session, principal, older)
    if command == "top":
        return _top(state)
    store = store_of(settings)
    if command == "list":
        return _list(store, state)
    if not (names or every):
        raise ConfigError("sessions forget: expected names of sessions, or --all")
    return _forget_sessions(store, os.path.realpath(folder), None if every else names)


def _list(store: SessionStore, state: Path) -> int:
    """Print persisted sessions that no server has, then running ones.

    Servers that do not answer are left out.
    """
    servers = list(ask_all(state))
    running = {each.get("persisted_id") for server in servers for each in server["sessions"]}
    saved = _list_persisted(store, running)
    for server in servers:
        for each in server["sessions"]:
            print(_row(each, saved=saved.get(each.get("persisted_id"), "")))
        _print_server(server)
    return 0


def _list_persisted(store: SessionStore, running: Collection[object]) -> dict[object, str]:
    """Print persisted sessions but the `running` ones; return when those were saved, by id."""
    from kernel_mcp.sessions.words import moment

    store.collect()
    found = store.entries()
    now = store.now()
    held: dict[object, str] = {}
    for each in found:
        saved = each.saved
        key = "?  (never saved, or of another version of kernel-mcp)"
        if saved is not None:
            key = f"{one_line(saved.folder)}  {one_line(saved.name)}"
        left = max(0.0, (each.used + store.most_s - now) / 86400)
        ends = "in use" if each.held else f"goes in {left:.1f} days"
        names = saved.names if saved is not None else ()
        when = moment(saved.moment, now) if saved is not None and saved.moment else "never"
        told = f"{len(names)} variables, saved {when}, {in_mebibytes(each.bytes)}"
        if each.id in running:
            held[each.id] = told
        else:
            print(f"{key}  {told}, {ends}")
    count = "1 session" if len(found) == 1 else f"{len(found)} sessions"
    print(f"{count}, {in_mebibytes(sum(each.bytes for each in found))}")
    return held


def _row(each: Mapping[str, Any], *, used: str = "", saved: str = "") -> str:
    """Return the row of a session; `used` is its use of the processor, else its time in all."""
    called = one_line(f"{each['session']}  {each['name'] or '-'}  {each['principal']}")
    facts = [each["state"], in_mebibytes(each["memory_bytes"]), _cells(each["cells"])]
    facts.append(f"{_age(each['age_s'])} old")
    if disk := each.get("disk_bytes"):
        facts.append(f"disk {in_mebibytes(disk)}")
    if each.get("pid"):  # servers of earlier versions say none of these
        facts.append(f"process {each['pid']} {used or 'used {:.1f} s'.format(each['cpu_s'])}")
    if each.get("cell"):
        facts.append(f"cell {each['cell']} has run for {_age(each['cell_s'])}")
    if each.get("client"):
        facts.append(f"last client {each['client']}")
    doors = {kind: names for kind, names in each.get("doors", {}).items() if kind != "ask"}
    facts += [f"{kind} {' '.join(names)}" for kind, names in doors.items()]
    facts += [saved] * bool(saved)
    if tasks := each.get("tasks"):
        facts.append(f"followed by tasks: {', '.join(map(str, tasks))}")
    if asks := each.get("asks"):
        facts.append(f"cell {asks} waits for a person's answer")
    return f"{called}  {one_line(', '.join(facts))}"


def _print_server(server: Mapping[str, Any]) -> None:
    sessions = server["sessions"]
    where = f"on {server['http']}" if server["http"] else "on stdin and stdout"
    count = "1 session" if len(sessions) == 1 else f"{len(sessions)} sessions"
    size = in_mebibytes(sum(each["memory_bytes"] for each in sessions))
    print(f"server {server['pid']} {where} in {one_line(server['folder'])}: {count} now, {size}")


def _top(state: Path) -> int:
    """Print running sessions at intervals, until Ctrl-C; once if stdout is no terminal."""
    used: dict[str, float] = {}
    then, shown = 0.0, is_terminal(sys.stdout)
    with suppress(KeyboardInterrupt):
        while True:
            found, before, since = _running(state), used, then
            used, then = (
                {each["session"]: each.get("cpu_s", 0.0) for each in found},
                time.monotonic(),
            )
            rates = {
                name: max(0.0, cpu - before.get(name, cpu)) / (then - since)
                for name, cpu in used.items()
            }
            if not (shown or since):
                time.sleep(TOP_S)
                continue
            print("\x1b[H\x1b[2J" * shown, end="")
            for each in sorted(found, key=lambda each: -rates[each["session"]]):
                print(_row(each, used=f"uses {rates[each['session']]:.0%}"))
            print(f"{len(found)} sessions", flush=True)
            if not shown:
                break
            time.sleep(TOP_S)
    return 0


def _stop(state: Path, session: str, principal: str | None, older: str | None) -> int:
    """Stop the matching sessions; return 1 if there is none, or one could not be saved."""
    if not (session or principal or older):
        raise ConfigError("sessions stop: expected SESSION, --principal NAME or --older-than TIME")
    try:
        older_s = duration(older) if older else 0.0
    except ValueError as error:
        raise ConfigError(f"--older-than {older}: {error}") from None
    found = [
        each
        for each in _running(state)
        if session in ("", each["session"], each["name"])
        and principal in (None, each["principal"])
        and each["age_s"] >= older_s
    ]
    handles = [each["session"] for each in found]
    if session and len(found) > 1:
        raise ConfigError(f"{session}: name one session by its handle, of {', '.join(handles)}")
    if not found:
        print(f"no such session of a server with its state in {state}", file=sys.stderr)
    ended: dict[str, str] = {}
    for answer in ask_all(state, {"stop": handles}):
        ended |= answer.get("stopped", {})
    for each in found:
        unsaved = ended.get(each["session"], "its server did not answer")
        end = f"stopped, not saved: {unsaved}" if unsaved else "stopped and saved"
        called = f"{each['session']}  {each['name'] or '-'}  {each['principal']}"
        print(one_line(f"{called}  {end}"))
    return 0 if found and not any(ended.get(each, "?") for each in handles) else 1


def _running(state: Path) -> list[Mapping[str, Any]]:
    """Return the summaries of the sessions of all running servers."""
    return [each for server in ask_all(state) for each in server["sessions"]]


def state_folder(settings: Settings) -> Path:
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
