"""Interrupts, child processes and threads of the kernel outside of a sandbox."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.guest_client import (
    GuestKernel,
    wait_until_asleep,
)

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(100)",
        "import threading\nthreading.Event().wait()",
        "import asyncio\nawait asyncio.sleep(100)",
        "import asyncio\nawait asyncio.gather(*(asyncio.sleep(100) for _ in range(3)))",
        "import asyncio\nawait asyncio.sleep(0)\nwhile True: pass",
        "import subprocess\nsubprocess.run(['sleep', '100'])",
        "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    ],
)
def test_sigint_stops_a_cell_and_keeps_state(kernel: GuestKernel, code: str) -> None:
    request = kernel.begin(f"kept = 1\nprint('running', flush=True)\n{code}")
    kernel.first_output(request)
    wait_until_asleep(kernel.process.pid) if "sleep(100" in code else None
    kernel.interrupt()
    # again, as a host does: the first may come between an await and the code after it
    again = threading.Timer(0.5, kernel.interrupt)
    again.start()
    outcome = kernel.finish(request)
    again.cancel()
    assert outcome.reply["ename"] == "KeyboardInterrupt"
    assert outcome.of("error")[0]["ename"] == "KeyboardInterrupt"
    assert kernel.run("kept").outputs() == ["execute_result:1"]


def test_sigint_while_idle_is_ignored(kernel: GuestKernel) -> None:
    kernel.run("x = 1")
    for _ in range(5):
        kernel.interrupt()
    assert kernel.run("x").outputs() == ["execute_result:1"]


def test_sigint_in_a_task_of_an_awaiting_cell_does_not_end_the_kernel(kernel: GuestKernel) -> None:
    code = """
import asyncio
async def spin():
    print("running", flush=True)
    while True: pass
task = asyncio.create_task(spin())
await asyncio.sleep(100)
"""
    request = kernel.begin(code)
    kernel.first_output(request)
    kernel.interrupt()
    assert kernel.finish(request).reply["ename"] == "KeyboardInterrupt"
    assert kernel.run("1").reply["status"] == "ok"


def test_a_task_that_exits_does_not_end_the_kernel(kernel: GuestKernel) -> None:
    code = """
import asyncio, sys
async def leave():
    sys.exit(3)
task = asyncio.create_task(leave())
await asyncio.sleep(0.05)
"""
    kernel.run(code)
    assert kernel.run("1").outputs() == ["execute_result:1"]


def test_a_thread_that_never_ends_does_not_hold_up_shutdown(kernel: GuestKernel) -> None:
    kernel.run("import threading\nthreading.Thread(target=threading.Event().wait).start()")
    assert kernel.ask("shutdown_request", {"restart": False})["status"] == "ok"
    assert kernel.wait_exit()[0] == 0


def test_interrupts_at_any_moment_of_a_flood_leave_every_message_whole(
    kernel: GuestKernel,
) -> None:
    for round_ in range(25):
        request = kernel.begin(
            "import sys\nwhile True:\n    print('x' * 50)\n    print('y', file=sys.stderr)"
        )
        kernel.first_output(request)
        for _ in range(round_):
            kernel.receive("iopub")
        kernel.interrupt()
        assert kernel.finish(request).reply["ename"] == "KeyboardInterrupt"
    assert kernel.run("1").outputs() == ["execute_result:1"]


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('x')",
        "while True:\n    try: 1 / 0\n    except ZeroDivisionError: pass",
        "from IPython.display import display\nwhile True: display(1)",
        "import asyncio\nwhile True: await asyncio.sleep(0)",
    ],
)
def test_a_storm_of_interrupts_still_ends_in_one_reply(kernel: GuestKernel, code: str) -> None:
    for _ in range(5):
        request = kernel.begin(f"print('running', flush=True)\n{code}")
        kernel.first_output(request)
        for _ in range(200):
            kernel.interrupt()
        assert kernel.finish(request).reply["ename"] == "KeyboardInterrupt"
    assert kernel.run("1").outputs() == ["execute_result:1"]


def test_a_flood_nobody_reads_waits_can_be_interrupted_and_control_still_answers(
    kernel: GuestKernel,
) -> None:
    request = kernel.begin("while True: print('x' * 100_000)")
    kernel.first_output(request)
    wait_until_asleep(kernel.process.pid)
    assert kernel.ask("kernel_info_request")["status"] == "ok"
    usage = int(Path(f"/proc/{kernel.process.pid}/statm").read_text().split()[1]) * 4096
    assert usage < 300 * MIB
    kernel.interrupt()
    assert kernel.reply("shell", request)["ename"] == "KeyboardInterrupt"


def test_interrupt_request_on_control_stops_a_cell(kernel: GuestKernel) -> None:
    request = kernel.begin("print('running', flush=True)\nwhile True: pass")
    kernel.first_output(request)
    assert kernel.ask("interrupt_request")["status"] == "ok"
    assert kernel.finish(request).reply["ename"] == "KeyboardInterrupt"


def test_output_of_children_is_complete_and_in_order(kernel: GuestKernel) -> None:
    code = """
import os, subprocess, sys
print("before")
subprocess.run([sys.executable, "-c", "for i in range(100_000): print(i)"])
print("between")
os.system("echo shell; echo error >&2")
print("after")
"""
    outcome = kernel.run(code)
    lines = "".join(f"{i}\n" for i in range(100_000))
    assert outcome.text() == f"before\n{lines}between\nshell\nafter\n"
    assert outcome.text("stderr") == "error\n"


def test_output_of_c_code_is_captured(kernel: GuestKernel) -> None:
    outcome = kernel.run("import os\nn = os.write(1, 'grün\\n'.encode())")
    assert outcome.text() == "grün\n"


def test_output_of_a_background_child_arrives_while_idle(kernel: GuestKernel) -> None:
    code = """
import subprocess
child = subprocess.Popen(["sh", "-c", "read go; echo late"], stdin=subprocess.PIPE)
"""
    kernel.run(code)
    request = kernel.begin("child.stdin.write(b'go\\n')\nchild.stdin.close()")
    seen: list[dict[str, Any]] = []
    while not seen:
        header, parent, content = kernel.receive("iopub")
        if header["msg_type"] == "stream":
            assert parent["msg_id"] == request
            seen.append(content)
    assert seen == [{"name": "stdout", "text": "late\n"}]


def test_a_forked_child_prints_once_and_never_becomes_the_kernel(kernel: GuestKernel) -> None:
    code = """
import multiprocessing, os
print("parent", end=" ")
worker = multiprocessing.get_context("fork").Process(target=lambda: print("child"))
worker.start()
worker.join()
pid = os.fork()
if pid == 0:
    print("fell", end=" ")
    print("through", end="")
else:
    _ = os.waitpid(pid, 0)
"""
    assert kernel.run(code).text() == "parent child\nfell through"
    assert kernel.run("worker.exitcode").outputs() == ["execute_result:0"]


def test_a_forked_child_that_an_interrupt_takes_out_of_its_cell_ends(kernel: GuestKernel) -> None:
    """In the loop of requests it would read those of its parent."""
    code = """
import os
def interrupted(*_): raise KeyboardInterrupt
pid = os.fork()
if pid == 0:
    get_ipython().events.trigger = interrupted
"""
    kernel.run(code)
    for number in range(20):
        assert kernel.run(f"{number}").outputs() == [f"execute_result:{number}"]
    assert kernel.run("os.waitpid(pid, 0)[0] == pid").outputs() == ["execute_result:True"]


def test_a_forked_child_has_no_descriptor_that_requests_come_by(kernel: GuestKernel) -> None:
    code = """
import os
def epolls():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if
             os.path.lexists(f"/proc/self/fd/{fd}")]
    return sum("eventpoll" in link for link in links)
before = epolls()
read, write = os.pipe()
if (pid := os.fork()) == 0:
    os.write(write, str(epolls()).encode())
    os._exit(0)
_ = os.waitpid(pid, 0)
before - int(os.read(read, 9))
"""
    assert kernel.run(code).outputs()[-1:] == ["execute_result:2"]


def test_shell_commands_run_when_everything_is_allowed(kernel: GuestKernel) -> None:
    assert kernel.run("who = 'world'\n!echo hello {who}").text() == "hello world\n"
    assert kernel.run("%%bash\necho bash").text() == "bash\n"
    assert kernel.run("x = !echo listed\nx").outputs() == ["execute_result:['listed']"]


def test_an_interrupt_that_a_system_call_has_missed_ends_it(kernel: GuestKernel) -> None:
    """As one that comes just before the call; here its handler runs in another thread."""
    request = kernel.begin(
        "import signal, threading, time\n"
        "def hit():\n"
        "    time.sleep(0.1)\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGINT)\n"
        "threading.Thread(target=hit).start()\n"
        "time.sleep(600)"
    )
    assert kernel.finish(request).reply["ename"] == "KeyboardInterrupt"
    assert kernel.run("'a handler of its own'; hits = []").reply["status"] == "ok"
    counted = kernel.run(
        "signal.signal(signal.SIGINT, lambda *_: hits.append(1))\n"
        "threading.Thread(target=hit).start()\n"
        "time.sleep(0.4)\n"
        "print(len(hits))"
    )
    assert counted.text() == "1\n"
