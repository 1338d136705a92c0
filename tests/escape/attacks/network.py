"""Reaching anything outside."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable

from tests.escape.attacks.table import Target, attack, syscall


def _greeting(family: int, address: object) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(address)  # type: ignore[arg-type]
        return client.recv(256).decode()


@attack("anyone")
def connect_to_a_server_on_the_hosts_loopback(target: Target) -> bool:
    return target.marker in _greeting(socket.AF_INET, tuple(target.tcp))


@attack("anyone")
def connect_to_a_server_on_the_hosts_own_address(target: Target) -> bool:
    return target.marker in _greeting(socket.AF_INET, tuple(target.tcp_outside))


@attack("anyone")
def ask_a_datagram_server(target: Target) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(1)
        client.sendto(b"hello", tuple(target.udp))
        return target.marker in client.recv(256).decode()


@attack("anyone")
def connect_to_an_abstract_socket(target: Target) -> bool:
    return target.marker in _greeting(socket.AF_UNIX, f"\0{target.abstract}")


@attack("anyone")
def connect_to_a_socket_file(target: Target) -> bool:
    return target.marker in _greeting(socket.AF_UNIX, target.unix)


@attack()
def connect_to_the_internet(_: Target) -> bool:
    with socket.socket(socket.AF_INET) as client:
        client.settimeout(1)
        return client.connect_ex(("1.1.1.1", 443)) == 0


@attack()
def connect_over_ipv6(_: Target) -> bool:
    with socket.socket(socket.AF_INET6) as client:
        client.settimeout(1)
        return client.connect_ex(("2606:4700:4700::1111", 443)) == 0


@attack()
def ask_the_cloud_for_credentials(_: Target) -> bool:
    with socket.socket(socket.AF_INET) as client:
        client.settimeout(1)
        return client.connect_ex(("169.254.169.254", 80)) == 0


@attack()
def resolve_a_name(_: Target) -> bool:
    return bool(socket.getaddrinfo("example.com", 80))


@attack("maybe")
def see_the_hosts_interfaces(_: Target) -> bool:
    with open("/proc/net/dev") as file:
        return len(file.readlines()) > 3


@attack("anyone")
def open_a_netlink_socket(_: Target) -> bool:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return True


@attack("maybe")
def open_a_packet_socket(_: Target) -> bool:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    return True


@attack("maybe")
def open_a_raw_socket(_: Target) -> bool:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return True


@attack()
def open_a_virtual_machine_socket(_: Target) -> bool:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return True


@attack()
def open_a_socket_of_the_kernels_cryptography(_: Target) -> bool:
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).close()
    return True


@attack()
def open_a_socket_of_any_other_family(_: Target) -> list[int]:
    opened = []
    for family in range(64):
        if family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
            continue
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                socket.socket(family, kind, 0).close()
            except OSError:
                continue
            opened.append(family)
    return opened


@attack()
def add_a_network_device(_: Target) -> bool:
    os.close(os.open("/dev/net/tun", os.O_RDWR))
    return True


@attack("maybe")
def open_an_internet_socket_of_an_unusual_protocol(_: Target) -> list[str]:
    """Multipath TCP, SCTP, UDP-Lite, ping: much of Linux that nobody needs in an empty network."""
    opened = []
    protocols = {"mptcp": 262, "sctp": 132, "dccp": 33, "udplite": 136, "icmp": 1, "icmp6": 58}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, protocol in protocols.items():
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, 6):
                try:
                    socket.socket(family, kind, protocol).close()
                except OSError:
                    continue
                opened.append(name)
    return opened


@attack("maybe")
def send_urgent_data_over_a_unix_socket(target: Target) -> list[str]:
    """Where Linux had use-after-frees; by every call that takes the flag."""
    sent = []
    ways: dict[str, Callable[[socket.socket], object]] = {
        "send": lambda end: end.send(b"x", socket.MSG_OOB),
        "sendto": lambda end: end.send(b"x", socket.MSG_OOB | socket.MSG_DONTWAIT),
        "sendmsg": lambda end: end.sendmsg([b"x"], (), socket.MSG_OOB),
        "sendmmsg": lambda end: _send_many(target, end),
    }
    for name, way in ways.items():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                way(ours)
            except OSError:
                continue
            sent.append(name)
    return sent


@attack("maybe")
def receive_urgent_data_from_a_unix_socket(_: Target) -> list[str]:
    """Refused by the filter, and not for want of such data."""
    asked = []
    ways: dict[str, Callable[[socket.socket], object]] = {
        "recv": lambda end: end.recv(1, socket.MSG_OOB),
        "recvmsg": lambda end: end.recvmsg(1, 0, socket.MSG_OOB),
    }
    for name, way in ways.items():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                way(ours)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    continue
            asked.append(name)
    return asked


def _send_many(target: Target, end: socket.socket) -> None:
    """sendmmsg(2) of one message of one byte."""
    data = ctypes.create_string_buffer(b"x")
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(data), 1)
    # struct mmsghdr: no name, the vector, no control data, no flags, what was sent
    header = (ctypes.c_size_t * 8)(0, 0, ctypes.addressof(vector), 1, 0, 0, 0, 0)
    syscall(target, "sendmmsg", end.fileno(), ctypes.addressof(header), 1, socket.MSG_OOB)
