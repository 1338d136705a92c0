"""Calls of a process: by threads, children and event loops; their ends; no gateway."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.guest.importable.gateway import IMPORTABLE, Gateway, run, surroundings

Out = Callable[[str], str]


def test_fifty_threads_get_their_own_answers_by_eight_connections(
    out: Out, gateway: Gateway
) -> None:
    said = out(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tools import crm\n"
        "with ThreadPoolExecutor(50) as pool:\n"
        "    found = list(pool.map(lambda i: crm.meet(i=i)['i'], range(48)))\n"
        "print(found == list(range(48)))"
    )
    assert said == "True\n"
    assert gateway.most == 8


def test_coroutines_get_their_own_answers_while_the_loop_goes_on(out: Out) -> None:
    said = out(
        "import asyncio\n"
        "from tools import crm\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(crm.wait.aio(n=1))\n"
        "    found = await asyncio.gather(*(crm.echo.aio(i=i) for i in range(50)))\n"
        "    print([each['i'] for each in found] == list(range(50)), task.done())\n"
        "    task.cancel()\n"
        "    await asyncio.gather(task, return_exceptions=True)\n"
        "    print(task.cancelled(), crm.echo(i=7))\n"
        "asyncio.run(main())"
    )
    assert said == "True False\nTrue {'i': 7}\n"


def test_a_cancelled_coroutine_closes_its_connection(out: Out, gateway: Gateway) -> None:
    out(
        "import asyncio\n"
        "from tools import crm\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(crm.wait.aio(n=1), 0.01)\n"
        "    except asyncio.TimeoutError:\n"
        "        crm.echo()\n"
        "asyncio.run(main())"
    )
    ops = [gateway.events.get() for _ in range(4)]
    assert ("cancelled", {"n": 1}) in ops


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_processes_of_a_pool_call_by_themselves(
    way: str, gateway: Gateway, listening: socket.socket, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import multiprocessing, os\n"
        "from tools import crm\n"
        "def work(i): return crm.echo(i=i)['i'], os.getpid()\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({way!r}).Pool(3) as pool:\n"
        "        found = pool.map(work, range(30), chunksize=1)\n"
        "        named = pool.map(crm.echo, [])\n"
        "    print([i for i, _ in found] == list(range(30)))\n"
        "    print(os.getpid() in {pid for _, pid in found})"
    )
    done = subprocess.run([sys.executable, "-B", str(file)], **surroundings(listening))
    assert (done.stdout, done.returncode) == ("True\nFalse\n", 0), done.stderr


def test_a_function_can_be_sent_to_a_process(
    gateway: Gateway, listening: socket.socket, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "import tools\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1, get_context('spawn')) as pool:\n"
        "        print(pool.submit(tools.crm.echo, a=1).result())"
    )
    done = subprocess.run([sys.executable, "-B", str(file)], **surroundings(listening))
    assert done.stdout == "{'a': 1}\n", done.stderr


def test_a_fork_in_the_middle_of_a_call_does_not_hold_it(out: Out, gateway: Gateway) -> None:
    said = out(
        "import os, threading, tools\n"
        "from tools import crm\n"
        "def call():\n"
        "    try: crm.wait(n=1)\n"
        "    except tools.ToolUnavailable: pass\n"
        "thread = threading.Thread(target=call)\n"
        "thread.start()\n"
        "from mcp_tools import gateway\n"
        "while not gateway._open: pass\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    print(crm.echo(child=True), gateway._open, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(crm.echo(child=False), len(gateway._open))\n"
        "import socket\n"
        "for each in list(gateway._open): each.shutdown(socket.SHUT_RDWR)\n"
        "thread.join()"
    )
    assert said == "{'child': True} set()\n{'child': False} 1\n"


def test_an_interrupt_ends_a_call_and_the_next_one_works(
    gateway: Gateway, listening: socket.socket
) -> None:
    code = (
        "from tools import crm\ntry: crm.wait(n=1)\nexcept KeyboardInterrupt: print(crm.echo(a=1))"
    )
    options = surroundings(listening)
    del options["capture_output"], options["check"]
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", code], stdout=subprocess.PIPE, **options
    )
    assert [gateway.events.get()[0] for _ in range(2)] == ["list", "call"]
    process.send_signal(signal.SIGINT)
    assert ("cancelled", {"n": 1}) in [gateway.events.get() for _ in range(2)]
    assert process.communicate()[0] == "{'a': 1}\n"


def test_a_gateway_that_ends_is_an_error_and_another_one_is_taken(
    gateway: Gateway, listening: socket.socket
) -> None:
    code = (
        "import tools\n"
        "from tools import crm\n"
        "try: crm.wait(n=1)\n"
        "except tools.ToolUnavailable as error: print('gone')\n"
        "print(crm.echo(a=1))"
    )
    options = surroundings(listening)
    del options["capture_output"], options["check"]
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", code], stdout=subprocess.PIPE, **options
    )
    assert [gateway.events.get()[0] for _ in range(2)] == ["list", "call"]
    gateway.close()
    another = Gateway(gateway.path)
    assert process.communicate()[0] == "gone\n{'a': 1}\n"
    another.close()


@pytest.mark.parametrize(
    "frame",
    [
        *(b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{"),
        b'\0\0\0\x0c{"blobs":-1}',
        b'\0\0\0\x0e{"blobs":[-1]}',
        b"",
    ],
)
def test_what_is_no_answer_is_an_error(frame: bytes, out: Out, gateway: Gateway) -> None:
    gateway.raw = frame
    said = out("import tools\ntry: tools.servers()\nexcept tools.ToolUnavailable as e: print(e)")
    assert said.startswith("the gateway of tools ")


def test_connections_that_end_before_they_are_accepted_count_for_nothing(
    listening: socket.socket,
) -> None:
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(listening.getsockname())
    gateway = Gateway(Path(listening.getsockname()))
    done = run(listening, "import tools\nprint(tools.crm.echo(a=1))")
    gateway.close()
    assert done.stdout == "{'a': 1}\n", done.stderr


def test_a_process_without_the_socket_says_so(tmp_path: Path) -> None:
    code = (
        "import tools\n"
        "try: tools.servers()\n"
        "except tools.ToolUnavailable as error: print('pass_fds' in str(error))"
    )
    for fd in ("", "1", "999", "-5"):
        env = {**os.environ, "PYTHONPATH": str(IMPORTABLE), "KERNEL_MCP_TOOLS_FD": fd or "-1"}
        argv = [sys.executable, "-B", "-c", code]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.stdout == "True\n", done.stderr


def test_progress_is_told_to_the_function_that_code_has_set(out: Out, gateway: Gateway) -> None:
    gateway.answers["answer"] = lambda given: (
        {"progress": {"progress": given["n"], "total": 2, "message": "half"}},
        (),
    )
    said = out(
        "import tools\n"
        "class Enough(Exception): pass\n"
        "def told(*words):\n"
        "    print(words)\n"
        "    raise Enough\n"
        "tools.on_progress = told\n"
        "try: tools.crm.answer(n=1)\n"
        "except Enough: print(tools.crm.echo())"
    )
    assert said == "(1, 2, 'half')\n{}\n"


def test_arguments_may_be_dates_paths_and_what_has_tolist(out: Out) -> None:
    said = out(
        "import array, datetime, pathlib, tools\n"
        "echo = tools.crm.echo\n"
        "print(echo(a='\\u00e5'))\n"
        "day, numbers = datetime.date(2026, 1, 2), array.array('i', [0, 1])\n"
        "print(echo(a=day, b=pathlib.Path('x'), c=numbers))\n"
        "deep = []\n"
        "for _ in range(100_000): deep = [deep]\n"
        "for bad in (deep, '\\ud800', object(), float('nan'), 'x' * 9_000_000, b'x'):\n"
        "    try: echo(a=bad)\n"
        "    except (TypeError, ValueError) as error: print(type(error).__name__, error)"
    )
    letter, first, deep, half, *errors = said.splitlines()
    assert letter == "{'a': '\u00e5'}"
    assert first == "{'a': '2026-01-02', 'b': 'x', 'c': [0, 1]}"
    assert deep == "ValueError the arguments of a tool are nested too deeply for JSON"
    assert half == "ValueError an argument of a tool has half of a surrogate pair, no text"
    assert errors[0] == "TypeError arguments of tools are JSON, which has no object"
    assert errors[1].startswith("ValueError Out of range float values")
    assert errors[2].startswith("ValueError the arguments of a tool may have 8,388,608 bytes")
    assert errors[3] == "TypeError arguments of tools are JSON, which has no bytes"
