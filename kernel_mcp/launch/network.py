"""Network access of kernels: listening sockets in the sandbox, one proxy process outside.

The sockets are made in the kernel's own network namespace, before it runs any code of a session.
They are passed to the proxy, which recognises the kernel by them. No process in the sandbox keeps
one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import ConfigError, InputError, LaunchError
from kernel_mcp.launch.base import OnRecord
from kernel_mcp.launch.proxy_client import ProxyClient, fits
from kernel_mcp.linux.commands import output_of
from kernel_mcp.linux.process import bare_program
from kernel_mcp.network.rules import HostRule, Rules, literal
from kernel_mcp.network.secrets import Vault
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Sandbox

PORT = 3128
"""Port of the proxy on 127.0.0.1 in a kernel: the usual port of web proxies."""
_TLS = (443,)
_HOW = "by the proxy that HTTP_PROXY and HTTPS_PROXY name; no private address is reached by name"
_OWN = "127.0.0.1"
_FIRST_NAMED = 2
"""Lowest N of the addresses 127.0.0.N that are assigned to named hosts."""
_NOT_PROXIED = "localhost,127.0.0.1,::1"
_SO_NETNS_COOKIE = 71
"""<asm-generic/socket.h> of Linux 5.14."""
_COOKIE = struct.Struct("=Q")

logger = logging.getLogger(__name__)


def granted_network(
    settings: Settings, sandbox: Sandbox, folder: Path, on_record: OnRecord = lambda _record: None
) -> Network:
    """Return the network access that the operator grants by `settings`.

    `folder` belongs to the server; its files are shown to kernels. Raises ConfigError for invalid
    rules, and for a sandbox without a network of its own.
    """
    try:
        rules = Rules.parse(settings.network)
    except ValueError as reason:
        raise ConfigError(f"--network: {reason}") from None
    try:
        hosts = dict.fromkeys(HostRule.parse(each.host).host for each in settings.secrets)
    except ValueError as reason:
        raise ConfigError(f"--secret: {reason}") from None
    if hosts and sandbox.name == "none":
        raise ConfigError(
            "--secret: without a sandbox (--sandbox none) code could read it all the same. Use "
            "--sandbox bwrap or container, or --env where code may know the value."
        )
    missing = [host for host in hosts if rules.rule_for(host, *_TLS) is None]
    rules = Rules((*rules.rules, *(HostRule(host, _TLS) for host in missing)))
    if rules and sandbox.name == "landlock":
        raise ConfigError(
            "--network, --secret: the landlock sandbox has no network of its own to open a door "
            "in. Use --sandbox bwrap or container, or leave them out."
        )
    if rules and sandbox.name == "none":
        logger.warning("--network has no effect with --sandbox none: code may connect anywhere")
        return Network()
    vault = Vault(settings.secrets, folder, os.environ)
    if not fits(vault):
        raise ConfigError(
            "--secret: all values together have some 60 KB at most; name fewer of them"
        )
    return Network(rules, vault=vault, sandbox=sandbox, on_record=on_record)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address that a socket listens on in every kernel.

    `entry` is the host and port to which its connections are forwarded, None for the proxy.
    """

    address: str
    port: int
    entry: HostRule | None = None


def listen_addresses(rules: Rules) -> tuple[tuple[ListenAddress, ...], tuple[tuple[str, str], ...]]:
    """Return (listening addresses for `rules`, the proxy's first; pairs of address and name).

    The pairs are for /etc/hosts. A rule for an IPv4 address listens on that very address. A rule
    for an IPv6 address has no listener: only the proxy reaches that host.
    """
    exact = [(each, literal(each.host)) for each in rules.exact]
    own = {str(address): each for each, address in exact if address is not None}
    free = (f"127.0.0.{number}" for number in itertools.count(_FIRST_NAMED))
    addresses: dict[str, str] = {}
    named: list[ListenAddress] = []
    for entry, address in exact:
        if address is None:
            if entry.host not in addresses:
                addresses[entry.host] = next(each for each in free if each not in own)
            named.append(ListenAddress(addresses[entry.host], entry.ports[0], entry))
        elif address.version == 4:
            named.append(ListenAddress(str(address), entry.ports[0], entry))
    taken = {each.port for each in named if each.address == _OWN}
    port = next(each for each in itertools.count(PORT) if each not in taken)
    hosts = tuple((address, name) for name, address in addresses.items())
    return (ListenAddress(_OWN, port), *named), hosts


class Network:
    """The network rules of a server, and the proxy that connects on behalf of its sessions."""

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        vault: Vault | None = None,
        sandbox: Sandbox | None = None,
        on_record: OnRecord = lambda _record: None,
    ) -> None:
        """The proxy runs under a user id of `sandbox`, if the sandbox assigns user ids.

        `on_record` is called with records that belong to no session.
        """
        self.vault = vault or Vault()
        self.rules = rules or Rules()
        self.addresses: tuple[ListenAddress, ...] = ()
        self.hosts: tuple[tuple[str, str], ...] = ()
        if self.rules:
            self.addresses, self.hosts = listen_addresses(self.rules)
        self.remark: Callable[[str], None] = lambda _text: None
        """Called with a text that the next answer of every session includes."""
        self.proxy = ProxyClient(self.vault, sandbox, on_record, lambda text: self.remark(text))

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of kernels: the proxy's address, and the variables of secrets."""
        if not self:
            return {}
        proxy = f"http://{_OWN}:{self.addresses[0].port}"
        names = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy)
        names["NO_PROXY"] = _NOT_PROXIED
        both = {**names, **{name.lower(): value for name, value in names.items()}}
        return {**both, **self.vault.variables}

    def rules_for(self, wanted: tuple[str, ...] | None) -> Rules:
        """Return the rules of a session that requests the hosts `wanted`; None requests all.

        Raises InputError if the operator does not grant all of them.
        """
        if wanted is None:
            return self.rules
        try:
            return self.rules.narrowed(wanted)
        except ValueError as reason:
            text = f"ask for hosts of {self.rules}, or leave it out"
            if not self:
                text = (
                    "the operator has opened no network: leave it out, or have the server started "
                    f"with --network {','.join(wanted)}"
                )
            raise InputError(f"network: {reason}; {text}.") from None

    def words(self, wanted: tuple[str, ...] | None) -> str:
        """Return a text about the hosts that a session may connect to; "none" without network."""
        rules = self.rules_for(wanted)
        if not rules:
            return "none"
        down = "; its proxy is down, and another is started" if self.proxy.down else ""
        named = [f"{name} is {address} in it" for address, name in self.hosts]
        named += self.vault.descriptions(lambda host: rules.rule_for(host, *_TLS) is not None)
        return "; ".join([f"{rules} ({_HOW})", *named]) + down

    async def open(self) -> None:
        """Start the proxy and wait for its certificate authority, if there are secrets.

        Raises LaunchError.
        """
        if self.vault:
            await self.proxy.certify()

    def access(self) -> NetworkAccess:
        """Return the network access of a new kernel; start the proxy if it does not run."""
        if self:
            self.proxy.start()
        return NetworkAccess(self)

    async def aclose(self) -> None:
        """End the proxy process."""
        await self.proxy.aclose()


class NetworkAccess:
    """The network access of one kernel; without network rules it has no socket."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._sockets: list[socket.socket] = []
        self._listeners: list[int] = []
        self._receiver: socket.socket | None = None

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Addresses and ports to listen on in the kernel's network namespace."""
        return [(each.address, each.port) for each in self._network.addresses]

    def guest(self) -> int:
        """Return a descriptor to pass into the sandbox, over which its listening sockets are sent.

        The caller closes it.
        """
        self._receiver, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver.setblocking(False)
        return theirs.detach()

    def receive(self) -> None:
        """Receive the listening sockets of a kernel that is ready.

        Does nothing if no descriptor was passed into the sandbox. Raises LaunchError if sockets are
        missing, or do not have the expected type, address and namespace.
        """
        if self._receiver is None:
            return
        with self._receiver as ours:
            try:
                most = len(self.addresses) + 1
                _, fds, _, _ = socket.recv_fds(ours, 64, most, socket.MSG_CMSG_CLOEXEC)
            except OSError as reason:
                raise LaunchError(f"the kernel has no way to the network: {reason}") from reason
        self._sockets = [socket.socket(fileno=fd) for fd in fds]
        if not self._valid():
            raise LaunchError("the kernel's way to the network is not what it has to be")

    def _valid(self) -> bool:
        outside = _namespace_of(None)
        return len(self._sockets) == len(self.addresses) and all(
            each.family == socket.AF_INET
            and each.type == socket.SOCK_STREAM
            and each.getsockname() == place
            and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and (outside is None or _namespace_of(each) != outside)
            for each, place in zip(self._sockets, self.addresses, strict=True)
        )

    async def establish(self, pid: int, pidfd: int) -> None:
        """Obtain the listening sockets of a kernel that is ready.

        A forked kernel has sent them; for a cold one they are made from outside. Raises
        LaunchError, ProcessLookupError, OSError.
        """
        if self._receiver is None and self.addresses:
            await self._create_in(pid, pidfd)
        self.receive()

    async def _create_in(self, pid: int, pidfd: int) -> None:
        """Run a program that makes the listening sockets in the network namespace of a process.

        Raises LaunchError, ProcessLookupError, OSError.
        """
        with ExitStack() as held:
            guest = self.guest()
            held.callback(os.close, guest)
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, namespace)
            signal.pidfd_send_signal(pidfd, 0)  # raises if the pid was reused
            words = [str(namespace), str(guest), json.dumps(self.addresses)]
            argv = bare_program("kernel_mcp.network.namespace_listeners", *words)
            env = {"LANG": "C.UTF-8"}  # none of the server's: it enters the kernel's namespace
            done = await output_of(argv, env=env, pass_fds=(namespace, guest))
        if done.code != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise LaunchError(
                "the kernel has no way to the network, as its network namespace cannot be entered "
                f"({said[0] if said else f'exit code {done.code}'}). Start the server "
                "without --network, or as the user that the engine of containers runs as."
            )

    def open(self, wanted: tuple[str, ...] | None, on_record: OnRecord) -> None:
        """Grant a session network access to the hosts `wanted`; None means all that are permitted.

        `on_record` is called with a record of each connection. A second call does nothing.
        """
        made, self._sockets = self._sockets, []
        if not made:
            return
        rules, session = self._network.rules_for(wanted), self._network.proxy.number()
        for place, sock in zip(self._network.addresses, made, strict=True):
            entry = place.entry
            if entry is None or entry in rules.rules:
                number = self._network.proxy.add_listener(session, sock, rules, entry, on_record)
                self._listeners.append(number)
            else:
                sock.close()

    def close(self) -> None:
        """Revoke the access: close all sockets, and cut connections through the proxy."""
        if self._receiver is not None:
            self._receiver.close()
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        while self._listeners:
            self._network.proxy.remove_listener(self._listeners.pop())


def _namespace_of(sock: socket.socket | None) -> int | None:
    """Return the cookie of a socket's network namespace, None before Linux 5.14.

    Without a socket: that of the server's own namespace.
    """
    with ExitStack() as held:
        asked = sock or held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with suppress(OSError):
            cookie = asked.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, _COOKIE.size)
            return int(_COOKIE.unpack(cookie)[0])
    return None
