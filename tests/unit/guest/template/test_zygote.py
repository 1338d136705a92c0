"""What a process of the template looks at before it enters a sandbox."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[4]
LOOK = """
import threading
from kernel_specs.template import zygote
zygote.THREADS_S = 0.05
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
print(zygote._alone())
stop.set()
thread.join()
zygote.THREADS_S = 60.0
print(zygote._alone())
"""


def test_a_thread_that_stays_is_waited_for_no_longer_than_one_that_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
