"""A proxy in a network of its own, and hosts with public addresses in another beside it.

Run as a program it makes both: `two_networks.py FD CONTROL HOSTS UID` within `unshare --net
--mount`. FD gets the sockets that listen, CONTROL is the proxy's, HOSTS stands for /etc/hosts.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from kernel_mcp.linux.process import bare_program
from kernel_mcp.network.rules import Rules
from kernel_specs import linux
from kernel_specs.template import packets
from tests.conftest import lacking

PROXY_USER = 1_900_065_000
REPOSITORY = Path(__file__).parents[2]

PUBLIC, OTHER, SIX, OWN = "1.2.3.4", "1.2.3.5", "2a00:5ca1:ab1e::4", "1.2.3.1"
PRIVATE, METADATA = "10.9.8.7", "169.254.169.254"
PLACES = [
    *((PUBLIC, 80), (PUBLIC, 443), (PUBLIC, 22), (PUBLIC, 5432), (OTHER, 80), (SIX, 80)),
    *((PRIVATE, 80), (PRIVATE, 443), (METADATA, 80), ("127.0.0.1", 80), (OWN, 80)),
]
"""Listening places; the last two are where the proxy is."""
NAMES = {
    "web.test": [PUBLIC],
    "www.web.test": [PUBLIC],
    "other.test": [OTHER],
    "six.test": [SIX],
    "loop.test": ["127.0.0.1"],
    "loop6.test": ["::1"],
    "mapped.test": ["::ffff:127.0.0.1"],
    "nat.test": ["64:ff9b::7f00:1"],
    "6to4.test": ["2002:7f00:1::1"],
    "inner.test": [PRIVATE],
    "meta.test": [METADATA],
    "own.test": [OWN],
    "mixed.test": [PUBLIC, PRIVATE],
    "unreached.test": ["8.8.4.4"],
}


@dataclass
class Networks:
    """The proxy's control socket and process, and the sockets of hosts by address and port."""

    control: socket.socket
    sockets: dict[tuple[str, int], socket.socket]
    hosts: Path
    pid: int
    _number: int = 0

    def listen(self, rules: str, exact: str | None = None) -> tuple[int, int]:
        """Serve a session with these rules, and return the listener's number and port."""
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
            return self.give(sock, rules, exact), sock.getsockname()[1]

    def give(self, sock: socket.socket, rules: str, exact: str | None = None) -> int:
        """Pass a socket on; the number that it has there."""
        self._number += 1
        told = {"listen": self._number, "rules": Rules.parse([rules]).to_json(), "exact": exact}
        packets.send(self.control, told, [sock.fileno()])
        return self._number

    def close(self, number: int) -> None:
        """Close a listener."""
        packets.send(self.control, {"close": number})

    async def told(self, number: int) -> dict[str, Any]:
        """The next record of a listener; those of others are dropped."""
        while True:
            received = await anyio.to_thread.run_sync(packets.receive, self.control)
            assert received is not None, "the proxy has ended"
            if received[0].get("end", received[0].get("failed")) == number:
                return received[0]

    def untouched(self, *places: tuple[str, int]) -> bool:
        """Return True if nobody has connected there, nor waits to be accepted."""
        for place in places:
            with self.sockets[place].dup() as sock, suppress(BlockingIOError):
                sock.setblocking(False)
                sock.accept()[0].close()
                return False
        return True

    def name(self, host: str, *addresses: str) -> None:
        """Resolve a name to other addresses from now on."""
        write_hosts(self.hosts, {**NAMES, host: list(addresses)})

    def status(self, key: str) -> str:
        """A line of the proxy's /proc/PID/status."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:"))


def write_hosts(path: Path, names: dict[str, list[str]]) -> None:
    """Write a hosts file, in place."""
    rows = [f"{address} {name}\n" for name, found in names.items() for address in found]
    path.write_text("".join(rows))


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Both, as long as they are used."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        lacking("iproute2", "there is no ip or unshare to make networks with")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.NamedTemporaryFile("w") as hosts, ours, control:
        Path(hosts.name).chmod(0o644)
        write_hosts(Path(hosts.name), NAMES)
        root = os.geteuid() == 0
        process = subprocess.Popen(
            [
                *("unshare", "--net", "--mount", *([] if root else ["--user", "--map-root-user"])),
                *(sys.executable, "-m", "tests.integration.two_networks"),
                *map(str, (theirs.fileno(), end.fileno(), hosts.name)),
                str(PROXY_USER if root else -1),
            ],
            pass_fds=(theirs.fileno(), end.fileno()),
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
        )
        theirs.close()
        end.close()
        assert process.stdin is not None
        try:
            for sock in (ours, control):
                sock.settimeout(30)
            sockets: dict[tuple[str, int], socket.socket] = {}
            pid = 0
            while not pid or len(sockets) < len(PLACES):
                received = packets.receive(ours)
                if received is None:
                    lacking("networks", "this user may make no networks of their own")
                message, fds = received
                pid = message.get("pid", pid)
                for (address, port), fd in zip(message.get("places", []), fds, strict=True):
                    sockets[address, port] = socket.socket(fileno=fd)
            ready = packets.receive(control)
            assert ready == ({"ready": True}, [])
            yield Networks(control, sockets, Path(hosts.name), pid)
            for sock in sockets.values():
                sock.close()
        finally:
            control.close()
            process.stdin.close()
            process.wait(30)


def _listeners(places: list[tuple[str, int]]) -> list[socket.socket]:
    made = []
    for address, port in places:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        made.append(socket.create_server((address, port), family=family, backlog=1024))
    return made


def _send(way: socket.socket, places: list[tuple[str, int]]) -> None:
    made = _listeners(places)
    packets.send(way, {"places": places}, [each.fileno() for each in made])
    for each in made:
        each.close()


def _ip(*words: str, of: int = 0) -> None:
    enter = ["nsenter", "--target", str(of), "--net"] if of else []
    subprocess.run([*enter, "ip", *words], check=True)


def main(argv: list[str]) -> None:
    """Make both networks, start the proxy, and stay until the standard input ends."""
    way, control = socket.socket(fileno=int(argv[0])), int(argv[1])
    linux.mount(argv[2], "/etc/hosts", "", linux.MS_BIND)
    entered_read, entered_write = os.pipe()
    made_read, made_write = os.pipe()
    beside = os.fork()
    if beside == 0:
        os.close(made_write)
        linux.unshare(linux.CLONE_NEWNET)
        os.write(entered_write, b"x")
        os.read(made_read, 1)
        _send(way, PLACES[:-2])
        way.close()
        sys.stdin.read()
        os._exit(0)
    os.read(entered_read, 1)
    _ip("link", "add", "name", "near", "type", "veth", "peer", "name", "far")
    _ip("link", "set", "far", "netns", str(beside))
    for device, of, addresses in (
        ("near", 0, [f"{OWN}/24", "2a00:5ca1:ab1e::1/64"]),
        ("far", beside, [f"{PUBLIC}/24", f"{OTHER}/24", f"{SIX}/64", f"{PRIVATE}/32"]),
        ("far", beside, [f"{METADATA}/32"]),
    ):
        for address in addresses:
            _ip(
                "address",
                "add",
                address,
                "dev",
                device,
                *(["nodad"] if ":" in address else []),
                of=of,
            )
        for link in ("lo", device):
            _ip("link", "set", link, "up", of=of)
    for address in (PRIVATE, METADATA):
        _ip("route", "add", address, "dev", "near")
    os.write(made_write, b"x")
    _send(way, PLACES[-2:])
    argv = bare_program("kernel_mcp.network.proxy", str(control), argv[3], packages=True)
    proxy = subprocess.Popen(argv, pass_fds=[control], env={"LANG": "C.UTF-8"})
    os.close(control)
    packets.send(way, {"pid": proxy.pid})
    way.close()
    sys.stdin.read()
    proxy.wait(20)


if __name__ == "__main__":
    main(sys.argv[1:])
