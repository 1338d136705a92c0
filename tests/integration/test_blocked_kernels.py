"""A kernel that waits for its own output to be taken can be interrupted and keeps its variables."""

from __future__ import annotations

import pytest

from tests.integration.agent import agent

pytestmark = [pytest.mark.anyio]

SETUP = """
import asyncio, ctypes, os, socket, subprocess, sys, threading, time
from IPython.display import display
kept = [42]
going = True
block = b'y' * 65536
def threads(target):
    for _ in range(4):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(1000)
def prints():
    while going:
        print('z' * 5000)
def writes(fd):
    while going:
        os.write(fd, block)
def subscribe():
    from kernel_specs.restricted.wire.zmtp import opening
    publisher = get_ipython().kernel.iopub._publisher
    client, end = socket.socketpair()
    client.sendall(opening(b'SUB'))
    publisher.take_in(end)
    deadline = time.monotonic() + 30
    while not all(peer.subscriptions for peer in publisher._subscribers()):
        assert time.monotonic() < deadline
    return client
"""
FLOODS = {
    "os.write to stdout": "writes(1)",
    "os.write to stderr": "writes(2)",
    "C code on stdout": "libc = ctypes.CDLL(None)\nwhile True: libc.write(1, block, 65536)",
    "C code that keeps the GIL": "c = ctypes.PyDLL(None)\nwhile True: c.write(2, block, 65536)",
    "a child": "subprocess.run(['yes'])",
    "a child's stderr": "os.system('yes 1>&2')",
    "many children": "ps = [subprocess.Popen(['yes']) for _ in range(4)]\nfor p in ps: p.wait()",
    "threads that print": "threads(prints)",
    "threads that write": "threads(lambda: writes(1))",
    "displays": "while True: display({'text/plain': 'd' * 100_000}, raw=True)",
    "large displays": "while True: display({'text/plain': 'd' * 15_000_000}, raw=True)",
    "small displays": "while True: display({'text/plain': 'd'}, raw=True)",
    "one huge text": "print('x' * 3 * 10**8)\ntime.sleep(1000)",
    "a stream's own buffer": "while True: sys.stdout.buffer.write(block)",
    "line by line": "while True: print('line', flush=True)",
    "both streams": "while True:\n    print('a')\n    print('b', file=sys.stderr)",
    "a client that does not read": "client = subscribe()\nwhile True: print('a' * 100_000)",
    "clients that do not read": "cs = [subscribe() for _ in range(3)]\nthreads(prints)",
    "a child and a client": "client = subscribe()\nsubprocess.run(['yes'])",
    "an awaiting cell": "while True:\n    print('a' * 5000)\n    await asyncio.sleep(0)",
}


@pytest.mark.ways
async def test_floods_of_every_kind_are_interrupted_and_cost_no_variable() -> None:
    async with agent("--memory", "2G") as notebook:
        await notebook.run(SETUP)
        for name, code in FLOODS.items():
            begun = await notebook.run(f"going = True\n{code}", wait=0.5)
            assert begun.status == "running", f"{name}: {begun.text[-500:]}"
            stopped = await notebook.call("interrupt")
            assert stopped.status == "interrupted", f"{name}: {stopped.text[-500:]}"
            # what is asked does not depend on text, in which late output of threads may stand
            after = await notebook.run("going = False\nassert kept == [42]", wait=20.0)
            assert after.status == "ok", f"{name}: {after.text[-500:]}"
