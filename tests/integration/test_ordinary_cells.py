"""Cells as models write them run in the default profile, whatever they do to the kernel."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.integration.agent import ANALYSIS
from tests.integration.servers import Servers
from tests.integration.test_fast_starts import ready

pytestmark = [pytest.mark.anyio]

CELLS = Path(__file__).with_name("ordinary_cells.txt").read_text().rstrip("\n").split("\n###\n")
"""Each needs Python, numpy, pandas and matplotlib, and what cells above it have made."""


async def test_cells_as_models_write_them_run(servers: Servers) -> None:
    async with servers.agent("--allow", ANALYSIS) as notebook:
        await notebook.run("pass")  # waits for the environment, which may be built for minutes
        failed = {}
        for code in CELLS:
            answer = await notebook.call("execute", code=code)
            if answer.status != "ok" or answer.failed:
                failed[code] = answer.text
    assert len(CELLS) > 150
    assert failed == {}


SHOWN = {
    "!echo shell && false": "shell",
    "%%bash\nfor n in 1 2; do echo line $n; done": "line 1\nline 2",
    "%%writefile made.py\nprint(6 * 7)": "Writing made.py",
    "!python made.py": "42",
    "%run made.py": "42",
    "files = !ls made.py\nlist(files)": "['made.py']",
    "len?": "Return the number of items in a container.",
    "%cd /tmp\n%pwd": "/tmp",
    "get_ipython().getoutput('echo got')": "['got']",
    "[].__class__.__base__.__subclasses__() != []": "True",
    "open('a.txt', 'w').write('ab'); open('a.txt').read()": "'ab'",
}


async def test_what_a_cell_asks_of_the_shell_and_of_ipython_is_shown(servers: Servers) -> None:
    async with ready(servers, "--warm", "0") as notebook:
        for code, shown in SHOWN.items():
            answer = await notebook.run(code)
            assert answer.status == "ok", code
            assert shown in answer.text, code


HARMLESS = (
    "import builtins; builtins.open = None",
    "import builtins; builtins.input = builtins.print",
    "import sys; sys.path.clear(); sys.meta_path.clear()",
    "import sys; sys.modules['json'] = sys.modules['asyncio'] = sys.modules['IPython'] = None",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
    "import sys; sys.displayhook = sys.excepthook = None",
    "import os; [os.close(number) for number in (0, 1, 2)]",
    "import os; os.chdir('/'); os.environ.clear()",
    "import os, shutil; shutil.rmtree('/workspace', ignore_errors=True)",
    "import signal; [signal.signal(number, signal.SIG_IGN) for number in (2, 15, 17, 13)]",
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "import os\nif os.fork() == 0: raise RuntimeError('in the child')",
    "import threading as t; [t.Thread(target=t.Event().wait).start() for _ in range(20)]",
    "import threading; threading.Thread.start = threading.Lock = None",
    "import socket, select; socket.socket = select.epoll = None",
    "import traceback; traceback.TracebackException = None; 1 / 0",
    "import sys; sys.settrace(lambda *_: 1 / 0); sys.setprofile(lambda *_: 1 / 0)",
    "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5))",
    "import warnings, logging, gc; warnings.simplefilter('error'); logging.disable(); gc.disable()",
    "get_ipython().events.register('post_execute', lambda: 1 / 0)",
    "import asyncio; asyncio.get_event_loop().call_soon(lambda: 1 / 0)",
    "import asyncio; asyncio.get_event_loop().call_soon(exit)",
    "import asyncio; asyncio.get_event_loop().close()",
    "import asyncio; asyncio.set_event_loop(None)",
    "get_ipython().kernel.io_loop.stop(); get_ipython().exit_now = True",
    "import asyncio\nawait asyncio.sleep(0)\nfor task in asyncio.all_tasks(): task.cancel()",
    "%reset -f in out dhist array",
    "del __builtins__, get_ipython, In, Out",
    "exit()",
    "import sys; sys.exit(3)",
    "raise KeyboardInterrupt",
    "!nohup sleep 1000 >/dev/null 2>&1 &",
    "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
)
FOUND = {
    "import os; os.mkdir('sub'); _ = open('sub/inner.py', 'w').write('v = 3')": "(no output)",
    "os.chdir('sub')\nimport inner\nprint(inner.v)\nos.chdir('..')": "3",
    "%cd sub\n%cd -": "/workspace/sub\n/workspace",
    "# a comment\n\n%%bash\necho $((2 + 3))": "5",
    "class Kind:\n    value = 1\nimport inspect": "(no output)",
    "print(inspect.getsource(Kind))": "class Kind:\n    value = 1",
    "import multiprocessing\ndef double(n): return 2 * n": "(no output)",
    "with multiprocessing.get_context('spawn').Pool(1) as p: print(p.map(double, [4]))": "[8]",
    "import threading; [each.name for each in threading.enumerate() if 'run_' in each.name]": "[]",
}
"""Cells one after the other, each with its output: names that only a notebook has are found."""
GONE = ("get_ipython().user_ns.clear()", "globals().clear()", "%reset -f")
FATAL = (
    "import os; os._exit(5)",
    "import os; os.abort()",
    "import os; os.execv('/bin/true', ['true'])",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import ctypes; ctypes.string_at(0)",
    "import os; os.closerange(3, 4000)",
    "%%bash\nkill -9 $PPID",
)


@pytest.mark.ways
async def test_a_cell_may_do_to_its_kernel_what_it_likes(servers: Servers) -> None:
    # without checkpoints: a copy made in a pause of the machine would bring `kept` back
    flags = ("--warm", "0", "--max-sessions", "8", "--checkpoints", "off")
    async with ready(servers, *flags) as notebook:

        async def tried(code: str) -> tuple[str, str]:
            """Return the text of two cells after it: one that runs, and one that reads `kept`."""
            session = (await notebook.call("create_session")).data["session"]
            await notebook.run("kept = 1", session=session)
            await notebook.call("execute", code=code, session=session)
            said = [
                (await notebook.call("execute", code=each, session=session)).text
                for each in ("20 + 3", "kept + 10")
            ]
            await notebook.call("close_session", session=session)
            return said[0], said[1]

        with anyio.fail_after(300):
            for code in HARMLESS:
                first, second = await tried(code)
                assert "23" in first, code
                assert "11" in second, code
            for code in GONE:
                first, second = await tried(code)
                assert first == "23", code
                assert "NameError" in second, code
            for code in FATAL:
                first, second = await tried(code)
                assert "23" in first, code
                assert "NameError" in second, code


async def test_what_cells_define_and_where_they_are_is_found(servers: Servers) -> None:
    async with servers.agent() as notebook:
        for code, shown in FOUND.items():
            lines = (await notebook.run(code)).text.splitlines()
            # IPython 8, on Python 3.10, warns of %cd without pickleshare
            said = [line for line in lines if "pickleshare" not in line and "dhist" not in line]
            assert "\n".join(said) == shown, code
