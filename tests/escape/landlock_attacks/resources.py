"""Using more than the limits allow."""

from __future__ import annotations

import mmap
import os
import resource
import signal

from tests.escape.landlock_attacks.toolkit import World, attack

GROUP = "resources"


@attack(GROUP)
def open_thousands_of_files(world: World) -> bool:
    limit = world["limits"]["open_files"]
    ceiling = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, ceiling))
    return len([os.dup(0) for _ in range(limit + 16)]) > int(limit)


@attack(GROUP)
def write_a_huge_file(world: World) -> bool:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.truncate(os.open(world["workspace"] + "/huge", os.O_CREAT | os.O_RDWR), 2 << 30)
    return True


@attack(GROUP)
def map_more_memory_than_allowed(world: World) -> bool:
    return len(mmap.mmap(-1, world["limits"]["memory_bytes"] + (2 << 30))) > 0


@attack(GROUP)
def start_processes_without_end(world: World) -> bool:
    limit = world["limits"]["processes"]
    started = 0
    try:
        for _ in range(limit + 64):
            if os.fork() == 0:
                signal.pause()
                os._exit(0)
            started += 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    return started >= int(limit) + 64


@attack(GROUP)
def leave_a_core_dump(world: World) -> bool:
    return resource.getrlimit(resource.RLIMIT_CORE)[1] != 0


@attack(GROUP)
def fill_the_queue_of_signals(world: World) -> bool:
    return resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] > 1024
