"""However a server ends, nothing of it stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kernel_mcp.linux.process import find_program
from tests.integration.processes import GONE_S, ends
from tests.integration.rawserver import HELLO, RawServer
from tests.sampled import sampled

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(sys.executable).with_name("kernel-mcp"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RawServer]:
    running = RawServer(tmp_path / "s")
    yield running
    running.close()


def close_stdin(server: RawServer) -> None:
    assert server.process.stdin is not None
    server.process.stdin.close()


WAYS: dict[str, Callable[[RawServer], object]] = {
    "stdin closed": close_stdin,
    "SIGTERM": lambda server: server.process.send_signal(signal.SIGTERM),
    "SIGINT": lambda server: server.process.send_signal(signal.SIGINT),
    "SIGHUP": lambda server: server.process.send_signal(signal.SIGHUP),
    "SIGQUIT": lambda server: server.process.send_signal(signal.SIGQUIT),
    "SIGKILL": lambda server: server.process.send_signal(signal.SIGKILL),
}


ENDS = sampled(
    [f"{state}, {way}" for state in ("idle", "busy") for way in WAYS],
    *("idle, stdin closed", "busy, SIGTERM", "busy, SIGKILL"),
)


@pytest.mark.parametrize("end", ENDS)
def test_no_process_is_left(server: RawServer, end: str) -> None:
    state, way = end.split(", ")
    server.execute(2, "x = 1")
    if state == "busy":
        server.execute(3, "while True: pass", answer=False)
        server.execute(4, "1", answer=False)
    pids = server.descendants()
    assert pids
    WAYS[way](server)
    code = server.process.wait(timeout=GONE_S)
    assert code == {"SIGINT": 130, "SIGKILL": -9}.get(way, 0)
    assert ends(pids) == []
    if way != "SIGKILL":
        assert [path for path in server.state.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("way", sampled(["stdin closed", "SIGTERM", "SIGKILL"], "SIGKILL"))
def test_stopped_helpers_end_with_the_server_and_no_spare_stays(tmp_path: Path, way: str) -> None:
    """Whatever has stopped bubblewrap, the template and the kernels."""
    workspace = tmp_path / "w"
    server = RawServer(tmp_path / "s", "--workspace", str(workspace), "--warm", "1")
    try:
        server.execute(2, "x = 1")
        server.call(3, "create_session", name="second")  # one session alone has no spare beside it
        while len(list(workspace.glob(".kernel-mcp-*/*"))) < 2:  # a lock, and a spare's folder
            server.call(4, "execute", session="second", code="import time; time.sleep(0.1)")
        pids = server.descendants()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        WAYS[way](server)
        code = server.process.wait(timeout=GONE_S)
        assert ends(pids) == []
    finally:
        server.close()
    if way == "SIGKILL":
        assert len(list(workspace.glob(".kernel-mcp-*/*"))) == 2
    else:
        assert code in (0, -signal.SIGALRM)  # on a busy machine the time limit ends it
    RawServer(tmp_path / "s", "--workspace", str(workspace), "--warm", "0").close()
    assert {path.name for path in workspace.iterdir()} == {"default", "second"}


@pytest.mark.parametrize("state", sampled(["idle", "busy"], "busy"))
def test_a_client_that_stops_listening_ends_the_server(tmp_path: Path, state: str) -> None:
    with (tmp_path / "log").open("w+b") as log:
        server = RawServer(tmp_path / "s", stderr=log)
        try:
            assert server.process.stdout is not None
            if state == "busy":
                server.execute(2, "for number in range(10**5): print(number)", answer=False)
            server.process.stdout.close()
            assert server.process.wait(timeout=GONE_S) == 0
        finally:
            server.close()
        log.seek(0)
        assert b"Traceback" not in log.read()


def test_a_client_that_stops_listening_in_a_start_ends_it_before_all_is_imported(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "kernel_mcp", "--warm", "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "KERNEL_MCP_STATE_DIR": str(tmp_path / "s")},
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(b"".join(json.dumps(message).encode() + b"\n" for message in HELLO))
        started.stdin.flush()
        started.stdout.close()
        assert started.stderr is not None
        said = started.stderr.read()
        assert started.wait(timeout=GONE_S) == 0
        started.stdin.close()
    assert b"kernel_mcp.stdio_lines" in said
    assert b"mcp.server.mcpserver" not in said
    assert b"Traceback" not in said


def test_what_a_killed_server_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    first = RawServer(tmp_path / "s")
    first.execute(2, "open('f', 'w').write('x')")
    first.process.kill()
    first.process.wait()
    assert list((tmp_path / "s").iterdir())
    second = RawServer(tmp_path / "s")
    try:
        assert len([path for path in (tmp_path / "s").iterdir() if path.is_dir()]) == 1
    finally:
        second.close()
        first.close()


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, "a file"], ids=["nothing", "a file"])
def test_a_server_whose_input_ends_at_once_ends_too(tmp_path: Path, stdin: object) -> None:
    requests = tmp_path / "requests"
    requests.write_text("".join(json.dumps(message) + "\n" for message in HELLO))
    with requests.open() as file:
        done = subprocess.run(
            [sys.executable, "-m", "kernel_mcp", "--warm", "0"],
            stdin=file if stdin == "a file" else subprocess.DEVNULL,
            capture_output=True,
            cwd=ROOT,
            check=False,
            timeout=GONE_S,
        )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    if stdin == "a file":
        assert json.loads(done.stdout)["result"]["serverInfo"]["name"] == "kernel-mcp"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["-m", "kernel_mcp"], id="module", marks=pytest.mark.full),
        pytest.param([SCRIPT], id="script"),
    ],
)
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((4, 16, 34, 45, 60, 80), id="some"),
        pytest.param(
            (*range(2, 40, 2), 45, 50, 60, 70, 80, 100), id="every", marks=pytest.mark.ways
        ),
    ],
)
def test_ctrl_c_in_a_start_ends_it_without_a_word(
    tmp_path: Path, command: list[str], moments: Sequence[int]
) -> None:
    """Before its first line of ours, Python may say something itself."""
    own = 0
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "kernel_mcp", "--version"], check=True, cwd=ROOT)
    slow = max(1.0, (time.monotonic() - began) / 0.25)  # 0.25 s where nothing else runs
    for moment in moments:
        with subprocess.Popen(
            [sys.executable, *command, "--warm", "0", "--state-dir", str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        ) as started:
            time.sleep(moment / 100 * slow)  # that is what is tried
            os.killpg(started.pid, signal.SIGINT)
            _, said = started.communicate(timeout=GONE_S)
        if started.returncode == 130:
            assert b"Traceback" not in said, (moment, said.decode())
            assert b"ignored" not in said, (moment, said.decode())
            own += 1
        else:
            assert b"kernel_mcp/" not in said, (moment, said.decode())
    assert own > len(moments) * 2 // 5


@pytest.mark.parametrize("name", ["TERM", "HUP", "QUIT", "INT"])
def test_a_signal_while_the_sandbox_is_tried_leaves_no_folder(tmp_path: Path, name: str) -> None:
    programs, temporary = tmp_path / "bin", tmp_path / "tmp"
    for folder in (programs, temporary):
        folder.mkdir()
    real = find_program("bwrap")
    bwrap = programs / "bwrap"
    bwrap.write_text(f'#!/bin/sh\n[ "$1" = --help ] || kill -{name} $PPID\nexec {real} "$@"\n')
    bwrap.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "kernel_mcp"],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "TMPDIR": str(temporary),
            "KERNEL_MCP_STATE_DIR": str(tmp_path / "s"),
        },
        stdin=subprocess.PIPE,
        capture_output=True,
        cwd=ROOT,
        check=False,
        timeout=GONE_S,
    )
    assert done.returncode == 128 + signal.Signals[f"SIG{name}"]
    assert b"Traceback" not in done.stderr
    assert list(temporary.iterdir()) == []


DEAF = """
import os, signal, sys
for number in (*signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE},):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("start", sampled(["cold", "forked"], "forked"))
def test_signals_work_whatever_the_one_that_starts_the_server_has_done_to_them(
    tmp_path: Path, start: str
) -> None:
    flags = ("--no-template", "--warm", "0") if start == "cold" else ()
    server = RawServer(tmp_path / "s", *flags, through=[sys.executable, "-c", DEAF])
    try:
        server.execute(2, "kept = 'kept'")
        server.execute(3, "print('on the way')\nwhile True: pass", answer=False)
        interrupt = {"name": "interrupt", "arguments": {}}
        server.send({"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": interrupt})
        assert "KeyboardInterrupt" in json.dumps(server.read(3))
        server.execute(5, "kept", answer=False)
        assert "'kept'" in json.dumps(server.read(5))
        server.execute(6, "import subprocess; subprocess.run(['false']).returncode", answer=False)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=GONE_S) == 0
    finally:
        server.close()


PLANTED = """
import re, sys
from kernel_mcp import cli
from kernel_mcp.tools import cells
check = cells.check_code
def planted(code):
    check(code)
    if code == "stand still":
        re.match("(a+)+b", "a" * 40)
cells.check_code = planted
sys.exit(cli.main(sys.argv[4:]))
"""


@pytest.mark.ways
def test_an_endless_pattern_in_the_server_is_named_in_its_log_and_sigterm_ends_it(
    tmp_path: Path,
) -> None:
    with (tmp_path / "log").open("wb") as log:
        server = RawServer(
            tmp_path / "s",
            "--warm",
            "0",
            stderr=log,
            through=[sys.executable, "-c", PLANTED],
        )
        try:
            server.execute(2, "x = 1")
            pids = server.descendants()
            server.execute(3, "stand still", answer=False)
            while b"in planted" not in (tmp_path / "log").read_bytes():
                with pytest.raises(subprocess.TimeoutExpired):
                    server.process.wait(0.1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=GONE_S) == -signal.SIGALRM
            assert ends(pids) == []
        finally:
            server.close()
    assert b"most recent call first" in (tmp_path / "log").read_bytes()
