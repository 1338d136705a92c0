"""Give up privileges, for good."""

from __future__ import annotations

import errno

from kernel_specs.template import linux


def drop(filter_program: bytes) -> None:
    """Empty all capability sets, forbid new ones, install the system call filter.

    Takes CAP_SETPCAP in the user namespace of this process. Raises OSError.
    """
    number = 0
    while _unbind(number):
        number += 1
    linux.prctl(linux.PR_CAP_AMBIENT, linux.PR_CAP_AMBIENT_CLEAR_ALL)
    linux.clear_capabilities()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_filter(filter_program)


def keep_from_processes() -> None:
    """Give up CAP_SYS_PTRACE, so that no process with a right that this one lacks can be looked at.

    Takes CAP_SETPCAP. Raises OSError.
    """
    linux.prctl(linux.PR_CAPBSET_DROP, linux.CAP_SYS_PTRACE)
    linux.drop_capability(linux.CAP_SYS_PTRACE)


def _unbind(number: int) -> bool:
    """Take a capability out of the bounding set; False when there is none of that number."""
    try:
        linux.prctl(linux.PR_CAPBSET_DROP, number)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
