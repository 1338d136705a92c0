"""The control channel, and Jupyter clients of others."""

from __future__ import annotations

import json
import os
import subprocess
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
    wait_until,
)


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


def test_a_clients_questions_draw_no_random_number_of_a_cell(kernel: GuestKernel) -> None:
    expected = kernel.run("import random; random.seed(11); random.random()").outputs()
    kernel.run("random.seed(11)")
    for _ in range(3):
        assert kernel.ask("kernel_info_request")["status"] == "ok"
    assert kernel.run("random.random()").outputs() == expected


def test_what_a_cell_left_to_the_loop_comes_before_the_next_cell(kernel: GuestKernel) -> None:
    begun = "import time; time.sleep(.3)\nloop = get_ipython().kernel.io_loop.asyncio_loop\n"
    leaving = kernel.begin(begun + "_ = loop.call_soon(globals().update, {'left': 1})")
    reading = kernel.begin("left")
    assert kernel.finish(leaving).outputs() == []
    assert kernel.finish(reading).outputs() == ["execute_result:1"]
    assert kernel.finish(kernel.begin(begun + "loop.stop()")).outputs() == []
    assert kernel.run("left").outputs() == ["execute_result:1"]


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
