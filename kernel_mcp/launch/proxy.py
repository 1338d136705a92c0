"""The process that connects for sessions, as the server keeps it: started, told, replaced."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import Tell
from kernel_mcp.launch.readiness import StderrTail
from kernel_mcp.launch.spawn import spawn
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.process import bare_program
from kernel_mcp.network.rules import Entry, Rules
from kernel_mcp.network.secrets import Vault
from kernel_mcp.sandbox.base import Sandbox, SandboxCommand
from kernel_specs.template import linux, packets

PAUSE_S = 1.0
"""Seconds until a proxy that has ended is replaced; each further one doubles it up to the next."""
LONGEST_PAUSE_S = 60.0
CERTIFIED_S = 30.0
"""For a proxy to make the authority of the hosts of secrets; it takes some 0.2 s."""
MOST_CLOSED = 1000
"""Listeners that were closed and whose last records may still come."""

logger = logging.getLogger(__name__)


class Proxy:
    """One process at a time, with the listening sockets of all kernels."""

    def __init__(self, vault: Vault, sandbox: Sandbox | None, tell: Tell) -> None:
        """It gets a user id from `sandbox`, if that has any; `tell` takes what is of no session."""
        self._vault = vault
        self._certified = anyio.Event()
        self._sandbox = sandbox
        self._identity: Identity | None = None
        self._tell = tell
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Mapping[str, Any], socket.socket, Tell]] = {}
        """What was given to the process, by number: the message, the socket, who hears of it."""
        self._closed: OrderedDict[int, Tell] = OrderedDict()
        self._control: socket.socket | None = None
        self._process = ExitStack()
        self._tail: StderrTail | None = None
        self._again: asyncio.TimerHandle | None = None
        self._pause_s = PAUSE_S

    @property
    def down(self) -> bool:
        """Whether kernels that have a way to it wait for the next one."""
        return self._control is None and bool(self._open)

    def start(self) -> None:
        """Start it if it does not run, nor waits to be started."""
        if self._control is None and self._again is None:
            self._start()

    async def certify(self) -> None:
        """Start it, and wait until kernels can know its authority. Raises LaunchError."""
        self.start()
        try:
            with anyio.fail_after(CERTIFIED_S):
                await self._certified.wait()
        except TimeoutError:
            raise LaunchError(
                f"the proxy of the network has not begun within {CERTIFIED_S:g} s, which is to "
                "use the secrets (--secret); the log says why"
            ) from None

    def close(self) -> None:
        """End it."""
        self._stop()
        for _, sock, _ in self._open.values():
            sock.close()
        self._open.clear()
        if self._sandbox is not None:
            self._sandbox.release(self._identity)

    def number(self) -> int:
        """One that no other listener or session has."""
        return next(self._numbers)

    def give(
        self, session: int, sock: socket.socket, rules: Rules, exact: Entry | None, tell: Tell
    ) -> int:
        """Have it accept from a listening socket, which is this object's now; its number."""
        number = self.number()
        message = {
            "listen": number,
            "session": str(session),
            "rules": rules.to_json(),
            "exact": None if exact is None else str(exact),
        }
        self._open[number] = (message, sock, tell)
        self._send(message, sock)
        return number

    def take_back(self, number: int) -> None:
        """Have it accept no more there, and cut what it has."""
        _, sock, tell = self._open.pop(number)
        sock.close()
        self._closed[number] = tell
        if len(self._closed) > MOST_CLOSED:
            self._closed.popitem(last=False)
        self._send({"close": number})

    def _send(self, message: Mapping[str, Any], sock: socket.socket | None = None) -> None:
        """Tell the proxy, if it runs; one that does not take it is replaced."""
        if self._control is None:
            return
        try:
            packets.send(self._control, message, [] if sock is None else [sock.fileno()])
        except OSError as reason:
            self._on_end(f"it takes no messages: {reason.strerror}")

    def _send_secrets(self) -> None:
        """What a proxy has to know first; nothing but this socket ever holds the values."""
        if self._vault and self._control is not None:
            trust = os.memfd_create("authorities", os.MFD_CLOEXEC)
            with open(trust, "w+", encoding="ascii") as file:
                file.write(self._vault.trust)
                file.seek(0)
                packets.send(self._control, _message_of(self._vault), [file.fileno()])

    def _start(self) -> None:
        self._again = None
        with Barrier("starting the proxy of the network") as barrier:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process.callback(ours.close)
            ours.setblocking(False)
            if self._sandbox is not None and self._identity is None:
                self._identity = self._sandbox.identity()
            uid = -1 if self._identity is None else self._identity.uid
            fd = theirs.detach()
            words = [str(fd), str(uid), *(["secrets"] if self._vault else [])]
            argv = bare_program("kernel_mcp.network.proxy", *words, packages=True)
            popen, output = spawn(SandboxCommand(argv, [fd], {"LANG": "C.UTF-8"}))
            self._process.callback(popen.wait)
            self._process.callback(popen.kill)
            self._tail = StderrTail(output, asyncio.get_running_loop())
            self._process.callback(self._tail.close)
            self._control = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)
            self._send_secrets()
            for message, sock, _ in list(self._open.values()):
                self._send(message, sock)
        if barrier.failure is not None:
            self._on_end("it could not be started")

    def _stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control = None
        self._process.close()

    def _on_readable(self) -> None:
        with Barrier("hearing the proxy of the network"):
            while self._control is not None:
                try:
                    received = packets.receive(self._control, wait=False)
                except BlockingIOError:
                    return
                if received is None:
                    self._on_end("it has ended")
                    return
                linux.close_all(received[1])
                self._on_message(received[0])

    def _on_message(self, message: dict[str, Any]) -> None:
        if "end" in message:
            number = int(message.pop("end"))
            held = self._open.get(number)
            tell = held[2] if held is not None else self._closed.get(number, self._tell)
            tell(message)
        elif "certificate" in message:
            self._vault.add(message["certificate"])
            self._certified.set()
        elif "failed" in message:
            logger.error("the proxy of the network could not serve a session: %s", message["why"])
        else:
            self._pause_s = PAUSE_S

    def _on_end(self, why: str) -> None:
        """Replace it after a pause, in which connections of sessions wait."""
        said = "" if self._tail is None else self._tail.text().strip()
        self._stop()
        logger.error(
            "the proxy of the network is replaced in %g s, its connections are cut: %s%s",
            self._pause_s,
            why,
            f". It wrote:\n{said}" if said else "",
        )
        self._tell({"verdict": "proxy ended", "why": why})
        self._again = asyncio.get_running_loop().call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


def fits(vault: Vault) -> bool:
    """Whether the process can be told of all secrets in one message."""
    return len(json.dumps(_message_of(vault))) <= packets.PACKET_BYTES


def _message_of(vault: Vault) -> dict[str, Any]:
    return {"secrets": [each.to_json() for each in vault.secrets]}
