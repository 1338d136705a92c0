"""A server that is killed: its kernel has to go with it.

As a program it is that server: it reads what to start as JSON from standard input, prints the
kernel's process id and waits.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.commands.doctor.trials import LIMITS
from kernel_mcp.launch.base import KernelEnvironment, LaunchRequest
from kernel_mcp.launch.cold import LocalLauncher
from kernel_mcp.launch.rundir import RunDirectory
from kernel_mcp.linux.process import own_module
from kernel_mcp.policy import Policy
from kernel_mcp.sandbox.base import ContainerOptions
from kernel_mcp.sandbox.probe import Check
from kernel_mcp.sandbox.select import select_sandbox

START_TIMEOUT_S = 60.0
GONE_S = 2.0
NAME = "orphan dies"


def killed_server(
    backend: str, environment: KernelEnvironment, runs: Path, container: ContainerOptions
) -> Check:
    """Start a server with one kernel, kill it, and see how long the kernel lives on; blocks."""
    task = {
        "backend": backend,
        "container": asdict(container),
        "python": str(environment.python),
        "readonly": list(map(str, environment.readonly)),
        "runs": str(runs),
    }
    server = subprocess.Popen(
        own_module("kernel_mcp.commands.doctor.orphan"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(json.dumps(task))
            server.stdin.close()
            line = _line(server)
            if not line.strip().isdigit():
                server.kill()
                assert server.stderr is not None
                said = server.stderr.read()[-300:].strip()
                return Check(NAME, False, f"no kernel could be started: {said}")
            kernel = os.pidfd_open(int(line))
        finally:
            server.kill()
        began = time.monotonic()
        try:
            gone, _, _ = select.select([kernel], [], [], GONE_S)
        finally:
            os.close(kernel)
    took = (time.monotonic() - began) * 1000
    found = f"gone {took:.0f} ms after its server" if gone else f"alive after {GONE_S:g} s"
    return Check(NAME, bool(gone), found)


def _line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    ready, _, _ = select.select([server.stdout], [], [], START_TIMEOUT_S)
    return server.stdout.readline() if ready else ""


async def _serve(task: dict[str, Any]) -> None:
    with RunDirectory.create(Path(task["runs"])) as runs:
        workspace = runs.path / "w"
        workspace.mkdir(mode=0o700)
        container = ContainerOptions(**task["container"])
        launcher = LocalLauncher(select_sandbox(task["backend"], container=container), runs)
        environment = KernelEnvironment(Path(task["python"]), tuple(map(Path, task["readonly"])))
        handle = await launcher.launch(
            LaunchRequest(
                session="doctor",
                environment=environment,
                policy=Policy.for_allow(("*",)),
                limits=LIMITS,
                workspace=workspace,
            )
        )
        print(handle.pid, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_serve, json.load(sys.stdin))
