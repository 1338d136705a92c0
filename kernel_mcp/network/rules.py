"""Rules for network access: the grammar of `--network`, and a table of non-public addresses.

    none                nothing
    *                   every name with public addresses, on ports 80 and 443
    HOST, *.HOST        that name; every name below it, of any depth: ports 80 and 443
    *.HOST:PORT         the same on one port
    HOST:PORT           exactly that: any protocol, with a listener of its own in the sandbox
    ADDRESS[:PORT]      an address as code names it, [ADDRESS]:PORT for IPv6; with a port it may
                        be a private one, which no name is ever followed to

`*`, HOST and *.HOST permit HTTP, and TLS whose server name is the host. The standard library's
`is_global` is not used: depending on its version, it accepts addresses that are not public.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from kernel_mcp.records import dataclass

WEB_PORTS = (80, 443)
MOST_ENTRIES = 200
MOST_EXACT = 50
"""Entries HOST:PORT. Each needs a listener and a loopback address of the sandbox."""
_LONGEST_NAME, _LONGEST_LABEL = 253, 63
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"

_NOT_PUBLIC = tuple(
    (ipaddress.ip_network(block), words)
    for block, words in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a provider"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "metadata of a cloud"),
        ("169.254.0.0/16", "link-local, metadata of clouds"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved, metadata of a cloud"),
        ("192.0.2.0/24", "for documentation"),
        ("192.31.196.0/24", "reserved"),
        ("192.52.193.0/24", "reserved"),
        ("192.88.99.0/24", "of 6to4 relays"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "reserved"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "this host"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "an IPv4 address in IPv6 form"),
        ("64:ff9b::/96", "an IPv4 address behind NAT64"),
        ("64:ff9b:1::/48", "an IPv4 address behind NAT64"),
        ("2001::/23", "Teredo, benchmarks or reserved"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "an IPv4 address behind 6to4"),
        ("3fff::/20", "for documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
    )
)
"""Non-public blocks: IANA's special-purpose registries, and metadata services of clouds."""
OWN = "this machine's own"
NAMEABLE = frozenset({"private", "loopback", "shared by a provider", "for benchmarks", OWN})
"""Kinds of address that an operator may permit by address and port. Metadata is never one."""
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Words 5 and 6 of addresses that hold an IPv4 address (RFC 5214, 6.1)."""


def why_not_public(address: Address) -> str:
    """Return the kind of a non-public address, as `private`; empty for a public one."""
    for block, words in _NOT_PUBLIC:
        if address.version == block.version and address in block:
            return words
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "an address with a zone"
        if address not in _GLOBAL_V6:
            return "reserved"
        if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
            return "an IPv4 address behind ISATAP"
    return ""


def is_own(address: Address) -> bool:
    """Return True if the address belongs to this machine.

    Linux then chooses the address itself as the source of a connection to it. Nothing is sent.
    Raises OSError if there is no route to it.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), 9))
        return ipaddress.ip_address(probe.getsockname()[0]) == address


class BadHost(ValueError):
    """A text is not a host; the message says why."""


def literal(host: str) -> Address | None:
    """Return the IP address that `host` spells, or None if it is a name.

    Brackets of IPv6 have to be removed before. Raises BadHost for other spellings of an address,
    as `2130706433`, `0x7f.1` and `0177.1`, which getaddrinfo(3) would accept.
    """
    if ":" in host:
        try:
            found: Address = ipaddress.IPv6Address(host)
        except ValueError:
            raise BadHost(f"{host[:80]!r} is no IPv6 address") from None
        if "%" in host:
            raise BadHost("an address with a zone is of one link only")
        return found
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        try:
            return ipaddress.IPv4Address(host)
        except ValueError:
            raise BadHost(
                f"{host[:80]!r} is no IPv4 address as it is written here: four numbers from 0 to "
                "255 without leading zeros"
            ) from None
    return None


def plain_host(text: str) -> str:
    """Return an ASCII host in normal form: lower case, no dot at the end. Raises BadHost."""
    host = text.lower()
    address = literal(host)
    if address is not None:
        return str(address)
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > _LONGEST_NAME or not all(
        _LABEL.fullmatch(label) and len(label) <= _LONGEST_LABEL for label in labels
    ):
        raise BadHost(f"{text[:80]!r} is no name of a host")
    return host


def split_port(text: str) -> tuple[str, int | None]:
    """Return host and port of `HOST[:PORT]` or `[IPv6][:PORT]`; the port is None if not given.

    The host is not checked. Raises BadHost if the form is wrong or the port out of range.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise BadHost(f"{text[:80]!r} is no address in brackets")
        port, colon = rest[1:], rest[:1]
    else:
        host, colon, port = text.partition(":")
        if ":" in port:
            raise BadHost(f"{text[:80]!r}: an IPv6 address is written in brackets")
    if not colon:
        return host, None
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise BadHost(f"{text[:80]!r} has no port from 1 to 65535 after its colon")
    return host, int(port)


def join_port(host: str, port: int | None) -> str:
    """Return `HOST[:PORT]`, with IPv6 in brackets: the inverse of `split_port`."""
    host = f"[{host}]" if ":" in host else host
    return host if port is None else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class HostRule:
    """One permission of `--network`.

    host   a name, an address, `*`, or `*.` before a name
    exact  True for HOST:PORT, where any protocol is permitted
    """

    host: str
    ports: tuple[int, ...] = WEB_PORTS
    exact: bool = False

    def __str__(self) -> str:
        return join_port(self.host, None if self.ports == WEB_PORTS else self.ports[0])

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Parse an entry of `--network`. Raises ValueError."""
        if "/" in text:
            raise BadHost(
                f"{text[:80]!r} is no name of a host or one with a port: name the host alone, as "
                "api.example.com"
            )
        host, port = split_port(text.strip())
        if host == "*":
            if port is not None:
                raise BadHost(f"{text!r}: * is for ports 80 and 443; name a host with a port")
            return cls("*")
        below = host.startswith("*.")
        host = _from_people(host[2:] if below else host)
        address = literal(host)
        if below and address is not None:
            raise BadHost(f"{text!r}: there is nothing below an address")
        if address is not None:
            _check_named(address, port)
        elif _is_local(host):
            raise BadHost(
                f"{text!r}: a name is never followed to this machine; name the address, as "
                "127.0.0.1:PORT"
            )
        ports = WEB_PORTS if port is None else (port,)
        return cls(f"*.{host}" if below else host, ports, port is not None and not below)

    def matches(self, host: str) -> bool:
        """Return True if the rule permits a host, or every host of a pattern (`*`, `*.NAME`)."""
        if self.host == "*":
            return literal(host) is None if not host.startswith("*") else True
        if self.host.startswith("*."):
            name = host.removeprefix("*")
            return name.endswith(self.host[1:]) and (name != self.host[1:] or host == self.host)
        return host == self.host


def _from_people(host: str) -> str:
    """Return a host in normal form, encoded by IDNA if it is not ASCII. Raises BadHost."""
    if not host.isascii():
        import idna  # such names are rare

        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except idna.IDNAError as reason:
            raise BadHost(f"{host[:80]!r} is no name of a host: {reason}") from None
    return plain_host(host)


def _is_local(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost")


def why_never(host: str) -> str:
    """Return why no rule can permit `host`; empty if one can."""
    address = literal(host)
    reason = "" if address is None else why_not_public(address)
    never = f"{address} is not to be reached by any rule: it is {reason}"
    return never if reason and reason not in NAMEABLE else ""


def _check_named(address: Address, port: int | None) -> None:
    if never := why_never(str(address)):
        raise BadHost(never)
    reason = why_not_public(address)
    if reason and port is None:
        raise BadHost(f"{address} is no public address ({reason}): name its port, too")


@dataclass(frozen=True, slots=True)
class Rules:
    """The network access of a session or server. Without entries there is none."""

    rules: tuple[HostRule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __str__(self) -> str:
        """Return the entries as `--network` spells them; `none` without entries."""
        return ", ".join(map(str, self.rules)) or "none"

    @classmethod
    def parse(cls, words: Iterable[str]) -> Rules:
        """Parse comma-separated lists, as `--network` takes them. Raises ValueError."""
        texts = [text.strip() for word in words for text in word.split(",") if text.strip()]
        if "none" in texts:
            if len(set(texts)) > 1:
                raise ValueError("none stands alone")
            return cls()
        found = tuple(dict.fromkeys(map(HostRule.parse, texts)))
        if len(found) > MOST_ENTRIES or sum(each.exact for each in found) > MOST_EXACT:
            raise ValueError(
                f"there may be {MOST_ENTRIES} entries, and {MOST_EXACT} of them with a port"
            )
        return cls(found)

    @property
    def exact(self) -> tuple[HostRule, ...]:
        """Entries HOST:PORT, each of which has its own listener."""
        return tuple(each for each in self.rules if each.exact)

    def narrowed(self, words: Iterable[str]) -> Rules:
        """Return the rules that a session asks for. Raises ValueError if one is not permitted."""
        found: dict[HostRule, None] = {}
        for asked in Rules.parse(words).rules:
            within = [own for own in self.rules if own.matches(asked.host)]
            if exact := [own for own in within if own.exact and set(asked.ports) >= set(own.ports)]:
                found |= dict.fromkeys(exact)
                within = [own for own in within if own not in exact]
            ports = {port for own in within for port in own.ports}.intersection(asked.ports)
            missing = set(asked.ports) - ports - {port for own in exact for port in own.ports}
            if missing and (asked.ports != WEB_PORTS or len(missing) == len(WEB_PORTS)):
                raise ValueError(f"the operator's --network ({self}) does not permit {asked}")
            if ports:
                found[HostRule(asked.host, tuple(sorted(ports)))] = None
        return Rules(tuple(found))

    def rule_for(self, host: str, port: int) -> HostRule | None:
        """Return the rule that permits host and port, preferably an exact one; None without one.

        `host` is in the form of `plain_host`.
        """
        found = [each for each in self.rules if port in each.ports and each.matches(host)]
        return next((each for each in found if each.exact), found[0] if found else None)

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON values, for the proxy."""
        entries = [[each.host, list(each.ports), each.exact] for each in self.rules]
        return {"entries": entries}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        """Return the rules from the output of `to_json`."""
        return cls(
            tuple(HostRule(host, tuple(ports), exact) for host, ports, exact in data["entries"])
        )
