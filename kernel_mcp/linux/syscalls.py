"""Numbers of the system calls that the filters treat specially, per architecture.

Each entry is (x86-64, aarch64); None if the architecture has no such call. Source:
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux 6.17. The
aarch64 column was not tested on such a machine.
"""

from __future__ import annotations

from dataclasses import field
from typing import TypeAlias

from kernel_mcp.records import dataclass

_Table: TypeAlias = dict[str, tuple[int | None, int | None]]

_REFUSED: _Table = {
    # other processes
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    # large attack surface in the kernel
    "add_key": (248, 217),
    "bpf": (321, 280),
    "io_setup": (206, 0),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "memfd_secret": (447, 447),
    "nfsservctl": (180, 42),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "sysfs": (139, None),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "ustat": (136, None),
    "vmsplice": (278, 75),
    # System V IPC: its memory belongs to no process and cannot be measured
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
    # mounts and namespaces
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "listmount": (458, 458),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "statmount": (457, 457),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # the machine
    "_sysctl": (156, None),
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "get_kernel_syms": (177, None),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "modify_ldt": (154, None),
    "query_module": (178, None),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    # files outside the mount namespace, memory placement
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
}
_CHECKED: _Table = {
    "chmod": (90, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close_range": (436, 436),
    "creat": (85, None),
    "fallocate": (285, 47),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "memfd_create": (319, 279),
    "mmap": (9, 222),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "personality": (135, 92),
    "prctl": (157, 167),
    "recvfrom": (45, 207),
    "recvmmsg": (299, 243),
    "recvmsg": (47, 212),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "setsockopt": (54, 208),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

_OF_LANDLOCK: _Table = {
    "chown": (92, None),
    "connect": (42, 203),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fgetxattr": (193, 10),
    "file_getattr": (468, 468),
    "file_setattr": (469, 469),
    "flistxattr": (196, 13),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "getxattr": (191, 8),
    "getxattrat": (464, 464),
    "inotify_add_watch": (254, 27),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "ioprio_set": (251, 30),
    "lchown": (94, None),
    "lgetxattr": (192, 9),
    "listxattr": (194, 11),
    "listxattrat": (465, 465),
    "llistxattr": (195, 12),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "prlimit64": (302, 261),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
"""Further calls that the second filter of a kernel under Landlock treats specially."""

REFUSED = frozenset(_REFUSED)
"""Calls that are refused whatever their arguments are."""

LAST_KNOWN = 469
"""file_setattr, the newest call examined (Linux 6.17); architectures share numbers from 424 on."""


def _column(index: int) -> dict[str, int]:
    pairs = (_REFUSED | _CHECKED | _OF_LANDLOCK).items()
    return {name: number for name, pair in pairs if (number := pair[index]) is not None}


@dataclass(frozen=True, slots=True)
class Architecture:
    """System call numbers and ABI of a machine, as seccomp filters need them."""

    machine: str
    audit_arch: int
    numbers: dict[str, int] = field(repr=False)
    x32: bool = False


X86_64 = Architecture(
    machine="x86_64",
    audit_arch=0xC000003E,  # AUDIT_ARCH_X86_64
    numbers=_column(0),
    x32=True,
)
AARCH64 = Architecture(
    machine="aarch64",
    audit_arch=0xC00000B7,  # AUDIT_ARCH_AARCH64
    numbers=_column(1),
)


def architecture(machine: str) -> Architecture | None:
    """Return the table of a machine as named by `uname -m`; None if there is none."""
    return {"x86_64": X86_64, "aarch64": AARCH64}.get(machine)
