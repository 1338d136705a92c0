"""Sessions with a GPU: speed, deaths, undo, branches and hibernation, through a real client."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from kernel_mcp.errors import ConfigError
from kernel_mcp.linux import gpus
from tests.integration.agent import Agent, notices
from tests.integration.lives import Place
from tests.integration.sleepers import state_of

LEAST = 0.98
"""Part of the speed outside that a multiplication has inside."""
ROUNDS = 3
FORKS = 10
SPEED = """
import torch, time
a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
def rate():
    torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(200): a @ a
    torch.cuda.synchronize(); return 200 / (time.perf_counter() - began)
rate(); print(max(rate() for _ in range(5)))
"""
TENSORS = "import torch\nplain, t = 41, torch.ones(3, device='cuda')"
USE = "print(plain, float(t.sum()))"
HELD = "41 3.0"
NO_BRANCH = "No branches could be made"


class Wrong(Exception):
    """Something is not as it has to be."""


FAILURES = (
    *(Wrong, AssertionError, IndexError, TimeoutError, ValueError),
    subprocess.CalledProcessError,
)


def expect(found: object, wanted: object, what: str) -> None:
    """Raise Wrong unless both are equal."""
    if found != wanted:
        raise Wrong(f"{what}: {found!r} instead of {wanted!r}")


async def begin(agent: Agent) -> None:
    """Assign variables, one of them in the memory of the GPU."""
    made = await agent.run(f"{TENSORS}\n{USE}")
    expect((made.status, made.text.splitlines()[0]), ("ok", HELD), "the tensor at the beginning")


async def begin_forked(agent: Agent) -> None:
    """As `begin`, in a kernel that could have checkpoints: the first may have been started cold."""
    for _ in range(FORKS):
        await begin(agent)
        found = (await agent.call("info")).data["sandbox_found"]
        if found[0].startswith("forked"):
            return
        await agent.call("reset")
    raise Wrong(f"no kernel was forked: {found}")


async def still_there(agent: Agent) -> None:
    """Expect that nothing of it is lost."""
    used = await agent.run(USE)
    expect((used.status, used.text.splitlines()[0]), ("ok", HELD), "the tensor afterwards")
    expect(used.cell["lost"], [], "what is said to be lost")


async def info(agent: Agent, _python: str) -> str:
    """Look at what `info` says of devices, and of their memory and use."""
    found = (await agent.call("info")).data
    cards = [each for each in found["devices"] if re.match(r"/dev/(nvidia\d+|dxg)$", each)]
    expect(bool(cards), True, f"whether there is a card among {found['devices']}")
    known = [each for each in found["gpus"] if " MiB in use, " in each]
    expect(known or "nothing", found["gpus"], "memory and use")
    return "; ".join(found["gpus"])


async def speed(agent: Agent, python: str) -> str:
    """Multiply matrices inside and outside, in turns."""
    inside = outside = 0.0
    for _ in range(ROUNDS):
        answer = await agent.run(SPEED)
        expect(answer.status, "ok", f"the multiplication, which said {answer.text}")
        inside = max(inside, float(answer.text.splitlines()[0]))
        done = subprocess.run([python, "-c", SPEED], capture_output=True, text=True, check=True)
        outside = max(outside, float(done.stdout))
    if inside < LEAST * outside:
        raise Wrong(f"inside {inside:.1f}/s, outside {outside:.1f}/s")
    return f"{inside / outside:.3f} of the speed outside"


async def death(agent: Agent, _python: str) -> str:
    """Kill a kernel that holds a tensor: the next one computes, and the tensor is named as lost."""
    await begin(agent)
    dead = await agent.run("import os; os.kill(os.getpid(), 9)")
    expect((dead.status, dead.cell["state_kept"]), ("killed", False), "the cell that killed")
    expect("t" in dead.cell["lost"], True, f"t among what is lost, {dead.cell['lost']}")
    gone = await agent.run("t")
    expect((gone.status, "NameError" in gone.text), ("error", True), "the tensor that is gone")
    await begin(agent)
    return "a kernel that was killed is replaced, and its tensor is named as lost"


async def undo(agent: Agent, _python: str) -> str:
    """Ask for a checkpoint and an undo: both are refused, and nothing changes."""
    await begin_forked(agent)
    asked = await agent.run("plain = 42", checkpoint=True)
    told = "\n".join(notices(asked))
    expect(asked.status, "ok", "the cell with checkpoint=True")
    for word in ("No checkpoint of this session can be made", "torch", "a GPU in use"):
        expect(word in told, True, f"{word!r} in {told!r}")
    refused = await agent.call("undo")
    expect((refused.failed, "nothing was undone" in refused.text), (True, True), refused.text)
    await agent.run("plain = 41")
    await still_there(agent)
    return "no checkpoint and no undo, which the answers say; the tensor stays"


async def branch(agent: Agent, _python: str) -> str:
    """Ask for branches: they are refused by name, and the session goes on."""
    await begin_forked(agent)
    answer = await agent.call("branch")
    expect((answer.failed, NO_BRANCH in answer.text), (True, True), answer.text)
    expect("torch" in answer.text and "a GPU in use" in answer.text, True, answer.text)
    await still_there(agent)
    return "no branch, which the answer says; the tensor stays"


async def sleep(agent: Agent, _python: str) -> str:
    """Let another session push this one out: what does not come back is named, the rest comes."""
    await begin(agent)
    with anyio.fail_after(300):
        while (made := await agent.call("create_session")).failed:
            expect("is being hibernated" in made.text, True, made.text)
    expect((await state_of(agent))["state"], "hibernated", "the session that was pushed out")
    await agent.call("close_session", session=made.data["session"])
    woken = await agent.run("print(plain, 't' in dir())")
    expect(woken.text.splitlines()[0], "41 False", "what came back")
    expect((woken.cell["lost"], woken.cell["state_kept"]), (["t"], False), "what is told of it")
    await begin(agent)
    return "of a session that was asleep the tensor alone is lost, by name"


CHECKS: tuple[tuple[Callable[[Agent, str], Awaitable[str]], tuple[str, ...]], ...] = (
    (info, ()),
    (speed, ()),
    (death, ()),
    (undo, ()),
    (branch, ()),
    (sleep, ("--max-sessions", "1")),
)


async def main(python: str) -> int:
    """Run all; 1 if any has failed, 2 where none can be run, else 0."""
    try:
        driver = gpus.driver()
    except ConfigError as reason:
        print(f"check: {reason}", file=sys.stderr)
        return 2
    env = {gpus.LIBRARY_PATH: str(driver.folder)} if driver.folder is not None else {}
    given = ("--gpu", "--offline", "--python", python, "--memory", "16G", "--wait", "5m")
    failed = 0
    for check, flags in CHECKS:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            async with Place(Path(folder)).life(*given, *flags, "--template", env=env) as life:
                try:
                    print(f"ok    {check.__name__}: {await check(life, python)}", flush=True)
                except FAILURES as error:
                    failed = 1
                    print(f"FAILS {check.__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[1]))
