"""Gaining rights."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import struct

from tests.escape.landlock_attacks.toolkit import (
    World,
    attack,
    call,
    content,
    libc,
    outcome_of_child,
)

GROUP = "privileges"


@attack(GROUP, works_unconfined=False)
def become_root(world: World) -> bool:
    os.setuid(0)
    return True


@attack(GROUP, works_unconfined=False)
def join_the_root_group(world: World) -> bool:
    os.setgroups([0])
    return True


@attack(GROUP, works_unconfined=False)
def gain_capabilities(world: World) -> bool:
    every = struct.pack("III", 0xFFFFFFFF, 0xFFFFFFFF, 0) * 2
    return call(126, struct.pack("Ii", 0x20080522, 0), every) == 0


@attack(GROUP, works_unconfined=False)  # set-up programs such as bwrap forbid it already
def gain_privileges_by_executing(world: World) -> bool:
    return int(libc.prctl(39, 0, 0, 0, 0)) == 0


@attack(GROUP, works_unconfined=False)
def make_a_user_namespace(world: World) -> bool:
    return call(272, 0x10000000) == 0


@attack(GROUP, works_unconfined=False)
def clone_into_a_user_namespace(world: World) -> bool:
    child = call(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return True


@attack(GROUP, works_unconfined=False)
def join_the_namespace_of_a_process(world: World) -> bool:
    return call(308, os.pidfd_open(world["victim"]), 0x20000) == 0


@attack(GROUP, works_unconfined=False)
def mount_a_file_system(world: World) -> bool:
    return call(165, b"none", world["workspace"].encode(), b"tmpfs", 0, 0) == 0


@attack(GROUP, works_unconfined=False)
def open_a_file_system(world: World) -> bool:
    return call(430, b"tmpfs", 0) >= 0


@attack(GROUP, works_unconfined=False)
def clone_a_mount(world: World) -> bool:
    return call(428, -100, b"/", 1) >= 0


@attack(GROUP, works_unconfined=False)
def change_the_root(world: World) -> bool:
    os.chroot(world["workspace"])
    return True


@attack(GROUP, works_unconfined=False)
def load_a_program_into_the_kernel(world: World) -> bool:
    return call(321, 0, ctypes.create_string_buffer(128), 128) >= 0


@attack(GROUP, works_unconfined=False)
def handle_page_faults(world: World) -> bool:
    return call(323, 0) >= 0


@attack(GROUP)
def handle_own_page_faults(world: World) -> bool:
    return call(323, 1) >= 0


@attack(GROUP, works_unconfined=False)
def measure_the_machine(world: World) -> bool:
    return call(298, ctypes.create_string_buffer(128), -1, 0, -1, 0) >= 0


@attack(GROUP)
def keep_a_key(world: World) -> bool:
    return call(248, b"user", b"note", b"x", 1, -4) > 0


@attack(GROUP, works_unconfined=False)
def rename_the_host(world: World) -> bool:
    return call(170, b"attacked", 8) == 0


@attack(GROUP, works_unconfined=False)
def read_the_log_of_the_kernel(world: World) -> bool:
    return call(103, 3, ctypes.create_string_buffer(100), 100) >= 0


@attack(GROUP)
def switch_address_randomisation_off(world: World) -> bool:
    return call(135, 0x0040000) >= 0


@attack(GROUP, works_unconfined=False)
def call_with_the_x32_numbers(world: World) -> bool:
    return outcome_of_child(lambda: call(0x40000000 | 39))


@attack(GROUP)
def widen_the_rules_with_new_ones(world: World) -> bool:
    fd = call(444, struct.pack("QQQ", 4, 0, 0), 24, 0)
    rule = struct.pack("=Qi", 4, os.open("/", os.O_PATH))
    call(445, fd, 1, rule, 0)
    libc.prctl(38, 1, 0, 0, 0)
    call(446, fd, 0)
    return b"secret" in content(world["secret"])


@attack(GROUP, works_unconfined=False)
def raise_a_limit(world: World) -> bool:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard + 1))
    return True


@attack(GROUP, works_unconfined=False)
def push_input_into_a_terminal(world: World) -> bool:
    fcntl.ioctl(0, 0x5412, b"x")
    return True
