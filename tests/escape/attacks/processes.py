"""Touching other processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.escape.attacks.table import Target, attack, refused, syscall

PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@attack("anyone")
def see_a_process_of_the_host(target: Target) -> bool:
    return Path(f"/proc/{target.pid}").exists()


@attack("anyone")
def signal_a_process_of_the_host(target: Target) -> bool:
    os.kill(target.pid, 0)
    return True


@attack("anyone")
def hold_a_process_of_the_host(target: Target) -> bool:
    os.close(os.pidfd_open(target.pid))
    return True


@attack("anyone")
def read_memory_limits_of_a_host_process(target: Target) -> bool:
    import resource

    return bool(resource.prlimit(target.pid, resource.RLIMIT_NOFILE))


@attack()
def end_the_first_process_of_the_sandbox(_: Target) -> bool:
    os.kill(1, signal.SIGKILL)
    time.sleep(0.05)
    return not Path("/proc/1").exists()


@attack()
def look_into_the_first_process_of_the_sandbox(_: Target) -> list[str]:
    """The starter of the kernel has the same user unless the server is root."""
    found = []
    files = ("mem", "maps", "environ", "auxv", "io", "syscall", "pagemap", "task/1/mem")
    for name in (*files, "fd", "map_files", "root", "exe", "cwd", "ns/mnt"):
        path = Path("/proc/1", name)
        try:
            if name in files:
                with path.open("rb", buffering=0) as file:
                    if not name.endswith("mem"):  # nothing is mapped at 0
                        file.read(8)
            elif name in ("fd", "map_files"):
                next(path.iterdir())
            else:
                path.readlink()
        except (OSError, StopIteration):
            continue
        found.append(name)
    return found


@attack()
def read_a_mount_table_that_is_not_ones_own(_: Target) -> list[str]:
    own = Path("/proc/self/mountinfo").read_text()
    others = Path("/proc").glob("[0-9]*/mountinfo")
    return [str(table) for table in others if table.read_text() != own]


@attack("maybe")
def trace_a_child(target: Target) -> bool:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=-1) as child:
        try:
            syscall(target, "ptrace", PTRACE_ATTACH, child.pid, 0, 0)
            os.waitpid(child.pid, os.WUNTRACED)
            syscall(target, "ptrace", PTRACE_DETACH, child.pid, 0, 0)
            return True
        finally:
            child.kill()


@attack()
def be_traced_by_the_parent(target: Target) -> bool:
    return syscall(target, "ptrace", 0, 0, 0, 0) == 0


@attack("anyone")
def read_the_memory_of_another_process(target: Target) -> bool:
    secret = ctypes.create_string_buffer(target.marker.encode())
    taken = ctypes.create_string_buffer(len(target.marker))
    vector = ctypes.c_void_p * 2
    here = vector(ctypes.addressof(taken), len(target.marker))
    there = vector(ctypes.addressof(secret), len(target.marker))
    syscall(
        target,
        "process_vm_readv",
        *(os.getpid(), ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0),
    )
    return taken.raw.decode() == target.marker


@attack()
def write_the_memory_of_the_first_process(_: Target) -> bool:
    with open("/proc/1/mem", "r+b"):
        return True


@attack()
def take_a_descriptor_of_another_process(target: Target) -> bool:
    pidfd = os.pidfd_open(os.getppid())
    return syscall(target, "pidfd_getfd", pidfd, 0, 0) >= 0


@attack("maybe")
def compare_kernel_objects(target: Target) -> bool:
    return syscall(target, "kcmp", os.getpid(), os.getpid(), 0, 0, 0) >= 0


@attack()
def advise_on_foreign_memory(target: Target) -> bool:
    return refused(target, "process_madvise", -1, 0, 0, 0, 0)


@attack("anyone")
def share_memory_with_the_host(target: Target) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(target.shared_memory, None, 0o10000)  # SHM_RDONLY
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shmat")
    return ctypes.string_at(address, len(target.marker)).decode() == target.marker


@attack()
def push_input_into_the_terminal(_: Target) -> bool:
    import fcntl
    import pty

    _controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, 0x5412, b"x")
    return True


@attack()
def paste_on_the_console(_: Target) -> bool:
    import fcntl
    import pty

    _controller, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, 0x541C, b"\x03")
    except PermissionError:
        return False
    return True


@attack()
def load_a_line_discipline(_: Target) -> bool:
    import fcntl
    import pty

    _controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, 0x5423, (21).to_bytes(4, "little"))  # N_GSM0710
    return True


@attack()
def take_the_servers_terminal(_: Target) -> bool:
    os.close(os.open("/dev/tty", os.O_RDWR))
    return True


@attack()
def run_at_real_time_priority(_: Target) -> bool:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return True


@attack()
def be_nicer_than_allowed(_: Target) -> bool:
    return os.nice(-5) < 0
