"""A boot file's limits on the kernel, and its behaviour when memory runs out."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.guest_client import (
    GuestKernel,
    guest,
)

MIB = 1024 * 1024


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
        for code in ("!ls", "%pip list", "%%bash\nls", "get_ipython().getoutput('ls')"):
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


@pytest.mark.parametrize("memory", [256, pytest.param(512, marks=pytest.mark.full)])
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
