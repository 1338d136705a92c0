"""The kernel inside the sandbox, here without one: a subprocess and a raw ZMQ client."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.blocking.client import BlockingKernelClient

from tests.integration.guest_client import (
    BOOT,
    PORTS,
    SECONDS,
    GuestKernel,
    guest,
    wait_until,
    wait_until_asleep,
)

MIB = 1024 * 1024


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: socket names end at 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kg") as name:
        yield Path(name)


@pytest.fixture
def kernel(folder: Path) -> Iterator[GuestKernel]:
    """An unrestricted kernel."""
    with guest(folder) as running:
        yield running


# Cells


def test_ready_packet_names_process_and_versions(folder: Path) -> None:
    started = GuestKernel(folder)
    try:
        packet = started.wait_ready()
        assert packet["pid"] == started.process.pid
        assert packet["python"] == ".".join(map(str, sys.version_info[:3]))
        assert packet["ipykernel"].startswith("7.")
    finally:
        started.close()


def test_state_is_kept_between_cells(kernel: GuestKernel) -> None:
    assert kernel.run("x = 20").reply["status"] == "ok"
    outcome = kernel.run("x + 1")
    assert outcome.of("execute_result")[0]["data"]["text/plain"] == "21"
    assert outcome.reply["execution_count"] == 2


def test_streams_and_displays_keep_their_order(kernel: GuestKernel) -> None:
    code = """
import sys
from IPython.display import display
print("one")
print("two", file=sys.stderr)
print("three")
sys.stdout.write("four")
sys.stderr.write("five")
display("six")
print("seven")
"eight"
"""
    assert kernel.run(code).joined() == [
        "stdout:one\n",
        "stderr:two\n",
        "stdout:three\nfour",
        "stderr:five",
        "display_data:'six'",
        "stdout:seven\n",
        "execute_result:'eight'",
    ]


def test_many_switches_between_streams_keep_their_order(kernel: GuestKernel) -> None:
    code = """
import sys
for i in range(3000):
    print(i, file=sys.stderr if i % 3 else sys.stdout)
"""
    outcome = kernel.run(code)
    text = "".join(content["text"] for content in outcome.of("stream"))
    assert text.split() == [str(i) for i in range(3000)]


def test_a_million_lines_arrive_complete(kernel: GuestKernel) -> None:
    outcome = kernel.run("for i in range(10**6): print(i)")
    assert outcome.text() == "".join(f"{i}\n" for i in range(10**6))
    assert len(outcome.of("stream")) < 1000


def test_text_is_sent_while_the_cell_runs(kernel: GuestKernel) -> None:
    request = kernel.begin("import time\nprint('early')\ntime.sleep(100)")
    assert kernel.first_output(request) == {"name": "stdout", "text": "early\n"}
    kernel.interrupt()
    kernel.finish(request)


def test_a_line_after_a_quiet_moment_is_sent_at_once(kernel: GuestKernel) -> None:
    code = "import time\nfor i in range(5):\n    print(i, flush=True)\n    time.sleep(0.01)"
    assert [content["text"] for content in kernel.run(code).of("stream")] == [
        f"{i}\n" for i in range(5)
    ]


def test_output_of_a_thread_arrives_after_its_cell(kernel: GuestKernel) -> None:
    code = """
import threading
started = threading.Event()
def later():
    started.wait()
    print("late")
threading.Thread(target=later).start()
"""
    request = kernel.begin(code)
    kernel.finish(request)
    started = kernel.run("started.set()")
    text = started.text()
    while not text:
        header, _, content = kernel.receive("iopub")
        text = content["text"] if header["msg_type"] == "stream" else ""
    assert text == "late\n"


def test_lines_of_a_thread_arrive_long_after_the_last_cell(kernel: GuestKernel) -> None:
    code = """
import threading
def later():
    for i in range(5):
        print(i)
threading.Timer(1.6, later).start()
"""
    kernel.run(code)
    text = ""
    while text.count("\n") < 5:
        header, _, content = kernel.receive("iopub", 5)
        text += content["text"] if header["msg_type"] == "stream" else ""
    assert text == "0\n1\n2\n3\n4\n"


def test_a_huge_text_in_one_write_arrives_whole(kernel: GuestKernel) -> None:
    outcome = kernel.run("print('aä€😀' * 2_000_000)")
    assert outcome.text() == "aä€😀" * 2_000_000 + "\n"


def test_text_that_is_not_unicode_is_shown_with_escapes(kernel: GuestKernel) -> None:
    code = r"""
import os, sys
print("\udc80 ä")
sys.stdout.flush()
sys.stdout.buffer.write(b"\xff raw")
"""
    assert kernel.run(code).text() == "\\udc80 ä\n\ufffd raw"


def test_user_code_cannot_close_stdout(kernel: GuestKernel) -> None:
    kernel.run("import sys\nsys.stdout.close()")
    assert kernel.run("print('still here')").text() == "still here\n"
    kernel.run("sys.stdout.detach()")
    kernel.run("1")
    assert kernel.run("print('and here')").text() == "and here\n"


def test_a_display_too_large_for_a_message_is_replaced_by_a_note(folder: Path) -> None:
    with guest(folder, boot={"output": {"message_bytes": 100_000}}) as kernel:
        outcome = kernel.run("from IPython.display import HTML\nHTML('x' * 200_000)")
        assert outcome.of("execute_result") == []
        assert "left out" in outcome.text("stderr")


def test_pictures_come_as_png(kernel: GuestKernel) -> None:
    if importlib.util.find_spec("matplotlib"):
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    else:
        code = (
            "from IPython.display import Image, display\n"
            "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + bytes(32), format='png'))"
        )
    display = kernel.run(code).of("display_data")[0]
    assert display["data"]["image/png"].startswith("iVBOR")


def test_traceback_is_plain_and_shows_only_user_frames(kernel: GuestKernel) -> None:
    outcome = kernel.run("def f():\n    return 1 / 0\nf()")
    error = outcome.of("error")[0]
    assert error["ename"] == outcome.reply["ename"] == "ZeroDivisionError"
    text = "\n".join(error["traceback"])
    assert "\x1b" not in text
    assert "Cell In[1], line 2, in f" in text
    assert "ipykernel" not in text
    assert "IPython" not in text
    assert text.startswith("Traceback (most recent call last):\n  Cell In[1], line 3")
    assert text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 +", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def f(n): return f(n)\nf(0)", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E"),
        ("class A:\n    def __repr__(self): raise KeyError('k')\nA()", "KeyError"),
        ("raise ValueError('x' * 20_000_000)", "ValueError"),
        ("await 5", "TypeError"),
        ("%unknown_magic", "UsageError"),
        ("\ud800", "UnicodeEncodeError"),
    ],
)
def test_every_kind_of_error_is_reported_and_survived(
    kernel: GuestKernel, code: str, name: str
) -> None:
    outcome = kernel.run(code)
    assert outcome.reply["status"] == "error"
    assert outcome.reply["ename"] in {name, "SyntaxError"}
    assert len(json.dumps(outcome.reply)) < 1_000_000
    assert kernel.run("1").reply["status"] == "ok"


def test_leaving_by_system_exit_is_an_error_without_advice(kernel: GuestKernel) -> None:
    assert kernel.run("import sys\nsys.exit(2)").outputs() == ["error:SystemExit"]


def test_exit_and_quit_end_the_cell_and_keep_the_kernel(kernel: GuestKernel) -> None:
    kernel.run("kept = 1")
    for code in ("exit()", "quit()", "exit", "quit", "exit(); kept = 2", "def f(): quit()\nf()"):
        outcome = kernel.run(code)
        assert outcome.outputs() == ["error:SystemExit"], code
        assert "the session goes on" in outcome.reply["evalue"]
    time.sleep(0.3)
    assert kernel.run("kept").outputs() == ["execute_result:1"]


@pytest.mark.parametrize("code", ["len?", "%pinfo len", "%pdoc len", "len??"])
def test_what_is_meant_for_a_pager_is_shown(kernel: GuestKernel, code: str) -> None:
    outcome = kernel.run(code)
    assert outcome.reply["status"] == "ok"
    assert outcome.reply["payload"] == []
    [shown] = outcome.of("display_data")
    assert list(shown["data"]) == ["text/plain"]
    assert "Return the number of items in a container." in shown["data"]["text/plain"]
    assert "\x1b" not in shown["data"]["text/plain"]


def test_exception_groups_and_causes_are_shown_whole(kernel: GuestKernel) -> None:
    chain = kernel.run("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('k') from e")
    text = "\n".join(chain.of("error")[0]["traceback"])
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("KeyError")
    if sys.version_info >= (3, 11):
        group = kernel.run("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])")
        text = "\n".join(group.of("error")[0]["traceback"])
        assert "ValueError: 1" in text
        assert "TypeError: 2" in text
        assert "Cell In[2]" in text


def test_awaiting_cells_run_and_context_variables_live_on(kernel: GuestKernel) -> None:
    outcome = kernel.run("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'")
    assert outcome.outputs() == ["execute_result:'awaited'"]
    kernel.run("import contextvars\nv = contextvars.ContextVar('v')\n_ = v.set(7)")
    assert kernel.run("v.get()").outputs() == ["execute_result:7"]


def test_cells_queued_behind_a_failed_one_are_aborted(kernel: GuestKernel) -> None:
    first = kernel.begin("import time\ntime.sleep(0.2)\n1/0")
    second = kernel.begin("2")
    assert kernel.finish(first).reply["status"] == "error"
    assert kernel.finish(second).reply["status"] == "aborted"
    assert kernel.run("3").reply["status"] == "ok"


def test_input_fails_at_once_and_says_why(kernel: GuestKernel) -> None:
    outcome = kernel.run("input('name? ')")
    assert outcome.reply["ename"] == "StdinNotImplementedError"


# Interrupts


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


# Children


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
    print("fell through")
else:
    _ = os.waitpid(pid, 0)
"""
    assert kernel.run(code).text() == "parent child\nfell through\n"
    assert kernel.run("worker.exitcode").outputs() == ["execute_result:0"]


def test_shell_commands_run_when_everything_is_allowed(kernel: GuestKernel) -> None:
    assert kernel.run("who = 'world'\n!echo hello {who}").text() == "hello world\n"
    assert kernel.run("%%bash\necho bash").text() == "bash\n"
    assert kernel.run("x = !echo listed\nx").outputs() == ["execute_result:['listed']"]


# Confinement


def test_restricted_kernel_imports_what_the_policy_names(folder: Path) -> None:
    policy = {"allow_all": False, "modules": ["json", "urllib.parse", "datetime", "math"]}
    with guest(folder, boot={"policy": policy}) as kernel:
        for code in (
            "import json, json.decoder",
            "import urllib.parse",
            "from urllib import parse",
            "import urllib",
            "from datetime import datetime\ndatetime.strptime('2024', '%Y')",
            "open('mine.py', 'w').write('import math\\nX = 1')\nimport mine\nmine.X",
            "%timeit -n1 -r1 1",
        ):
            outcome = kernel.run(code)
            assert outcome.reply["status"] == "ok", (code, outcome.reply)
        for code in (
            "import os",
            "import urllib.request",
            "from urllib import request",
            "__import__('os')",
            "exec('import os')",
            "open('bad.py', 'w').write('import os')\nimport bad",
        ):
            outcome = kernel.run(code)
            assert outcome.reply["ename"] == "ModuleNotAllowedError", code
            assert "--allow" in outcome.reply["evalue"]
            assert "guard" not in "\n".join(outcome.reply["traceback"])
        for code in ("!ls", "%pip install x", "%%bash\nls", "get_ipython().getoutput('ls')"):
            assert kernel.run(code).reply["ename"] == "CommandNotAllowedError", code
        for code in ("ls", "mv", "who"):
            assert kernel.run(code).reply["ename"] == "NameError", code
        for code in ("%config InlineBackend.x = print(1)", "%config IPCompleter.greedy = True"):
            assert kernel.run(code).reply["ename"] == "CommandNotAllowedError", code
        for value in ("'retina'", "{'png', 'svg'}", "['png']"):
            code = f"%config InlineBackend.figure_formats = {value}"
            assert kernel.run(code).reply["status"] == "ok", code


def test_environment_is_the_fixed_one(folder: Path) -> None:
    with guest(folder) as kernel:
        outcome = kernel.run("import os\nprint(os.getcwd(), os.environ['HOME'], *os.environ)")
        home, cwd, *names = outcome.text().split()
        assert home == cwd == str(kernel.workspace)
        assert "MPLBACKEND" in names
        assert not any(name.startswith(("PYTEST", "VIRTUAL", "SSH", "UV_")) for name in names)
        assert kernel.run("oct(os.umask(0o77))").outputs() == ["execute_result:'0o77'"]


def test_running_out_of_memory_is_an_error_and_the_kernel_lives(folder: Path) -> None:
    with guest(folder, boot={"limits": {"memory_bytes": 256 * MIB}}) as kernel:
        for code in (
            "kept = 1\nx = bytearray(10**10)",
            "def f():\n    grown = []\n    while True: grown.append(bytearray(10**6))\nf()",
            "grown = []\nwhile True: grown.append('x' * 1000)",
            "del grown\ns = 'x' * 10**8\ns.join(s for _ in range(1000))",
            "print('x' * 10**10)",
        ):
            outcome = kernel.run(code)
            assert outcome.reply["ename"] == "MemoryError", code
            assert outcome.of("error")[0]["ename"] == "MemoryError"
        assert kernel.run("len(bytearray(100 * 2**20)), kept").outputs() == [
            "execute_result:(104857600, 1)"
        ]


@pytest.mark.parametrize("memory", [256, 512])
def test_running_out_of_memory_by_small_objects_is_answered_each_time(
    folder: Path, memory: int
) -> None:
    with guest(folder, boot={"limits": {"memory_bytes": memory * MIB}}) as kernel:
        kernel.run("kept = 1")
        for code in (
            "d = {}\ni = 0\nwhile True:\n    d[i] = str(i); i += 1",
            "d = []\nwhile True: d.append([1, 2, 3])",
        ):
            outcome = kernel.run(code)
            assert outcome.reply["ename"] == "MemoryError", code
            assert outcome.of("error")[0]["ename"] == "MemoryError"
            assert kernel.run("kept").outputs() == ["execute_result:1"]
        assert kernel.run("del d; kept").outputs() == ["execute_result:1"]


def test_a_request_that_fails_inside_the_kernel_is_answered(folder: Path) -> None:
    with guest(folder) as kernel:
        kernel.run(
            "def fail(*_, **__): raise MemoryError('none left')\n"
            "kernel = get_ipython().kernel\n"
            "kernel.do_complete = fail\n"
            "kernel.do_execute = fail"
        )
        outcome = kernel.run("1")
        assert outcome.reply["status"] == "error"
        assert outcome.reply["ename"] == "MemoryError"
        assert outcome.of("error")[0]["evalue"] == "none left"
        request = kernel.send("shell", "complete_request", {"code": "a", "cursor_pos": 1})
        assert kernel.reply("shell", request) == {
            "status": "error",
            "ename": "MemoryError",
            "evalue": "none left",
            "traceback": ["MemoryError: none left"],
        }


@pytest.mark.parametrize("size", [150_000, 600_000, 3_000_000])
def test_what_was_displayed_before_a_sudden_end_arrives(kernel: GuestKernel, size: int) -> None:
    request = kernel.begin(
        "import os\nfrom IPython.display import display\n"
        f"display({{'text/plain': 'q' * {size}}}, raw=True)\nos._exit(3)"
    )
    while True:
        header, parent, content = kernel.receive("iopub")
        if parent.get("msg_id") == request and header["msg_type"] == "display_data":
            break
    assert len(content["data"]["text/plain"]) == size
    assert kernel.wait_exit()[0] == 3


def test_alarms_of_user_code_reach_it_whatever_is_being_printed(kernel: GuestKernel) -> None:
    kernel.run(
        "import signal, time\n"
        "def ring(*_): raise TimeoutError('alarm')\n"
        "_ = signal.signal(signal.SIGALRM, ring)"
    )
    for number in range(40):
        code = (
            f"signal.setitimer(signal.ITIMER_REAL, {0.004 + number * 0.0003})\n"
            "began = time.monotonic()\n"
            "while time.monotonic() - began < 2: print('x' * 3000)"
        )
        assert kernel.run(code).reply.get("evalue") == "alarm"


def test_signal_handlers_may_print(kernel: GuestKernel) -> None:
    outcome = kernel.run(
        "import signal, time\n"
        "_ = signal.signal(signal.SIGALRM, lambda *_: print('tick', flush=True))\n"
        "_ = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\n"
        "began = time.monotonic()\n"
        "while time.monotonic() - began < 1: print('x' * 100)\n"
        "_ = signal.setitimer(signal.ITIMER_REAL, 0)"
    )
    assert outcome.reply["status"] == "ok"
    assert "tick" in outcome.text()


def test_what_is_no_message_harms_no_other(kernel: GuestKernel) -> None:
    send = "get_ipython().kernel.session.send(get_ipython().kernel.iopub_socket, 'x', {}, ident="
    assert kernel.run(f"{send}'text')").reply["status"] == "error"
    assert "no message" in kernel.run(f"_ = {send}[b'topic', 'text'])").text("stderr")
    assert kernel.run("8").outputs() == ["execute_result:8"]


@pytest.mark.parametrize(
    "place", ["shell_stream.push", "shell_stream._router.receive", "iopub.pump", "iopub._pump"]
)
def test_no_memory_at_a_socket_loses_no_answer(folder: Path, place: str) -> None:
    with guest(folder) as kernel:
        outcome = kernel.run(
            "import operator\n"
            "def lacking(place):\n"
            "    *path, name = place.split('.')\n"
            "    owner = operator.attrgetter('.'.join(path))(get_ipython().kernel)\n"
            "    method = getattr(owner, name)\n"
            "    def fail(*arguments):\n"
            "        setattr(owner, name, method)\n"
            "        raise MemoryError\n"
            "    setattr(owner, name, fail)\n"
            f"print('before'); lacking({place!r}); 7"
        )
        assert outcome.reply["status"] == "ok" or outcome.reply["ename"] == "MemoryError"
        assert outcome.text() == "before\n"
        assert kernel.run("8").outputs() == ["execute_result:8"]
        assert kernel.ask("kernel_info_request")["status"] == "ok"


@pytest.mark.parametrize("place", ["receive", "_router.receive", "push"])
def test_no_memory_at_the_control_socket_leaves_it_working(folder: Path, place: str) -> None:
    with guest(folder) as kernel:
        kernel.run(
            "import operator\n"
            "owner = get_ipython().kernel.control_stream\n"
            f"*path, name = {place!r}.split('.')\n"
            "owner = operator.attrgetter('.'.join(path))(owner) if path else owner\n"
            "method = getattr(owner, name)\n"
            "def fail(*arguments):\n"
            "    setattr(owner, name, method)\n"
            "    raise MemoryError\n"
            "setattr(owner, name, fail)"
        )
        for _ in range(2):
            kernel.send("control", "kernel_info_request", {})
        assert kernel.ask("kernel_info_request")["status"] == "ok"


def test_limits_are_set(folder: Path) -> None:
    limits = {"open_files": 200, "file_bytes": 1000, "pids": 4000, "cpu_seconds": 99}
    with guest(folder, boot={"limits": limits}) as kernel:
        names = "RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_CORE"
        code = f"import resource as r\n[r.getrlimit(getattr(r, name))[0] for name in {names}]"
        assert kernel.run(code).outputs() == ["execute_result:[200, 1000, 4000, 99, 0]"]


def test_unusable_boot_file_is_reported_and_ends_with_code_70(folder: Path) -> None:
    started = GuestKernel(folder, boot={"version": 99})
    try:
        packet = started.wait_ready()
        assert not packet.get("ready")
        code, stderr = started.wait_exit()
        assert code == 70
        assert "version 99" in stderr
    finally:
        started.close()


def test_failure_to_bind_is_told_on_the_ready_socket(folder: Path) -> None:
    started = GuestKernel(folder, boot={"workspace": "/nowhere"})
    try:
        packet = started.wait_ready()
        assert packet["ready"] is False
        assert "/nowhere" in packet["error"]
        assert started.wait_exit()[0] == 70
    finally:
        started.close()


def test_a_crash_leaves_its_trace_with_the_host(kernel: GuestKernel) -> None:
    kernel.begin("import ctypes\nctypes.string_at(0)")
    code, stderr = kernel.wait_exit()
    assert code == -signal.SIGSEGV
    assert "Segmentation fault" in stderr
    assert "<ipython-input-1-" in stderr


# Control


def test_variables_are_described_while_a_cell_runs(kernel: GuestKernel) -> None:
    code = """
number, text, items = 1, "hello", [1, 2, 3]
class Loud:
    def __repr__(self): raise RuntimeError
loud = Loud()
print("running", flush=True)
while True: pass
"""
    request = kernel.begin(code)
    kernel.first_output(request)
    reply = kernel.ask("kernel_mcp_variables_request")
    kernel.interrupt()
    kernel.finish(request)
    assert reply["status"] == "ok"
    assert reply["omitted"] == 0
    found = {variable["name"]: variable for variable in reply["variables"]}
    assert set(found) == {"number", "text", "items", "Loud", "loud"}
    assert found["items"]["preview"] == "[1, 2, 3]"
    assert found["items"]["length"] == 3
    assert found["loud"]["preview"] == "<Loud object>"


def test_shutdown_request_ends_the_process_even_while_a_cell_runs(kernel: GuestKernel) -> None:
    request = kernel.begin("print('running', flush=True)\nwhile True: pass")
    kernel.first_output(request)
    assert kernel.ask("shutdown_request", {"restart": False})["status"] == "ok"
    assert kernel.wait_exit()[0] == 0


def test_user_code_cannot_be_run_through_control(kernel: GuestKernel) -> None:
    kernel.send("control", "execute_request", {"code": "x = 1"})
    assert kernel.ask("kernel_info_request")["status"] == "ok"
    assert kernel.run("'x' in globals()").outputs() == ["execute_result:False"]


# Other people's clients


def test_blocking_jupyter_client_works_without_boot_file(folder: Path) -> None:
    started = GuestKernel(folder, confined=False)
    client = BlockingKernelClient(connection_file=str(started.connection_file))
    try:
        wait_until((folder / "k-5").exists)  # else the client takes a slow start for a death
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=SECONDS)
        assert client.hb_channel.is_beating()
        seen: list[dict[str, Any]] = []
        reply = client.execute_interactive(
            "import os\nprint('hello')\n1 + 1", output_hook=seen.append, timeout=SECONDS
        )
        assert reply["content"]["status"] == "ok"
        kinds = [message["msg_type"] for message in seen]
        assert kinds == ["status", "execute_input", "stream", "execute_result", "status"]
        reply = client.execute_interactive(
            "input('name? ')",
            stdin_hook=lambda _: client.input("me"),
            timeout=SECONDS,
            allow_stdin=True,
            output_hook=seen.append,
        )
        assert seen[-2]["content"]["data"]["text/plain"] == "'me'"
        asked = client.execute(
            "import asyncio\nawait asyncio.to_thread(input, 'again? ')", allow_stdin=True
        )
        client.get_stdin_msg(timeout=SECONDS)
        client.input("there")
        while (reply := client.get_shell_msg(timeout=SECONDS))["parent_header"]["msg_id"] != asked:
            pass
        assert reply["content"]["status"] == "ok"
        client.complete("os.getc", reply=True, timeout=SECONDS)
        client.inspect("os", reply=True, timeout=SECONDS)
        client.history(reply=True, timeout=SECONDS)
        client.comm_info(reply=True, timeout=SECONDS)
        client.shutdown(reply=True, timeout=SECONDS)
        assert started.wait_exit()[0] == 0
    finally:
        client.stop_channels()
        started.close()


def test_ports_that_the_connection_file_leaves_open_are_written_to_it(folder: Path) -> None:
    free = {f"{name}_port": 0 for name in PORTS}
    wanted = {"transport": "tcp", "ip": "127.0.0.1", "signature_scheme": "hmac-sha512", **free}
    started = GuestKernel(folder, connection=wanted)
    client = BlockingKernelClient(connection_file=str(started.connection_file))
    try:
        assert started.wait_ready()["ready"]
        written = json.loads(started.connection_file.read_text())
        assert len({written[name] for name in free} - {0}) == len(PORTS)
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=SECONDS)
        reply = client.execute_interactive("1", output_hook=lambda _: None, timeout=SECONDS)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        started.close()


def test_sockets_that_should_be_encrypted_are_refused(folder: Path) -> None:
    started = GuestKernel(folder, connection={"curve_secretkey": "x", "curve_publickey": "y"})
    try:
        assert "does not encrypt" in started.wait_ready()["error"]
        assert started.wait_exit()[0] == 70
    finally:
        started.close()


@pytest.mark.anyio
async def test_async_jupyter_client_works(folder: Path) -> None:
    started = GuestKernel(folder)
    client = AsyncKernelClient(connection_file=str(started.connection_file))
    try:
        assert started.wait_ready()["ready"]
        client.load_connection_file()
        client.start_channels()
        await client.wait_for_ready(timeout=SECONDS)
        reply = await client.execute("6 * 7", reply=True, timeout=SECONDS)
        assert reply["content"]["execution_count"] == 1
    finally:
        client.stop_channels()
        started.close()


def test_kernel_spec_starts_this_boot_file() -> None:
    spec = json.loads(BOOT.with_name("kernel.json").read_text())
    assert spec["argv"][-2:] == ["-f", "{connection_file}"]
    assert spec["argv"][1:4] == ["-I", "-B", "{resource_dir}/boot.py"]
    assert spec["interrupt_mode"] == "signal"
    provisioner = spec["metadata"]["kernel_provisioner"]
    assert provisioner == {"provisioner_name": "kernel-mcp-sandbox", "config": {}}


def test_idle_kernel_uses_no_processor_time(kernel: GuestKernel) -> None:
    kernel.run("import time\ntime.sleep(1.2)\nprint(1)")
    before = _cpu_ticks(kernel.process.pid)
    kernel.ready.close()
    subprocess.run(["sleep", "3"], check=True)  # one second of it may still tick
    assert _cpu_ticks(kernel.process.pid) - before <= 2
    threads = len(os.listdir(f"/proc/{kernel.process.pid}/task"))  # noqa: PTH208
    assert threads <= 4


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_what_the_c_library_keeps_back_belongs_to_the_cell_that_printed_it(
    kernel: GuestKernel,
) -> None:
    code = "import ctypes; libc = ctypes.CDLL(None); _ = libc.puts(b'from C'); print('from Python')"
    assert sorted(kernel.run(code).text().split("\n")) == ["", "from C", "from Python"]
    assert kernel.run("_ = [libc.printf(b'%d\\n', i) for i in range(3000)]").text() == "".join(
        f"{number}\n" for number in range(3000)
    )
    assert kernel.run("pass").text() == ""
