"""Lives of kernels in a template: they leave nothing but what Python knows of its code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kernel_specs
from kernel_specs.template import immortal

ROOT = Path(kernel_specs.__file__).parents[1]
SCRIPT = """
import gc, json, os, resource, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from kernel_specs.restricted import host
from kernel_specs.template import immortal, prewarm, rehearsal

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def of_a_child():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before, rehearsal.LIVES, immortal.keep = faults(), 1, int
        rehearsal.live(app)
        os.write(write, str(faults() - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as told:
        return int(told.read())

def state():
    hook = app.shell.displayhook
    return [
        sorted(os.listdir("/proc/self/fd")),
        [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)],
        threading.active_count(),
        [id(one) for one in (sys.stdout, sys.stderr, hook.pub_socket)],
        signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        {name: id(handler) for name, handler in app.kernel.shell_handlers.items()},
        sorted(app.shell.user_ns),
        app.shell.execution_count,
        app.gate.arrivals,
        os.environ.copy(),
        os.getcwd(),
        sorted(os.listdir(os.environ["TMPDIR"])),
        resource.getrlimit(resource.RLIMIT_AS),
    ]

kernel = host.KernelHost()
folder = sys.argv[2]
found = {"missing": prewarm.begin(kernel).missing}
os.environ["TMPDIR"] = folder
app = kernel._app
rehearsal.LIVES, lives = 1, rehearsal.LIVES
keep, immortal.keep = immortal.keep, int
kernel.freeze()
found["new"] = of_a_child()
rehearsal.live(app)  # what is imported on the way is there to stay
immortal.keep = keep
held, before = prewarm.Inherited.now(), state()
rehearsal.LIVES = lives
rehearsal.live(app)
found["changed"] = [
    [str(one), str(other)] for one, other in zip(before, state()) if one != other
]
found["more"] = prewarm.Inherited.now().more_than(held)
app.kernel._tasks.clear()
gc.unfreeze()
gc.collect()
kernel.freeze()
found["rehearsed"] = of_a_child()
sys.__stdout__.write(json.dumps(found))
"""


def rehearsed(folder: Path) -> dict[str, Any]:
    """What a process of its own tells: the application and the environment are the process's."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT), str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nothing_is_left_and_a_kernel_copies_fewer_pages(tmp_path: Path) -> None:
    found = rehearsed(tmp_path)
    assert found["missing"] == {}
    assert found["changed"] == []
    assert not found["more"]
    assert found["rehearsed"] < (0.6 if immortal.possible() else 0.95) * found["new"], found
