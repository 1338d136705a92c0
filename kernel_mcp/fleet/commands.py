"""Commands of a fleet: `kernel-mcp node`, `kernel-mcp --fleet`, `kernel-mcp fleet`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import select
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.barriers import explained, log_failure
from kernel_mcp.config.load import HELP, OTHERS, settings_from, settings_parser
from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, KernelMcpError, ServerFailure
from kernel_mcp.fleet.cluster import (
    FleetUnavailable,
    answer_of,
    check_address,
    check_head,
    check_network,
    connect,
    import_ray,
    require_authentication,
    secret_of,
)
from kernel_mcp.fleet.handles import check_node
from kernel_mcp.fleet.link import Link
from kernel_mcp.fleet.members import Member
from kernel_mcp.fleet.node import START_S, Node, actor_name, start_options
from kernel_mcp.fleet.registry import registry_of
from kernel_mcp.fleet.remote_nodes import NodeLost
from kernel_mcp.fleet.signed import key_of, keys_of
from kernel_mcp.fleet.storage import storage_of
from kernel_mcp.http.callers import HttpCallers
from kernel_mcp.launch.rundir import default_base
from kernel_mcp.linux.folders import private_folder
from kernel_mcp.linux.shutdown import Shutdown
from kernel_mcp.output.text import one_line
from kernel_mcp.protocol import loopback_pages, mcp_over, serve_wire
from kernel_mcp.stdio_lines import stdio_lines
from kernel_mcp.telemetry.logs import log_to_stderr
from kernel_mcp.units import GIB, duration

logger = logging.getLogger(__name__)

_NODE = """\
Be a node of a fleet: have sessions on this machine for all fronts of the Ray cluster whose head has
the address of --fleet. Ray has to run here already (`ray start --address=...`, with
RAY_AUTH_MODE=token). Give it the flags of a server that are about sessions; they have to be
the same on all nodes.
"""
_NODE_EPILOG = """\
A signal has it give its sessions to other nodes, as far as their cells end within --within, and
end.
"""
_WITHIN = "30s"
LAST_S = 15.0
"""Seconds that the end of a node may take beyond the time for running cells."""
_USAGE = "fleet: expected one of status, drain; see kernel-mcp fleet --help"
_HELP = """\
usage: kernel-mcp fleet status|drain [flags]

The fleet of the Ray cluster whose head has the address of --fleet.

  status          its nodes: sessions, free memory, which drain or are lost; --json prints all
  drain NODE      have a node take no sessions, and give those that it has to others; 0 once it has
                  none. --within is how long cells that run are waited for, --undo ends it

Each has its own flags: kernel-mcp fleet drain --help"""


def run_node(argv: Sequence[str]) -> int:
    """Run `kernel-mcp node` and return its exit code. Raises KernelMcpError."""
    parser = settings_parser("kernel-mcp node", _NODE, _NODE_EPILOG)
    parser.add_argument("--name", metavar="NAME", help="what handles call it (default: the host)")
    parser.add_argument("--within", metavar="TIME", help=f"for cells at its end ({_WITHIN})")
    flags = vars(parser.parse_args(list(argv)))
    name = check_node(str(flags.pop("name", None) or _host_name()))
    within_s = _time(flags, "within", _WITHIN)
    settings = settings_from(flags)
    _check_node(settings)
    log_to_stderr(settings.log_level, settings.log_format)
    keys_of(settings.fleet_key, secret_of(settings.fleet))
    storage_of(settings.fleet_store)
    import_ray()
    check_head(settings.fleet)
    require_authentication(settings.fleet)
    given = _write_settings(settings)
    os.chdir("/")  # else Ray's workers would import modules from the current folder
    sys.path[:] = [each for each in sys.path if each]
    try:
        ray = connect(settings.fleet, place=settings.fleet_place)
        check_network(settings.network, (str(row["NodeManagerAddress"]) for row in ray.nodes()))
        return _start_node(ray, name, str(given), within_s)
    finally:
        given.unlink(missing_ok=True)


def _host_name() -> str:
    name = socket.gethostname().split(".")[0].lower()
    return "".join(each if each.isalnum() else "-" for each in name).strip("-")[:32]


def _time(flags: dict[str, Any], name: str, default: str) -> float:
    given = str(flags.pop(name, None) or default)
    try:
        return float(duration(given))
    except ValueError as error:
        raise ConfigError(f"--{name} {given}: {error}") from None


def _check_node(settings: Settings) -> None:
    """Raise ConfigError for a missing setting, or one that a node may not have."""
    if not settings.fleet or not settings.fleet_store:
        lacks = "--fleet" if not settings.fleet else "--fleet-store"
        raise ConfigError(
            f"node: {lacks} is missing: kernel-mcp node --fleet HOST:PORT --fleet-store PLACE, "
            "where PLACE is a folder that all nodes have mounted, or an object store"
        )
    check_address(settings.fleet)
    if not settings.confined:
        raise ConfigError(
            "--sandbox none: code of any session could reach the cluster, and through it all "
            "machines of the fleet. A node takes a sandbox"
        )
    if settings.tool_servers:
        raise ConfigError(
            "--tool-servers: nodes of a fleet call no tools, as their sessions move to machines "
            "where the programs of these servers are not. Leave it out"
        )
    for flag, given in {
        "--http": settings.http,
        "--workspace": settings.workspace,
    }.items():
        if given is not None:
            raise ConfigError(
                f"{flag}: it is not for a node: fronts serve clients (kernel-mcp --fleet ... "
                "--http ...), and files of sessions move with them"
            )


def _write_settings(settings: Settings) -> Path:
    """Write the settings to a private file for the node's process, and return its path.

    Ray's head would keep them if they were passed as an argument.
    """
    folder = private_folder(settings.state_dir or default_base())
    path = folder / f"node-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        pickle.dump(settings, file)
    return path


def _start_node(ray: Any, name: str, given: str, within_s: float) -> int:
    life = secrets.token_hex(8)
    context = ray.get_runtime_context()
    place = next(
        str(each["NodeManagerAddress"])
        for each in ray.nodes()
        if each["NodeID"] == context.get_node_id()
    )
    try:
        actor = (
            ray.remote(Node)
            .options(**start_options(context.get_node_id(), name))
            .remote(name, life, place, given)
        )
        pid, watchdog = answer_of(ray, actor.start.remote(), START_S + LAST_S)
    except ray.exceptions.RayTaskError as error:
        raise _plain(error) from error
    except (ValueError, ray.exceptions.RayError) as error:
        raise FleetUnavailable(
            f"node {name} could not be started: {one_line(str(error), 300)}"
        ) from error
    registry = registry_of(ray, make=True)
    print(f"kernel-mcp: node {name} at {place} (process {pid})", file=sys.stderr)
    return anyio.run(
        partial(_run_until_ended, ray, registry, actor, name, life, pid, watchdog, within_s)
    )


def _plain(error: Any) -> KernelMcpError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, KernelMcpError):
        return cause
    return FleetUnavailable(f"the node could not be started: {one_line(str(error), 300)}")


async def _run_until_ended(
    ray: Any,
    registry: Any,
    actor: Any,
    name: str,
    life: str,
    pid: int,
    watchdog: int,
    within_s: float,
) -> int:
    """Wait until the node has ended, or end it at a signal; return the exit code.

    If the watchdog ends after the node, no process of the node is left; this is reported to the
    registry. If the watchdog ends first, the node is killed, and others wait until its lease is
    over.
    """
    code = 0
    leaving = False
    watched = False
    with contextlib.suppress(ProcessLookupError):
        node, fd = os.pidfd_open(pid), os.pidfd_open(watchdog)
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                nonlocal leaving
                with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                    async for _ in signals:
                        leaving = True
                        logger.warning("giving the sessions of node %s to others", name)
                        await registry.drain.remote(name)
                        with anyio.move_on_after(within_s + LAST_S):
                            kept = await actor.leave.remote(within_s)
                            for handle, why in kept.items():
                                logger.warning("session %s was not given away: %s", handle, why)
                            if not kept:
                                await registry.leave.remote(name, life)
                        with anyio.move_on_after(LAST_S):  # time for its last answers to arrive
                            actor.__ray_terminate__.remote()
                            await anyio.wait_readable(node)
                        ray.kill(actor)

            tasks.start_soon(leave)
            await anyio.wait_readable(fd)
            tasks.cancel_scope.cancel()
        watched = bool(select.select([node], [], [], 0)[0])
        if not watched:
            logger.error("node %s has lost its watchdog, and is ended", name)
            signal.pidfd_send_signal(node, signal.SIGKILL)
            await anyio.wait_readable(node)
        os.close(node)
        os.close(fd)
    if not leaving:
        print(f"kernel-mcp: error: node {name} has ended; its log is Ray's", file=sys.stderr)
        code = 1
    if watched:
        with anyio.move_on_after(LAST_S):  # without the head, Ray would wait for a minute
            await registry.end.remote(name, life)
    return code


# Fronts, on stdio or over HTTP.


DOING = "serving clients of a fleet"


def run_front(settings: Settings) -> int:
    """Serve the sessions of a fleet on stdio or over HTTP, and return the exit code.

    Raises KernelMcpError.
    """
    link = Link(settings.fleet, settings.fleet_place)
    link.connect()
    shutdown = Shutdown(None if settings.http is None else 0)
    shutdown.take_signals()
    serve = partial(_serve_http, settings, link, shutdown)
    if settings.http is None:
        serve = partial(_serve_stdio, settings, link, shutdown)
    try:
        anyio.run(shutdown.run, serve)
    except KernelMcpError:
        raise
    except Exception as error:  # often an ExceptionGroup of one
        told = explained(error, DOING)
        if isinstance(told, ServerFailure):
            log_failure(error, DOING)
        raise told from error
    finally:
        link.end()
    return shutdown.code


async def _serve_http(settings: Settings, link: Link, shutdown: Shutdown) -> None:
    from kernel_mcp.fleet.http import FleetHttpApp
    from kernel_mcp.web import HttpApp, serve_http

    async def make(settings: Settings, _url: str, callers: HttpCallers) -> HttpApp:
        return FleetHttpApp(settings, link, callers)

    await serve_http(settings, make, shutdown)


async def _serve_stdio(settings: Settings, link: Link, shutdown: Shutdown) -> None:
    key = partial(key_of, secret_of(settings.fleet), "tasks")
    calls = link.calls()
    async with stdio_lines() as wire, anyio.create_task_group() as tasks:
        shutdown.on_begin(tasks.cancel_scope.cancel)
        tasks.start_soon(wire.read_early, shutdown.begin)
        await tasks.start(link.run)
        await tasks.start(calls.run)
        default = f"front {secrets.token_hex(8)}"
        build = partial(
            mcp_over,
            calls,
            words=calls.instructions,
            files=calls.files,
            key=key,
            pages=loopback_pages,
        )
        await serve_wire(build, wire, shutdown.begin, default=default)
        tasks.cancel_scope.cancel()


# The command `kernel-mcp fleet`.


def run_fleet(argv: Sequence[str]) -> int:
    """Run one `fleet` command and return its exit code. Raises KernelMcpError."""
    command, rest = (argv[0], argv[1:]) if argv else ("", ())
    if command in HELP:
        print(_HELP)
        return 0
    about = {
        "status": "The nodes of a fleet.",
        "drain": "Have a node give its sessions to others.",
    }
    if command not in about:
        raise ConfigError(_USAGE)
    parser = settings_parser(
        f"kernel-mcp fleet {command}", about[command], OTHERS, shown=("fleet", "fleet-place")
    )
    if command == "drain":
        parser.add_argument("node", metavar="NODE", help="its name")
        parser.add_argument("--within", metavar="TIME", help=f"for cells that run ({_WITHIN})")
        parser.add_argument("--undo", action="store_true", help="have it take sessions again")
    else:
        parser.add_argument("--json", action="store_true", help="print all that is known, as JSON")
    flags = vars(parser.parse_args(list(rest)))
    within_s = _time(flags, "within", _WITHIN)
    as_json = bool(flags.pop("json", False))
    node, undo = str(flags.pop("node", "")), bool(flags.pop("undo", False))
    settings = settings_from(flags)
    if not settings.fleet:
        raise ConfigError(f"fleet {command}: --fleet HOST:PORT is missing")
    log_to_stderr(settings.log_level, settings.log_format)
    ray = connect(settings.fleet, place=settings.fleet_place)
    registry = registry_of(ray)
    if command == "status":
        rows = answer_of(ray, registry.rows.remote())
        print(json.dumps(rows, indent=2) if as_json else status(list(map(Member.of, rows))))
        return 0
    return _drain(ray, registry, node, within_s, undo=undo)


def status(members: Sequence[Member]) -> str:
    """Return a text with one line for each node, and a summary."""
    lines = []
    for each in members:
        load = each.load
        if each.lost:
            lines.append(f"{each.name}  {each.place}  lost")
            continue
        lines.append(
            f"{each.name}  {each.place}  {each.state}, {load.sessions} of {load.most} sessions "
            f"({load.busy} run cells), {load.free_bytes / GIB:.1f} GiB free, "
            f"kernel-mcp {each.version}"
        )
    ready = sum(each.state == "ready" for each in members)
    count = "1 node" if len(members) == 1 else f"{len(members)} nodes"
    open_ = sum(each.load.sessions for each in members if not each.lost)
    return "\n".join([*lines, f"{count}, {ready} of which take sessions; {open_} sessions"])


def _drain(ray: Any, registry: Any, node: str, within_s: float, *, undo: bool) -> int:
    """Drain a node, or with `undo` stop draining it; return 1 if sessions are left, else 0.

    Raises FleetUnavailable without such a node, and NodeLost.
    """
    if not answer_of(ray, registry.drain.remote(node, not undo)):
        rows = answer_of(ray, registry.rows.remote())
        there = ", ".join(str(row["name"]) for row in rows if not row["lost"])
        raise FleetUnavailable(f"there is no node {node!r}; there are {there or 'none'}")
    actor = ray.get_actor(actor_name(node))
    try:
        if undo:
            answer_of(ray, actor.stop_draining.remote())
            print(f"{node} takes sessions")
            return 0
        kept = answer_of(ray, actor.drain.remote(within_s), within_s + LAST_S)
    except ray.exceptions.RayActorError as error:
        raise NodeLost(f"node {node} was lost meanwhile; its sessions go on elsewhere") from error
    for handle, why in kept.items():
        print(f"{handle} stays: {why}", file=sys.stderr)
    print(f"{node} has {len(kept)} sessions left" if kept else f"{node} has no sessions left")
    return 1 if kept else 0
