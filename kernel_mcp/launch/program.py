"""Programs that become kernels: any that speak Jupyter's protocol, as a kernel spec names them."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import ExitStack

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import ConnectionInfo
from kernel_mcp.launch.process import ConfinedProcess
from kernel_mcp.linux.commands import output_of
from kernel_mcp.linux.process import bare_program

_HELPER = "kernel_mcp.network.namespace_connections"


async def connections(
    process: ConfinedProcess, connection: ConnectionInfo, timeout_s: float
) -> tuple[socket.socket, ...]:
    """Connect to shell, control, iopub and, if it has one, stdin of a kernel, once it listens.

    Loopback addresses are those of the kernel's own network. Waits for at most `timeout_s` seconds.
    Raises LaunchError with the kernel's last output.
    """
    made: tuple[socket.socket, ...] = ()
    refusal: LaunchError | None = None
    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as tasks:

            async def connect() -> None:
                nonlocal made, refusal
                try:
                    made = await _connected(process, connection)
                except LaunchError as error:
                    refusal = error
                except (FileNotFoundError, ProcessLookupError):
                    return  # it has ended, which `wait` finds
                tasks.cancel_scope.cancel()

            tasks.start_soon(connect)
            await process.wait()
            tasks.cancel_scope.cancel()
    if made:
        return made
    if refusal is not None and process.exit is None:
        raise refusal
    what = f"the kernel did not listen within {timeout_s:g} s"
    if process.exit is not None:
        what = f"before it listened {process.exit.story('the kernel')}"
    output = process.output.strip()
    raise LaunchError(what + (f". It wrote:\n{output}" if output else "."))


async def _connected(
    process: ConfinedProcess, connection: ConnectionInfo
) -> tuple[socket.socket, ...]:
    ports = (
        connection.shell_port,
        connection.control_port,
        connection.iopub_port,
        connection.stdin_port,
    )
    with ExitStack() as held:
        ours, theirs = map(
            held.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        ours.setblocking(False)
        namespace = -1
        addresses: list[str | tuple[str, int]] = [*map(connection.path, ports)]
        passed = [theirs.fileno()]
        if connection.transport == "tcp":
            addresses = [(connection.ip, port) for port in ports]
            namespace = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, namespace)
            signal.pidfd_send_signal(process.pidfd, 0)  # raises if the pid was reused
            passed.append(namespace)
        words = [str(namespace), str(theirs.fileno()), json.dumps(addresses)]
        env = {"LANG": "C.UTF-8"}  # none of the server's: it enters the kernel's namespace
        done = await output_of(bare_program(_HELPER, *words), env=env, pass_fds=passed)
        if done.code != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise LaunchError(f"the kernel's network cannot be entered: {''.join(said)}")
        _, fds, _, _ = socket.recv_fds(ours, 16, len(ports), socket.MSG_CMSG_CLOEXEC)
    ends = tuple(socket.socket(fileno=fd) for fd in fds)
    for end in ends:
        end.setblocking(False)
        if connection.transport == "tcp":
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends
