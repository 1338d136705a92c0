"""Using more than was given. These run with the limits that every kernel sets at boot."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
from pathlib import Path

from tests.escape.attacks.table import Target, attack


@attack()
def fork_without_end(target: Target) -> bool:
    children: list[int] = []
    try:
        while len(children) <= target.limits["pids"]:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    except BlockingIOError:
        return False
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return True


@attack()
def start_threads_without_end(target: Target) -> bool:
    stop = threading.Event()
    threads: list[threading.Thread] = []
    try:
        while len(threads) <= target.limits["pids"]:
            threads.append(threading.Thread(target=stop.wait))
            threads[-1].start()
    except RuntimeError:
        return False
    finally:
        stop.set()
    return True


@attack()
def open_files_without_end(target: Target) -> bool:
    for _ in range(target.limits["open_files"] + 1):
        os.dup(0)
    return True


@attack()
def raise_the_limits_again(_: Target) -> bool:
    import resource

    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
        _soft, hard = resource.getrlimit(kind)
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
        except (ValueError, OSError):
            continue
        return True
    return False


@attack()
def take_all_memory(target: Target) -> bool:
    taken: list[mmap.mmap] = []
    try:
        while len(taken) * 2**26 <= 2 * target.limits["memory_bytes"] + 2**31:
            taken.append(mmap.mmap(-1, 2**26))
    except (OSError, MemoryError):
        return False
    return True


@attack()
def take_all_memory_after_raising_what_may_be_raised(target: Target) -> bool:
    import resource

    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    taken: list[mmap.mmap] = []
    try:
        while len(taken) * 2**26 <= 2 * target.limits["memory_bytes"] + 2**31:
            taken.append(mmap.mmap(-1, 2**26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, MemoryError):
        return False
    return True


@attack()
def fill_tmp(target: Target) -> bool:
    return _fill("/tmp/fill", target)


@attack()
def fill_shared_memory(target: Target) -> bool:
    return _fill("/dev/shm/fill", target)


@attack()
def write_a_huge_file(target: Target) -> bool:
    path = Path("huge")
    try:
        with path.open("wb") as file:
            file.seek(target.limits["file_bytes"] + 1)
            file.write(b"x")
    finally:
        path.unlink()
    return True


@attack()
def queue_signals_without_end(_: Target) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    return all(libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0 for _ in range(2000))


@attack("anyone")
def keep_memory_that_no_process_holds(_: Target) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 2**20, 0o1600)  # IPC_PRIVATE, IPC_CREAT
    libc.shmctl(segment, 0, None)  # IPC_RMID: without the sandbox it would stay
    return bool(segment >= 0)


@attack("anyone")
def keep_memory_in_a_queue_of_messages(_: Target) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.msgget(0, 0o1600)
    libc.msgctl(queue, 0, None)
    return bool(queue >= 0)


@attack()
def make_message_queues_without_end(_: Target) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = os.O_CREAT | os.O_RDWR
    made = [libc.mq_open(b"/attack%d" % number, flags, 0o600, None) >= 0 for number in range(8)]
    for number in range(8):
        libc.mq_unlink(b"/attack%d" % number)
    return all(made)


def _fill(name: str, target: Target) -> bool:
    written = 0
    try:
        with open(name, "wb", buffering=0) as file:
            while written <= target.limits["tmp_bytes"]:
                written += file.write(bytes(2**20))
    finally:
        Path(name).unlink()
    return True
