"""A server in this process whose calls are made to fail one after the other: run as a module.

For every call that an action of a client makes, the action is done again while that call fails. It
may fail or succeed; after it a second session still has its variables, and the first works again.
Prints a report as JSON. `--full` lets each call fail in every way; without it, every other call
fails in one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from tests.faults.injection import FAILURES, Faults

FAULTS = Faults()
FAULTS.install()

from mcp.client import Client  # noqa: E402

from kernel_mcp.config.settings import Settings  # noqa: E402
from kernel_mcp.protocol import build_mcp  # noqa: E402
from kernel_mcp.sandbox.select import proven_sandbox  # noqa: E402
from kernel_mcp.server import AppContext, app_context, warm_up  # noqa: E402
from kernel_mcp.sessions.idle_hibernator import IdleHibernator  # noqa: E402
from tests.integration.agent import PREFIX  # noqa: E402
from tests.unit.fake_kernels import Handed  # noqa: E402

PATIENCE_S = 40.0
"""How long an action may take on a busy machine before it counts as stuck."""
ROUNDS = 3
"""How often a session that has suffered may be told to reset before it has to work again."""


class Drill:
    """A server, a witness that must not suffer, and a victim."""

    def __init__(self, built: AppContext, client: Client) -> None:
        self.problems: list[str] = []
        self.injected = 0
        self._built = built
        self._client = client
        self._witness = ""
        self._victim = ""

    async def call(self, tool: str, **arguments: Any) -> tuple[str, bool]:
        """A tool's text, without what the server adds of itself, and whether it is an error."""
        result = await self._client.call_tool(tool, arguments)
        texts = [getattr(block, "text", "") for block in result.content]
        answer = [text for text in texts if not text.startswith(PREFIX)]
        return "\n".join(answer or texts), bool(result.is_error)

    async def begin(self) -> None:
        """Give the witness something to lose."""
        self._witness = await self._open()
        text, _ = await self.call("execute", session=self._witness, code="x = 41; x")
        assert text == "41", text
        self._victim = await self._open()

    async def _open(self) -> str:
        text, failed = await self.call("create_session")
        assert not failed, text
        return str(json.loads(text)["session"])

    async def create(self) -> None:
        """A session from its beginning to its end."""
        text, failed = await self.call("create_session")
        if not failed:
            handle = json.loads(text)["session"]
            await self.call("execute", session=handle, code="y = 1; y")
            await self.call("close_session", session=handle)

    async def run(self) -> None:
        """A cell with much output and a file."""
        code = "open('f', 'w').write('a' * 1000); print('b' * 600_000); x = 1; x"
        await self.call("execute", session=self._victim, code=code)

    async def files(self) -> None:
        """All that concerns files."""
        for tool, arguments in (
            ("write_file", {"path": "d/g.txt", "content": "g"}),
            ("read_file", {"path": "d/g.txt"}),
            ("list_files", {"path": "d"}),
            ("export_notebook", {"path": "n.ipynb"}),
        ):
            await self.call(tool, session=self._victim, **arguments)

    async def look(self) -> None:
        """All that only looks."""
        for tool in ("list_variables", "info", "list_sessions"):
            own = {} if tool == "list_sessions" else {"session": self._victim}
            await self.call(tool, **own)
        await self.call("check_syntax", session=self._victim, code="print(x)")

    async def stop(self) -> None:
        """A cell that reaches its time limit."""
        await self.call("execute", session=self._victim, code="while True: pass", timeout=0.2)

    async def die(self) -> None:
        """The death of a kernel by another's hand, and the next cell."""
        (session,) = [s for s in self._built.manager.sessions if s.handle == self._victim]
        if session.kernel is not None:
            os.kill(session.kernel.handle.pid, signal.SIGKILL)
            await session.kernel.dead.wait()
        await self.call("execute", session=self._victim, code="1")

    async def reset(self) -> None:
        """A fresh kernel and an empty workspace."""
        await self.call("reset", session=self._victim, files=True, packages=True)

    async def sleep(self) -> None:
        """Hibernation, and the way back."""
        await self.call("execute", session=self._victim, code="kept = [1, 2]")
        (session,) = [s for s in self._built.manager.sessions if s.handle == self._victim]
        await self._built.manager.admission.hibernate(session)
        await self.call("execute", session=self._victim, code="kept")

    @property
    def actions(self) -> list[Callable[[], Awaitable[None]]]:
        """The actions in order."""
        return [
            self.create,
            self.run,
            self.files,
            self.look,
            self.stop,
            self.die,
            self.reset,
            self.sleep,
        ]

    async def suffer(self, action: Callable[[], Awaitable[None]], place: str, kind: str) -> None:
        """Do `action` while the call at `place` fails, and look at what is left."""
        what = f"{action.__name__}: {kind} at {place} {FAULTS.names[place]}"
        FAULTS.arm(place, FAILURES[kind])
        try:
            with anyio.fail_after(PATIENCE_S):
                await action()
        except Exception as error:
            logging.exception("in %s", what)
            self.problems.append(f"{what}: {error!r}")
        FAULTS.disarm()
        self.injected += FAULTS.fired
        try:
            with anyio.fail_after(PATIENCE_S):
                await self.inspect(what)
        except Exception as error:
            logging.exception("after %s", what)
            self.problems.append(f"after {what}: {error!r}")
            self._victim = await self._open()

    async def inspect(self, what: str) -> None:
        """The witness has its variables, the server answers, the victim works again."""
        text, _ = await self.call("execute", session=self._witness, code="print(x)")
        if text.strip() != "41":  # not shown as a value: of a thousand IPython speaks
            self.problems.append(f"after {what}: the second session says {text[:300]}")
            await self.call("execute", session=self._witness, code="x = 41")
        for _ in range(ROUNDS):
            text, failed = await self.call("execute", session=self._victim, code="6 * 7")
            if not failed and "42" in text:
                return
            await self.call("reset", session=self._victim)
        self.problems.append(f"after {what}: the session says {text[:300]}")
        await self.call("close_session", session=self._victim)
        self._victim = await self._open()


async def drill(full: bool, only: str) -> dict[str, Any]:
    """The report: what was reached, what was made to fail, what went wrong."""
    began = time.process_time()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="faults-") as folder:
        settings = Settings(warm=1, max_sessions=8, grace_s=1.0, state_dir=Path(folder))
        async with (
            app_context(settings, proven_sandbox("auto")) as built,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(IdleHibernator(built.manager, 3600.0, time.monotonic).run)
            tasks.start_soon(warm_up, built)
            async with Client(build_mcp(built, Handed())) as client:
                found = Drill(built, client)
                await found.begin()
                await _all(found, full, only)
                said = found.problems, found.injected
            tasks.cancel_scope.cancel()
    return {
        "seams": len(FAULTS.names),
        "injected": said[1],
        "problems": said[0],
        "cpu_s": round(time.process_time() - began, 1),
    }


def sampled(place: str) -> bool:
    """Return True for a quarter of the places; which ones changes with the lines of their file."""
    return zlib.crc32(place.encode()) % 4 == 0


async def _all(found: Drill, full: bool, only: str) -> None:
    kinds = itertools.cycle(FAILURES)
    done: set[str] = set()
    for action in found.actions:
        FAULTS.listen()
        await action()
        for place in FAULTS.heard:
            if only not in place or (not full and (place in done or not (only or sampled(place)))):
                continue
            done.add(place)
            for kind in FAILURES if full else [next(kinds)]:
                await found.suffer(action, place, kind)


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help="a part of the places, for one who repairs")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        report = anyio.run(drill, chosen.full, chosen.only)
    except Exception:
        logging.exception("the server ended")
        report = {"problems": ["the server ended: " + traceback.format_exc()[-3000:]]}
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
