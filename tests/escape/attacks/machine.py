"""Taking what belongs to the whole machine, or to whoever looks after the kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct

from tests.escape.attacks.table import Target, attack, syscall

PR_SET_DUMPABLE = 4
MAP_HUGETLB = 0x40000
HUGE_PAGE = 2 * 1024 * 1024


@attack("anyone")
def make_a_socket_whose_end_takes_as_long_as_one_likes(_: Target) -> bool:
    with socket.socket() as lingering:
        lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    return True


@attack("anyone")
def take_from_the_machines_table_of_asynchronous_io(target: Target) -> bool:
    context = ctypes.create_string_buffer(8)
    syscall(target, "io_setup", 1, ctypes.addressof(context))
    return True


@attack("maybe")
def take_a_huge_page(_: Target) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB
    with mmap.mmap(-1, HUGE_PAGE, flags) as page:
        page[0] = 1
    return True


@attack("anyone")
def make_a_file_of_huge_pages(_: Target) -> bool:
    os.close(os.memfd_create("huge", os.MFD_HUGETLB))
    return True


@attack("anyone")
def hide_what_this_process_holds(target: Target) -> bool:
    syscall(target, "prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    return True
