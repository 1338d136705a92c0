"""Cells that take all they can get."""

from __future__ import annotations

QUIET = "import warnings; warnings.simplefilter('ignore')\n"
"""From Python 3.12 on it warns of forks beside threads, and of archives without a filter."""
HUNGRY_CHILDREN = (
    QUIET
    + """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = []
        try:
            while len(held) < 40:
                held.append(b"x" * 10_000_000)
        except MemoryError:
            pass
        try:
            time.sleep(5)
        finally:
            os._exit(0)
statuses = [os.waitpid(-1, 0)[1] for _ in range(4)]
print(statuses)
"""
)
FORK_BOMB = (
    QUIET
    + """
import os, signal, time
children = []
try:
    while True:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        children.append(pid)
except BlockingIOError as error:
    print(len(children), error)
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""
)
RECURSIVE_FORK_BOMB = """
import os
def bomb():
    while True:
        try:
            os.fork()
        except OSError:
            pass
bomb()
"""
THREAD_BOMB = """
import threading
wait, threads = threading.Event(), []
try:
    while True:
        threads.append(threading.Thread(target=wait.wait))
        threads[-1].start()
except RuntimeError as error:
    print(len(threads), error)
wait.set()
"""
ZIP_BOMB = """
import zlib
packer = zlib.compressobj(9)
bomb = b"".join(packer.compress(bytes(10**7)) for _ in range(200)) + packer.flush()
print(len(bomb) < 10**7)
len(zlib.decompress(bomb))
"""
FILL_DISK = """
number = 0
while True:
    with open(f"file{number}", "wb") as file:
        file.write(b"x" * 5_000_000)
    number += 1
"""
