"""Figures beside other MCP servers: the few that all of them have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from benchmarks import notebooks, ours
from benchmarks.bench import Bench
from benchmarks.connection import connected
from benchmarks.floor import FLOOR, floor
from benchmarks.notebooks import Notebook, Notebooks
from benchmarks.peers import PEERS, Command, Peer
from benchmarks.places import environment
from benchmarks.processes import settle
from benchmarks.results import Figure, Measurement, failure, interleave, timed
from benchmarks.sessions import STDIO, each, first_picture, hello, new_session

START = Figure("peers-start", "Beside others: server start → first answer", "")
SESSION = Figure("peers-session", "Beside others: new session → first result", FLOOR)
WARM = Figure("peers-warm", "Beside others: warm cell `1`", FLOOR)
PICTURE = Figure("peers-picture", "Beside others: first plot of a session", FLOOR)


async def measure(bench: Bench) -> None:
    """All figures; a peer that cannot be started is named with the reason."""
    async with AsyncExitStack() as stack:
        folder = bench.folder()
        commands = {STDIO: Command(ours.command())}
        systems: dict[str, Notebooks] = {
            FLOOR: await stack.enter_async_context(floor(bench.folder())),
            STDIO: await stack.enter_async_context(ours.over_stdio(folder)),
        }
        for peer in PEERS:

            async def join(peer: Peer = peer) -> None:
                commands[peer.name], systems[peer.name] = await _join(bench, peer, stack)

            if why := await failure(join):
                bench.results.fail(START, peer.name, f"not started: {why}")
        await _start(bench, commands)
        await _sessions(bench, systems)


async def _join(bench: Bench, peer: Peer, stack: AsyncExitStack) -> tuple[Command, Notebooks]:
    """Install a peer, start it, and run its first cell. Raises one of FAILURES."""
    place = await environment(peer.name, peer.packages)
    folder = bench.folder()
    command = await stack.enter_async_context(peer.beside(place, folder))
    client = await stack.enter_async_context(
        connected(command.argv, folder, environ=command.environ)
    )
    system = peer.notebooks(client, place)
    notebook = await system.open()
    await notebook.run(notebooks.ONE)
    await notebook.close()
    return command, system


async def _start(bench: Bench, commands: Mapping[str, Command]) -> None:
    folder = bench.folder()
    subjects = {
        name: partial(hello, command.argv, folder, environ=command.environ)
        for name, command in commands.items()
    }
    await interleave(bench.results, START, bench.rounds(5, 1), subjects)


async def _sessions(bench: Bench, systems: Mapping[str, Notebooks]) -> None:
    results, rounds = bench.results, bench.rounds(6, 1)
    await interleave(results, SESSION, rounds, each(systems, new_session))
    await interleave(results, PICTURE, rounds, each(systems, first_picture))
    async with AsyncExitStack() as opened:

        async def begin(system: Notebooks) -> Notebook:
            notebook = await system.open()
            opened.push_async_callback(notebook.close)
            for _ in range(3):
                await notebook.run(notebooks.ONE)
            return notebook

        wrong: Counter[str] = Counter()

        def checked(name: str, notebook: Notebook) -> Measurement:
            async def run() -> None:
                wrong[name] += notebooks.ONE not in (await notebook.run(notebooks.ONE)).text

            return lambda: timed(run)

        calls = {name: checked(name, await begin(system)) for name, system in systems.items()}
        await settle()
        await interleave(results, WARM, bench.rounds(40, 3), calls)
        for name, count in wrong.items():
            if count:
                results.fail(WARM, name, f"{count} answers came without the result")
