"""Scripts as people write them: name → code, status, and what the answer holds."""

from __future__ import annotations

ARGPARSE = """\
'''Adds.'''
import argparse
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument('--n', type=int, default=3)
print(parser.parse_args().n, parser.prog, parser.description)
"""
UNITTEST = """\
import unittest
class T(unittest.TestCase):
    def test_a(self): pass
if __name__ == '__main__':
    unittest.main()
"""
ASYNCIO = """\
import asyncio
async def main():
    await asyncio.sleep(0)
    return 7
print(asyncio.run(main()), asyncio.run(main()))
"""
OWN_LOOP = """\
import asyncio
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
print(loop.run_until_complete(asyncio.sleep(0, 5)))
"""
AWAIT = "import asyncio\nprint(await asyncio.sleep(0, 6))"
THREAD = """\
import threading, time
threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()
print('end')
"""
EXECUTOR = """\
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(print, 'done')
"""
ATEXIT = """\
import atexit
atexit.register(print, 'one')
atexit.register(print, 'two')
1 / 0
"""
ATEXIT_FAILS = """\
import atexit
def bye():
    1 / 0
atexit.register(bye)
"""
FINALIZE = """\
import weakref
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, 'gone')
"""
SPAWN = """\
import multiprocessing as mp
def f(x): return x * x
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(2) as pool:
        print(pool.map_async(f, [1, 2]).get(20))
"""
LEFT_PROCESS = """\
import multiprocessing as mp, time
def f():
    time.sleep(0.3)
    print('late')
mp.get_context('fork').Process(target=f).start()
"""

SCRIPTS = {
    "argv": ("import sys\nprint(sys.argv)", "ok", "['/workspace/script.py']"),
    "exit": ("import sys\nprint('a')\nsys.exit(0)\nprint('b')", "ok", "a"),
    "exit code": ("import sys\nprint('a')\nsys.exit(3)", "error", "a\nSystemExit: 3"),
    "exit by name": ("print('a')\nexit()", "ok", "a"),
    "file": ("from pathlib import Path\nprint(Path(__file__).parent)", "ok", "/workspace"),
    "argparse": (ARGPARSE, "ok", "3 script.py Adds."),
    "unittest": (UNITTEST, "ok", "OK"),
    "asyncio": (ASYNCIO, "ok", "7 7"),
    "own loop": (OWN_LOOP, "ok", "5"),
    "await": (AWAIT, "ok", "6"),
    "byte order mark": ("\ufeffprint('mark')", "ok", "mark"),
    "thread": (THREAD, "ok", "end\nlate"),
    "executor": (EXECUTOR, "ok", "done"),
    "atexit": (ATEXIT, "error", "two\none"),
    "atexit fails": (ATEXIT_FAILS, "ok", "ZeroDivisionError"),
    "finalize": (FINALIZE, "ok", "gone"),
    "spawn": (SPAWN, "ok", "[1, 4]"),
    "process left": (LEFT_PROCESS, "ok", "late"),
}
