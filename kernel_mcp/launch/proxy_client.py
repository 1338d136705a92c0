"""The server's side of the proxy process: start it, give it listening sockets, replace it."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from kernel_mcp.errors import LaunchError
from kernel_mcp.launch.base import OnRecord
from kernel_mcp.launch.helper import HelperProcess
from kernel_mcp.linux.folders import Identity
from kernel_mcp.linux.process import bare_program
from kernel_mcp.network.rules import HostRule, Rules
from kernel_mcp.network.secrets import Vault
from kernel_mcp.sandbox.base import Sandbox
from kernel_specs import linux
from kernel_specs.template import packets

CERTIFIED_S = 120.0
"""Time limit in seconds for the proxy to make its certificate authority; 0.2 s when idle."""
_KEY_BYTES = 1024
"""Upper bound of the bytes of the authority's key in a message; a key has some 250."""
MOST_CLOSED = 1000
"""Number of closed listeners that are remembered, as their last records may arrive later."""

logger = logging.getLogger(__name__)


class ProxyClient:
    """The proxy process, with the listening sockets of all kernels."""

    def __init__(
        self,
        vault: Vault,
        sandbox: Sandbox | None,
        on_record: OnRecord,
        remark: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """The proxy runs under a user id of `sandbox`, if the sandbox assigns user ids.

        `on_record` is called with records that belong to no session, `remark` with texts that the
        next answers include.
        """
        self._vault = vault
        self._certified = anyio.Event()
        self._authority: Mapping[str, Any] | None = None
        """Certificate and key of the first process, passed on to the processes that replace it."""
        self._sandbox = sandbox
        self._identity: Identity | None = None
        self._on_record = on_record
        self._remark = remark
        self._numbers = itertools.count(1)
        self._listeners: dict[int, tuple[Mapping[str, Any], socket.socket, OnRecord]] = {}
        """Message that announces a listening socket, the socket, and its `on_record`, by number."""
        self._closed_listeners: OrderedDict[int, OnRecord] = OrderedDict()
        self._process = HelperProcess(
            "the proxy of the network",
            self._command,
            on_start=self._on_start,
            on_message=self._on_message,
            on_end=self._on_end,
        )

    @property
    def down(self) -> bool:
        """Return True if the proxy does not run although kernels have network access."""
        return not self._process.running and bool(self._listeners)

    def start(self) -> None:
        """Start the proxy unless it runs, or a start is scheduled."""
        self._process.start()

    async def certify(self) -> None:
        """Start the proxy and wait for its certificate authority.

        Raises LaunchError after `CERTIFIED_S`.
        """
        self.start()
        try:
            with anyio.fail_after(CERTIFIED_S):
                await self._certified.wait()
        except TimeoutError:
            raise LaunchError(
                f"the proxy of the network has not begun within {CERTIFIED_S:g} s, which is to "
                "use the secrets (--secret); the log says why"
            ) from None

    async def aclose(self) -> None:
        """End the proxy, and close all listening sockets."""
        await self._process.aclose()
        for _, sock, _ in self._listeners.values():
            sock.close()
        self._listeners.clear()
        if self._sandbox is not None:
            self._sandbox.release(self._identity)

    def number(self) -> int:
        """Return a number that no other listener or session has."""
        return next(self._numbers)

    def add_listener(
        self,
        session: int,
        sock: socket.socket,
        rules: Rules,
        exact: HostRule | None,
        on_record: OnRecord,
    ) -> int:
        """Pass a listening socket to the proxy, and own it from now on; return its number.

        With `exact`, all its connections are forwarded to that host and port. `on_record` is called
        with a record of each.
        """
        number = self.number()
        message = {
            "listen": number,
            "session": str(session),
            "rules": rules.to_json(),
            "exact": None if exact is None else str(exact),
        }
        self._listeners[number] = (message, sock, on_record)
        self._process.send(message, [sock.fileno()])
        return number

    def remove_listener(self, number: int) -> None:
        """Close the listening socket of this number, and cut its connections."""
        _, sock, on_record = self._listeners.pop(number)
        sock.close()
        self._closed_listeners[number] = on_record
        if len(self._closed_listeners) > MOST_CLOSED:
            self._closed_listeners.popitem(last=False)
        self._process.send({"close": number})

    def _command(self, fd: int) -> list[str]:
        if self._sandbox is not None and self._identity is None:
            self._identity = self._sandbox.identity()
        uid = -1 if self._identity is None else self._identity.uid
        words = [str(fd), str(uid), *(["secrets"] if self._vault else [])]
        return bare_program("kernel_mcp.network.proxy", *words, packages=True)

    def _on_start(self) -> None:
        """Send secrets and listening sockets to a new process.

        Secrets are sent over this socket only.
        """
        if self._vault:
            trust = os.memfd_create("authorities", os.MFD_CLOEXEC)
            with open(trust, "w+", encoding="ascii") as file:
                file.write(self._vault.trust)
                file.seek(0)
                secrets = {**_message_of(self._vault), "authority": self._authority}
                self._process.send(secrets, [file.fileno()])
        for message, sock, _ in list(self._listeners.values()):
            self._process.send(message, [sock.fileno()])

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        linux.close_all(fds)
        if "end" in message:
            number = int(message.pop("end"))
            held = self._listeners.get(number)
            on_record = (
                held[2] if held is not None else self._closed_listeners.get(number, self._on_record)
            )
            on_record(message)
        elif "certificate" in message:
            self._vault.add(message["certificate"])
            self._authority = message
            self._certified.set()
        elif "failed" in message:
            logger.error("the proxy of the network could not serve a session: %s", message["why"])

    def _on_end(self, why: str) -> None:
        self._on_record({"verdict": "proxy ended", "why": why})
        self._remark(
            f"The proxy of the network is replaced ({why}): connections through it were cut. New "
            "ones wait for the next proxy"
        )


def fits(vault: Vault) -> bool:
    """Return True if all secrets and the authority fit into one message."""
    return (
        len(json.dumps(_message_of(vault))) + vault.certificate_bytes + _KEY_BYTES
        <= packets.PACKET_BYTES
    )


def _message_of(vault: Vault) -> dict[str, Any]:
    return {"secrets": [each.to_json() for each in vault.secrets]}
