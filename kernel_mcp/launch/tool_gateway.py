"""The server's side of the gateway process: start it, name kernels to it, pass on its questions."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kernel_mcp.config.settings import Settings
from kernel_mcp.config.tool_servers import ToolServer
from kernel_mcp.errors import ConfigError
from kernel_mcp.launch.helper import HelperProcess
from kernel_mcp.linux.process import bare_program, search_path
from kernel_mcp.output.text import one_line
from kernel_specs import linux
from kernel_specs.template import packets

_PASSED_ON = (
    *("HOME", "LOGNAME", "SHELL", "TERM", "USER"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""Variables of the server that its gateway has; programs of tool servers have the first five."""

logger = logging.getLogger(__name__)


class ToolCaller(Protocol):
    """The session of a kernel that calls tools."""

    def asks(self, call: int, tool: str, digest: str, shown: str) -> None:
        """Ask a person about a call, and report the answer by `ToolGateway.decide`.

        `digest` is the SHA-256 of its arguments, `shown` their beginning.
        """

    def begins(self, call: int, tool: str, digest: str) -> None:
        """Note that a call begins."""

    def ends(self, call: int, facts: Mapping[str, Any]) -> None:
        """Note that a call has ended, or that none asks for it any more."""

    def lost(self) -> None:
        """Note that the gateway has ended, with all calls."""


class ToolGateway:
    """The gateway process, started at the first kernel that asks for tools."""

    def __init__(self, servers: Sequence[ToolServer], allowed: Sequence[str]) -> None:
        """Raises ConfigError if the servers do not fit into one message."""
        environ = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self.servers = tuple(servers)
        self._first = {
            "servers": [each.to_json() for each in servers],
            "allow": [*allowed],
            "environ": {**environ, "PATH": search_path(os.environ)},
        }
        if len(json.dumps(self._first)) > packets.PACKET_BYTES:
            raise ConfigError(
                f"--tool-servers: all entries together have {packets.PACKET_BYTES >> 10} KiB at "
                "most; name fewer of them"
            )
        self._numbers = itertools.count(1)
        self._kernels: dict[int, tuple[Mapping[str, Any], ToolCaller]] = {}
        self._left: dict[int, ToolCaller] = {}
        """Callers of kernels that have ended, until the ends of all their calls are known."""
        self._process = HelperProcess(
            "the gateway of tool servers",
            lambda fd: bare_program("kernel_mcp.tool_servers.gateway", str(fd), packages=True),
            on_start=self._on_start,
            on_message=self._on_message,
            on_end=self._on_end,
        )

    @classmethod
    def of(cls, settings: Settings) -> ToolGateway:
        """Return the gateway to the servers of the settings. Raises ConfigError."""
        return cls(settings.tool_servers, settings.allow_tools)

    def __bool__(self) -> bool:
        return bool(self.servers)

    def connect(
        self,
        path: str,
        principal: str,
        servers: Sequence[str],
        always: Sequence[str],
        caller: ToolCaller,
    ) -> int:
        """Connect the gateway to a kernel's socket at `path`; return the kernel's number.

        It may use these `servers`, and call the tools `always` unasked.
        """
        number = next(self._numbers)
        about = {"path": path, "principal": principal, "servers": [*servers], "always": [*always]}
        self._kernels[number] = {"kernel": number, **about}, caller
        if self._process.running:
            self.connect_again(number)
        self._process.start()
        return number

    def connect_again(self, number: int) -> None:
        """Connect the gateway to a kernel again, whose process has asked for it."""
        self._process.send(self._kernels[number][0])

    def disconnect(self, number: int) -> None:
        """Close the connections of a kernel, and cancel its calls."""
        held = self._kernels.pop(number, None)
        if held is not None and self._process.running:
            self._left[number] = held[1]
            self._process.send({"gone": number})

    def cut(self, number: int) -> None:
        """Cancel the calls of a kernel, as it was interrupted."""
        self._process.send({"cut": number})

    def begin_cell(self, number: int) -> None:
        """Note that a cell begins in a kernel, which has a budget of calls of its own."""
        self._process.send({"cell": number})

    def decide(self, call: int, answer: str, why: str = "") -> None:
        """Report whether a call may run: `once`, `always` or `no`, for which there is a reason."""
        self._process.send({"verdict": call, "answer": answer, "why": why})

    async def aclose(self) -> None:
        """End the gateway, and with it the programs of its servers."""
        await self._process.aclose()

    def _on_start(self) -> None:
        self._process.send(self._first)
        for message, _ in list(self._kernels.values()):
            self._process.send(message)

    def _on_message(self, message: dict[str, Any], fds: list[int]) -> None:
        linux.close_all(fds)
        if "said" in message:
            logger.warning("tool server %s: %s", message["said"], one_line(str(message["text"])))
            return
        number = int(message["kernel"])
        if "left" in message:
            self._left.pop(number, None)
            return
        held = self._kernels.get(number)
        caller = self._left.get(number) if held is None else held[1]
        if caller is None:
            return
        if "ends" not in message:
            tool, digest = str(message["tool"]), str(message["hash"])
        if "asks" in message:
            caller.asks(int(message["asks"]), tool, digest, str(message["shown"]))
        elif "begins" in message:
            caller.begins(int(message["begins"]), tool, digest)
        elif "ends" in message:
            facts = {name: message[name] for name in ("end", "seconds", "bytes")}
            caller.ends(int(message["ends"]), facts)

    def _on_end(self, _why: str) -> None:
        left, self._left = self._left, {}
        for caller in [*(each for _, each in self._kernels.values()), *left.values()]:
            caller.lost()
