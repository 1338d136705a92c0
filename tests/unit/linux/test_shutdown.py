"""The end of a server process, in processes of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BEGIN = """
import asyncio, os, re, signal, sys, time
from kernel_mcp.linux import shutdown as module
from kernel_mcp.linux.shutdown import Shutdown
shutdown = Shutdown()
shutdown.take_signals()
"""
ORDERLY = """
async def serve():
    heard = asyncio.Event()
    shutdown.on_begin(heard.set)
    print("ready", flush=True)
    await heard.wait()
    print("heard", flush=True)
    await asyncio.sleep(float(sys.argv[1]))
    print("saved", flush=True)
asyncio.run(shutdown.run(serve))
sys.exit(shutdown.code)
"""
STANDING = """
module.ALARM_S = 1.5
async def serve():
    print("ready", flush=True)
    await asyncio.sleep(0)
    re.match("(a+)+b", "a" * 40)
asyncio.run(shutdown.run(serve))
"""

COMPUTING = """
def deep(count, given):
    if not count:
        return {key: [str(key)] * 2 for key in range(20)}
    return (lambda more: deep(count - 1, more))({**given, count: [count]})
async def serve():
    print("ready", flush=True)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)  # ever again, not once in two seconds
    while time.process_time() < 4:
        for count in range(5, 80):
            deep(count, {})
    print("whole", flush=True)
asyncio.run(shutdown.run(serve))
"""


IN_A_CALLBACK = """
import weakref
class Thing: pass
def late(_):
    print("ready", flush=True)
    time.sleep(60)
thing = Thing()
watch = weakref.ref(thing, late)
del thing
""" + ORDERLY.replace('print("ready", flush=True)', "")
HALF_MADE = """
class Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        print("ready", flush=True)
        time.sleep(60)
        super().__init__()
Loop()
"""


class Process:
    """A program whose output a test reads."""

    def __init__(self, code: str, *words: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", BEGIN + code, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate()
        return self.popen.returncode, out, err


@pytest.fixture
def orderly() -> Iterator[Process]:
    process = Process(ORDERLY, "0")
    yield process
    process.popen.kill()
    process.popen.communicate()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT"])
def test_the_first_signal_is_heard_and_work_at_the_end_is_done(orderly: Process, name: str) -> None:
    orderly.popen.send_signal(signal.Signals[name])
    code, out, _ = orderly.end()
    assert out.split() == ["heard", "saved"]
    assert code == (130 if name == "SIGINT" else 0)


SERVICE = "shutdown = Shutdown(0)\nshutdown.take_signals()\n" + ORDERLY


def test_a_service_without_a_terminal_outlives_sighup() -> None:
    process = Process("os.setsid()\n" + SERVICE, "0")
    process.popen.send_signal(signal.SIGHUP)
    process.popen.send_signal(signal.SIGTERM)
    code, out, err = process.end()
    assert (code, out.split()) == (0, ["heard", "saved"])
    assert "SIGHUP" not in err


def test_a_service_ends_with_its_terminal() -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", BEGIN + SERVICE, "0"])
    while b"ready" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    assert os.WIFEXITED(os.waitpid(pid, 0)[1])  # which waits for its end


def test_work_that_takes_longer_than_the_alarm_is_not_cut_short_while_the_loop_runs() -> None:
    process = Process("module.ALARM_S = 1.0\n" + ORDERLY, "2.5")
    process.popen.send_signal(signal.SIGINT)
    code, out, err = process.end()
    assert (out.split(), code) == (["heard", "saved"], 130)
    assert err.count("saving sessions; Ctrl-C again ends at once") == 1


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_what_a_client_sends_just_after_the_first_signal_cuts_nothing_short(
    second: signal.Signals,
) -> None:
    process = Process("module.AGAIN_S = 30.0\n" + ORDERLY, "0.5")
    process.popen.send_signal(signal.SIGINT)
    assert process.line() == "heard"
    process.popen.send_signal(second)
    assert process.end()[1].split() == ["saved"]


def test_a_second_ctrl_c_ends_at_once() -> None:
    process = Process("module.AGAIN_S = 0.01\n" + ORDERLY, "600")
    process.popen.send_signal(signal.SIGINT)
    assert process.line() == "heard"
    time.sleep(0.05)  # a person's second press is no repetition of the first by a program
    process.popen.send_signal(signal.SIGINT)
    code, out, _ = process.end()
    assert (code, out) == (-signal.SIGINT, "")


def test_an_endless_pattern_is_named_on_stderr_and_a_signal_ends_the_process_all_the_same() -> None:
    process = Process(STANDING)
    assert process.popen.stderr is not None
    said = ""
    while "in serve" not in said:
        line = process.popen.stderr.readline()
        assert line
        said += line
    assert "most recent call first" in said
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == -signal.SIGALRM


def test_an_event_loop_that_computes_survives_the_writing_of_its_stack() -> None:
    code, out, said = Process(COMPUTING).end()
    assert (code, out) == (0, "whole\n")
    assert said.count("most recent call first") > 100


def test_a_signal_before_the_event_loop_raises_system_exit() -> None:
    process = Process("print('ready', flush=True)\ntime.sleep(600)")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 143


def test_an_end_that_begins_in_a_callback_is_heard_by_the_loop_and_says_nothing() -> None:
    process = Process(IN_A_CALLBACK, "0")
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == (130, "heard\nsaved\n", "")


def test_an_event_loop_whose_creation_is_interrupted_ends_without_a_word() -> None:
    process = Process(HALF_MADE)
    process.popen.send_signal(signal.SIGINT)
    assert process.end() == (130, "", "")
