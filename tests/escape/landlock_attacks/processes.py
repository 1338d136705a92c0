"""Reaching other processes of the user, and leaving the own group."""

# ruff: noqa: PTH110

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

GROUP = "processes"


@attack(GROUP)
def stop_a_process_of_the_user(world: World) -> bool:
    os.kill(world["victim"], signal.SIGCONT)
    return True


@attack(GROUP)
def signal_a_process_by_handle(world: World) -> bool:
    signal.pidfd_send_signal(os.pidfd_open(world["victim"]), signal.SIGCONT)
    return True


@attack(GROUP)
def learn_about_a_process_by_handle(world: World) -> bool:
    request = bytearray(struct.pack("Q", 1).ljust(64, b"\0"))  # PIDFD_INFO_PID
    fcntl.ioctl(os.pidfd_open(world["victim"]), 0xC040FF0B, request)  # PIDFD_GET_INFO
    return bool(struct.unpack_from("QQI", request)[2] == world["victim"])


@attack(GROUP)
def signal_a_thread(world: World) -> bool:
    return call(234, world["victim"], world["victim"], signal.SIGCONT) == 0


@attack(GROUP)
def queue_a_signal(world: World) -> bool:
    info = struct.pack("iiiiii", signal.SIGCONT, 0, -1, 0, os.getpid(), os.getuid()).ljust(128)
    return call(129, world["victim"], int(signal.SIGCONT), info) == 0


@attack(GROUP)
def signal_a_group(world: World) -> bool:
    os.killpg(world["victim"], signal.SIGCONT)
    return True


@attack(GROUP)
def have_the_kernel_signal_for_input(world: World) -> bool:
    read, write = os.pipe()
    fcntl.fcntl(read, fcntl.F_SETOWN, world["victim"])
    fcntl.fcntl(read, 10, int(signal.SIGUSR1))  # F_SETSIG
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(write, b"x")
    return _appears(world["signalled"])


def _appears(path: str) -> bool:
    """Return True if a file appears within half a second."""
    for _ in range(50):
        if os.path.exists(path):
            return True
        signal.sigtimedwait([], 0.01)
    return False


@attack(GROUP)
def trace_a_process(world: World) -> bool:
    return call(101, 0x4206, world["victim"], 0, 0) == 0  # PTRACE_SEIZE


@attack(GROUP)
def trace_an_own_child(world: World) -> bool:
    return outcome_of_child(lambda: call(101, 0, 0, 0, 0))


@attack(GROUP)
def read_the_memory_of_a_process(world: World) -> bool:
    return bool(content(f"/proc/{world['victim']}/maps"))


@attack(GROUP)
def copy_the_memory_of_a_process(world: World) -> bool:
    buffer = ctypes.create_string_buffer(8)
    local = struct.pack("PN", ctypes.addressof(buffer), 8)
    return call(310, world["victim"], local, 1, struct.pack("PN", world["address"], 8), 1, 0) == 8


@attack(GROUP)
def take_a_descriptor_of_a_process(world: World) -> bool:
    return call(438, os.pidfd_open(world["victim"]), 0, 0) >= 0


@attack(GROUP)
def limit_a_process(world: World) -> bool:
    resource.prlimit(world["victim"], resource.RLIMIT_CORE, (0, 0))
    return True


@attack(GROUP)
def slow_a_process_down(world: World) -> bool:
    os.setpriority(os.PRIO_PROCESS, world["victim"], 19)
    return True


@attack(GROUP)
def slow_all_processes_of_the_user_down(world: World) -> bool:
    os.setpriority(os.PRIO_USER, os.getuid(), 5)
    return os.getpriority(os.PRIO_PROCESS, world["victim"]) >= 5


@attack(GROUP)
def bind_a_process_to_one_processor(world: World) -> bool:
    os.sched_setaffinity(world["victim"], os.sched_getaffinity(0))
    return True


@attack(GROUP)
def change_the_scheduling_of_a_process(world: World) -> bool:
    os.sched_setscheduler(world["victim"], os.SCHED_IDLE, os.sched_param(0))
    return os.sched_getscheduler(world["victim"]) == os.SCHED_IDLE


@attack(GROUP)
def change_the_disk_priority_of_a_process(world: World) -> bool:
    return call(251, 1, world["victim"], 3 << 13) == 0


@attack(GROUP)
def attach_shared_memory_of_the_user(world: World) -> bool:
    return call(30, world["segment"], 0, 0o10000) != -1


@attack(GROUP)
def open_a_message_queue(world: World) -> bool:
    name = f"kernel-mcp-{os.getpid()}".encode()
    opened = call(240, name, os.O_CREAT | os.O_RDWR, 0o600, 0)
    call(241, name)  # mq_unlink: without the sandbox it would stay
    return opened >= 0


@attack(GROUP)
def leave_the_session(world: World) -> bool:
    return outcome_of_child(os.setsid)


@attack(GROUP)
def leave_the_process_group(world: World) -> bool:
    return outcome_of_child(lambda: os.setpgid(0, 0))


@attack(GROUP)
def outlive_the_server(world: World) -> bool:
    return int(libc.prctl(1, 0, 0, 0, 0)) == 0
