"""Open files beneath a folder that hostile code can change at any moment.

The kernel resolves the whole path in one step with openat2(2); where that is missing or forbidden,
every component is opened on its own without following links, which is as safe and slower.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache

_SYS_OPENAT2 = 437  # the same on every architecture
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x01, 0x02, 0x04, 0x08
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_PATH_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 4000
"""Longest path given to one call; PATH_MAX is 4096."""
_ATTEMPTS = 16
"""openat2 answers EAGAIN when a rename raced with it."""

Opener = Callable[[int, Sequence[bytes], int], int]
"""Opens some components below a folder's descriptor with flags; raises OSError."""


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_beneath(
    folder: int, parts: Sequence[str], flags: int, *, opener: Opener | None = None
) -> int:
    """Open `parts` below the descriptor `folder`, never through a link or another file system.

    Opening never blocks, whatever the file is. Any depth works. Raises OSError: ELOOP or ENOTDIR
    for a link, EXDEV for another file system, and what open(2) says.
    """
    names = [os.fsencode(part) for part in parts]
    for name in names:
        if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(name))
    *folders, last = _chunks(names) if names else [[b"."]]
    opener = opener or _default_opener()
    current = folder
    try:
        for chunk in folders:
            deeper = opener(current, chunk, _PATH_ONLY)
            if current != folder:
                os.close(current)
            current = deeper
        return opener(current, last, flags if flags & os.O_PATH else flags | _ALWAYS)
    finally:
        if current != folder:
            os.close(current)


def _chunks(names: Sequence[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    length = 0
    for name in names:
        if chunk and length + len(name) + 1 > _CHUNK_BYTES:
            yield chunk
            chunk, length = [], 0
        chunk.append(name)
        length += len(name) + 1
    yield chunk


def with_openat2(folder: int, names: Sequence[bytes], flags: int) -> int:
    """One openat2 call. Raises OSError."""
    path = b"/".join(names)
    how = _OpenHow(flags, 0, _RESOLVE)
    for _ in range(_ATTEMPTS):
        fd: int = _libc().syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(folder),
            ctypes.c_char_p(path),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code), os.fsdecode(path))


def by_walking(folder: int, names: Sequence[bytes], flags: int) -> int:
    """Open component by component. Raises OSError."""
    device = os.fstat(folder).st_dev
    current = folder
    try:
        for name in names[:-1]:
            deeper = os.open(name, _PATH_ONLY, dir_fd=current)
            if current != folder:
                os.close(current)
            current = deeper
            _check_device(current, device)
        fd = os.open(names[-1], flags | os.O_NOFOLLOW, dir_fd=current)
        try:
            _check_device(fd, device)
        except OSError:
            os.close(fd)
            raise
        return fd
    finally:
        if current != folder:
            os.close(current)


def _check_device(fd: int, device: int) -> None:
    if os.fstat(fd).st_dev != device:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@cache
def _default_opener() -> Opener:
    """openat2 where it works: some container runtimes forbid it with EPERM or ENOSYS."""
    probe = os.open("/", _PATH_ONLY)
    try:
        os.close(with_openat2(probe, [b"."], _PATH_ONLY))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # which says nothing of the system: ask again
        return by_walking
    finally:
        os.close(probe)
    return with_openat2


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
