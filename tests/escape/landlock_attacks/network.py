"""Reaching anything outside."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

from tests.escape.landlock_attacks.toolkit import World, attack, call

GROUP = "network"


@attack(GROUP)
def connect_over_tcp(world: World) -> bool:
    socket.create_connection(("127.0.0.1", world["tcp"]), 2).close()
    return True


@attack(GROUP)
def connect_over_tcp_with_the_first_packet(world: World) -> bool:
    with socket.socket() as client:
        return client.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", world["tcp"])) == 1


@attack(GROUP)
def connect_over_multipath_tcp(world: World) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262) as client:
        client.connect(("127.0.0.1", world["tcp"]))
        return True


@attack(GROUP)
def send_a_datagram(world: World) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        return client.sendto(b"x", ("127.0.0.1", world["udp"])) == 1


@attack(GROUP)
def send_a_datagram_over_ipv6(world: World) -> bool:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client:
        return client.sendto(b"x", ("::ffff:127.0.0.1", world["udp"])) == 1


@attack(GROUP)
def listen_on_tcp(world: World) -> bool:
    socket.create_server(("127.0.0.1", 0)).close()
    return True


@attack(GROUP, works_unconfined=False)
def open_a_raw_socket(world: World) -> bool:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
    return True


@attack(GROUP, works_unconfined=False)
def ping(world: World) -> bool:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)
    return True


@attack(GROUP, works_unconfined=False)
def sniff_packets(world: World) -> bool:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    return True


@attack(GROUP)
def ask_netlink(world: World) -> bool:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    return True


@attack(GROUP, works_unconfined=False)
def reach_the_hypervisor(world: World) -> bool:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    return True


@attack(GROUP, works_unconfined=False)
def use_the_crypto_interface(world: World) -> bool:
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
    return True


@attack(GROUP)
def connect_to_a_unix_socket(world: World) -> bool:
    socket.socket(socket.AF_UNIX).connect(world["stream"])
    return True


@attack(GROUP)
def connect_to_an_abstract_unix_socket(world: World) -> bool:
    socket.socket(socket.AF_UNIX).connect("\0" + world["abstract"])
    return True


@attack(GROUP)
def send_to_a_unix_datagram_socket(world: World) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        return client.sendto(b"x", world["datagram"]) == 1


@attack(GROUP)
def send_elsewhere_from_a_datagram_pair(world: World) -> bool:
    one, _other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return one.sendto(b"x", world["datagram"]) == 1


@attack(GROUP)
def ask_a_unix_socket_for_interfaces(world: World) -> bool:
    with socket.socket(socket.AF_UNIX) as any_socket:
        buffer = ctypes.create_string_buffer(4096)
        request = struct.pack("iP", 4096, ctypes.addressof(buffer))
        return int(struct.unpack("iP", fcntl.ioctl(any_socket, 0x8912, request))[0]) > 0


@attack(GROUP, works_unconfined=False)
def use_io_uring(world: World) -> bool:
    return call(425, 4, ctypes.create_string_buffer(120)) >= 0
