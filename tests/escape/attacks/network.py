"""Reaching anything outside."""

from __future__ import annotations

import os
import socket

from tests.escape.attacks.table import Target, attack


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
