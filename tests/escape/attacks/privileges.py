"""Gaining rights the sandbox has taken."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from tests.escape.attacks.table import Target, attack, refused, syscall

CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID = 1 << 28, 1 << 17, 1 << 30, 1 << 29


def _unshare(target: Target, flags: int) -> bool:
    return syscall(target, "unshare", flags) == 0


@attack()
def become_root(_: Target) -> bool:
    os.setuid(0)
    return os.getuid() == 0


@attack()
def become_another_user(_: Target) -> bool:
    os.setresuid(12, 12, 12)
    return True


@attack()
def join_another_group(_: Target) -> bool:
    os.setgid(0)
    return True


@attack()
def add_groups(_: Target) -> bool:
    os.setgroups([0, 4, 27])
    return True


@attack()
def hold_any_capability(_: Target) -> bool:
    status = Path("/proc/self/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in status if line.startswith("Cap"))


@attack()
def raise_an_ambient_capability(_: Target) -> bool:
    return int(ctypes.CDLL(None).prctl(47, 2, 21, 0, 0)) == 0  # PR_CAP_AMBIENT_RAISE CAP_SYS_ADMIN


@attack()
def take_no_new_privileges_back(_: Target) -> bool:
    libc = ctypes.CDLL(None)
    libc.prctl(38, 0, 0, 0, 0)
    return int(libc.prctl(39, 0, 0, 0, 0)) != 1


@attack()
def leave_the_system_call_filter(_: Target) -> bool:
    ctypes.CDLL(None).prctl(22, 0, 0)
    return "Seccomp:\t2" not in Path("/proc/self/status").read_text()


@attack("maybe")
def make_a_user_namespace(target: Target) -> bool:
    return _unshare(target, CLONE_NEWUSER)


@attack("root")
def make_a_mount_namespace(target: Target) -> bool:
    return _unshare(target, CLONE_NEWNS)


@attack("maybe")
def make_a_network_namespace(target: Target) -> bool:
    return _unshare(target, CLONE_NEWNET)


@attack("maybe")
def fork_into_a_user_namespace(target: Target) -> bool:
    child = syscall(target, "clone", CLONE_NEWUSER | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


@attack("anyone")
def give_a_thread_files_of_its_own(target: Target) -> list[str]:
    """Files that only this thread has open are invisible to a measurement of the process."""
    found = []
    for name, *arguments in (
        ("clone", 0x10100, 0, 0, 0, 0),  # CLONE_THREAD, CLONE_VM: lacks what makes it work
        ("unshare", 0x400),  # CLONE_FILES
        ("close_range", 0x7FFFFFFF, 0x7FFFFFFF, 2),  # CLOSE_RANGE_UNSHARE
    ):
        try:
            syscall(target, str(name), *arguments)
        except PermissionError:
            continue
        except OSError:
            if name == "close_range":
                continue
        found.append(str(name))
    return found


@attack()
def fork_with_flags_that_no_filter_can_read(target: Target) -> bool:
    arguments = (ctypes.c_uint64 * 11)(CLONE_NEWUSER, 0, 0, 0, 17)
    try:
        child = syscall(target, "clone3", ctypes.addressof(arguments), 88)
    except OSError as error:
        return error.errno != errno.ENOSYS
    if child == 0:
        os._exit(0)
    return True


@attack()
def enter_the_namespaces_of_the_first_process(target: Target) -> bool:
    entered = 0
    for name in ("mnt", "net", "pid", "ipc", "uts", "user"):
        try:
            fd = os.open(f"/proc/1/ns/{name}", os.O_RDONLY)
        except OSError:
            continue
        try:
            syscall(target, "setns", fd, 0)
        except OSError:
            continue
        entered += 1
    return entered > 0


@attack()
def mount_a_filesystem(target: Target) -> bool:
    return syscall(target, "mount", b"none", b"/tmp", b"tmpfs", 0, None) == 0


@attack()
def mount_through_the_new_calls(target: Target) -> bool:
    return any(
        refused(target, name, -1, -1, -1, -1, -1)
        for name in (
            *("fsopen", "fsconfig", "fsmount", "fspick", "move_mount", "open_tree"),
            *("open_tree_attr", "mount_setattr", "statmount", "listmount"),
        )
    )


@attack()
def unmount_what_masks_proc(target: Target) -> bool:
    return syscall(target, "umount2", b"/proc/kallsyms", 2) == 0


@attack()
def make_the_root_writable_again(target: Target) -> bool:
    return syscall(target, "mount", b"none", b"/", None, 32 | 4096, None) == 0


@attack()
def change_the_root_folder(target: Target) -> bool:
    return refused(target, "chroot", b"/tmp") or refused(target, "pivot_root", b"/tmp", b"/tmp")


@attack("maybe")
def load_a_program_into_the_kernel(target: Target) -> bool:
    return refused(target, "bpf", -1, 0, 0)


@attack("maybe")
def count_hardware_events(target: Target) -> bool:
    return refused(target, "perf_event_open", 0, 0, -1, -1, 0)


@attack("maybe")
def use_the_kernels_key_rings(target: Target) -> bool:
    return syscall(target, "keyctl", 0, -3, 1) > 0  # KEYCTL_GET_KEYRING_ID, session ring


@attack("maybe")
def add_a_key(target: Target) -> bool:
    return refused(target, "add_key", 0, 0, 0, 0, 0)


@attack("maybe")
def handle_page_faults(target: Target) -> bool:
    return refused(target, "userfaultfd", -1)


@attack("maybe")
def queue_work_on_a_ring(target: Target) -> bool:
    return refused(target, "io_uring_setup", 0, 0)


@attack("anyone")
def switch_off_address_randomisation(target: Target) -> bool:
    return syscall(target, "personality", 0x0040000) >= 0


@attack()
def load_a_kernel_module(target: Target) -> bool:
    return refused(target, "finit_module", -1, b"", 0) or refused(target, "init_module", 0, 0, 0)


@attack()
def start_another_kernel(target: Target) -> bool:
    return refused(target, "kexec_load", 0, 0, 0, 0)


@attack()
def reboot_the_machine(target: Target) -> bool:
    return refused(target, "reboot", 0, 0, 0, 0)


@attack()
def set_the_clock(target: Target) -> bool:
    return refused(target, "clock_settime", -1, 0) or refused(target, "settimeofday", 0, 0)


@attack()
def rename_the_host(target: Target) -> bool:
    return refused(target, "sethostname", b"owned", 5)


@attack()
def open_the_ports_of_the_machine(target: Target) -> bool:
    return refused(target, "iopl", 3) or refused(target, "ioperm", 0x80, 1, 1)


@attack("maybe")
def edit_the_segment_table(target: Target) -> bool:
    buffer = ctypes.create_string_buffer(64)
    return syscall(target, "modify_ldt", 0, ctypes.addressof(buffer), 64) >= 0


@attack()
def hide_memory_from_the_kernel(target: Target) -> bool:
    return refused(target, "memfd_secret", -1)


@attack()
def move_pages_between_nodes(target: Target) -> bool:
    return any(
        refused(target, name, -1, -1, -1, -1, -1, -1)
        for name in ("mbind", "set_mempolicy", "migrate_pages", "move_pages", "vmsplice")
    )


@attack("maybe")
def call_the_kernel_as_a_32_bit_program(_: Target) -> bool:
    """`mov eax, 20; int 0x80; ret`: getpid by the i386 table."""
    return _run(bytes.fromhex("b814000000cd80c3")) == os.getpid()


@attack()
def call_the_kernel_by_x32_numbers(_: Target) -> bool:
    """`mov eax, 0x40000027; syscall; ret`: getpid by the x32 table."""
    return _run(bytes.fromhex("b8270000400f05c3")) == os.getpid()


def _run(code: bytes) -> int:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
