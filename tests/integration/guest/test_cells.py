"""Cells of the kernel outside of a sandbox: state, output, errors."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

from tests.integration.guest_client import (
    GuestKernel,
    guest,
)


def test_ready_packet_names_process_and_versions(folder: Path) -> None:
    started = GuestKernel(folder)
    try:
        packet = started.wait_ready()
        assert packet["pid"] == started.process.pid
        assert packet["python"] == ".".join(map(str, sys.version_info[:3]))
        assert packet["ipykernel"].startswith("7.")
    finally:
        started.close()


def test_state_is_kept_between_cells(kernel: GuestKernel) -> None:
    assert kernel.run("x = 20").reply["status"] == "ok"
    outcome = kernel.run("x + 1")
    assert outcome.of("execute_result")[0]["data"]["text/plain"] == "21"
    assert outcome.reply["execution_count"] == 2


def test_only_clients_that_number_no_cells_are_told_the_code(kernel: GuestKernel) -> None:
    def kinds(**options: int) -> list[str]:
        return [kind for kind, _ in kernel.run("1", **options).messages]

    assert kinds() == ["status", "execute_input", "execute_result"]
    assert kinds(cell_number=7) == ["status", "execute_result"]


PRINTERS = {
    "type": "formatter.for_type(int, page)",
    "base": "formatter.for_type(object, page)",
    "object": "formatter.singleton_printers[id(value)] = page",
    "name": "formatter.for_type_by_name('builtins', 'int', page)",
}


@pytest.mark.parametrize("registered", PRINTERS.values(), ids=PRINTERS)
def test_values_of_pythons_own_types_have_the_formats_that_code_gives_them(
    kernel: GuestKernel, registered: str
) -> None:
    code = """
def page(value): return f"<b>{value}</b>"
formatter = get_ipython().display_formatter.formatters["text/html"]
value = 12345
"""
    kernel.run(code)
    (plain,) = kernel.run("value").of("execute_result")
    assert plain["data"] == {"text/plain": "12345"}
    kernel.run(registered)
    (pretty,) = kernel.run("value").of("execute_result")
    assert pretty["data"] == {"text/plain": "12345", "text/html": "<b>12345</b>"}


def test_objects_of_classes_derived_from_pythons_own_types_keep_their_formats(
    kernel: GuestKernel,
) -> None:
    code = """
class Table(list):
    def _repr_html_(self): return "<table>"
Table([1])
"""
    (shown,) = kernel.run(code).of("execute_result")
    assert shown["data"] == {"text/plain": "[1]", "text/html": "<table>"}


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio\nawait asyncio.sleep(0, 'x')",
        "async def steps():\n    yield 'x'\n[each async for each in steps()][0]",
        """
waits = lambda lines: [line.replace("WAIT", "await") for line in lines]
get_ipython().input_transformers_post.append(waits)
async def step(): return "x"
""",
    ],
    ids=["await", "async for", "a transformer"],
)
def test_what_awaits_is_known_by_its_words(kernel: GuestKernel, code: str) -> None:
    outcome = kernel.run(code)
    if not outcome.outputs():
        outcome = kernel.run("WAIT step()")
    assert outcome.outputs() == ["execute_result:'x'"]


def test_streams_and_displays_keep_their_order(kernel: GuestKernel) -> None:
    code = """
import sys
from IPython.display import display
print("one")
print("two", file=sys.stderr)
print("three")
sys.stdout.write("four")
sys.stderr.write("five")
display("six")
print("seven")
"eight"
"""
    assert kernel.run(code).joined() == [
        "stdout:one\n",
        "stderr:two\n",
        "stdout:three\nfour",
        "stderr:five",
        "display_data:'six'",
        "stdout:seven\n",
        "execute_result:'eight'",
    ]


def test_many_switches_between_streams_keep_their_order(kernel: GuestKernel) -> None:
    code = """
import sys
for i in range(3000):
    print(i, file=sys.stderr if i % 3 else sys.stdout)
"""
    outcome = kernel.run(code)
    text = "".join(content["text"] for content in outcome.of("stream"))
    assert text.split() == [str(i) for i in range(3000)]


def test_a_million_lines_arrive_complete(kernel: GuestKernel) -> None:
    outcome = kernel.run("for i in range(10**6): print(i)")
    assert outcome.text() == "".join(f"{i}\n" for i in range(10**6))
    assert len(outcome.of("stream")) < 1000


def test_text_is_sent_while_the_cell_runs(kernel: GuestKernel) -> None:
    request = kernel.begin("import time\nprint('early')\ntime.sleep(100)")
    assert kernel.first_output(request) == {"name": "stdout", "text": "early\n"}
    kernel.interrupt()
    kernel.finish(request)


def test_a_line_after_a_quiet_moment_is_sent_at_once(kernel: GuestKernel) -> None:
    code = "import time\nfor i in range(5):\n    print(i, flush=True)\n    time.sleep(0.01)"
    assert [content["text"] for content in kernel.run(code).of("stream")] == [
        f"{i}\n" for i in range(5)
    ]


def test_output_of_a_thread_arrives_after_its_cell(kernel: GuestKernel) -> None:
    code = """
import threading
started = threading.Event()
def later():
    started.wait()
    print("late")
threading.Thread(target=later).start()
"""
    request = kernel.begin(code)
    kernel.finish(request)
    started = kernel.run("started.set()")
    text = started.text()
    while not text:
        header, _, content = kernel.receive("iopub")
        text = content["text"] if header["msg_type"] == "stream" else ""
    assert text == "late\n"


def test_lines_of_a_thread_arrive_long_after_the_last_cell(kernel: GuestKernel) -> None:
    code = """
import threading
def later():
    for i in range(5):
        print(i)
threading.Timer(1.6, later).start()
"""
    kernel.run(code)
    text = ""
    while text.count("\n") < 5:
        header, _, content = kernel.receive("iopub", 5)
        text += content["text"] if header["msg_type"] == "stream" else ""
    assert text == "0\n1\n2\n3\n4\n"


def test_a_huge_text_in_one_write_arrives_whole(kernel: GuestKernel) -> None:
    outcome = kernel.run("print('aä€😀' * 2_000_000)")
    assert outcome.text() == "aä€😀" * 2_000_000 + "\n"


def test_text_that_is_not_unicode_is_shown_with_escapes(kernel: GuestKernel) -> None:
    code = r"""
import os, sys
print("\udc80 ä")
sys.stdout.flush()
sys.stdout.buffer.write(b"\xff raw")
"""
    assert kernel.run(code).text() == "\\udc80 ä\n\ufffd raw"


def test_user_code_cannot_close_stdout(kernel: GuestKernel) -> None:
    kernel.run("import sys\nsys.stdout.close()")
    assert kernel.run("print('still here')").text() == "still here\n"
    kernel.run("sys.stdout.detach()")
    kernel.run("1")
    assert kernel.run("print('and here')").text() == "and here\n"


def test_a_display_too_large_for_a_message_is_replaced_by_a_note(folder: Path) -> None:
    with guest(folder, boot={"output": {"message_bytes": 100_000}}) as kernel:
        outcome = kernel.run("from IPython.display import HTML\nHTML('x' * 200_000)")
        [result] = outcome.of("execute_result")
        assert result["data"].keys() == {"text/plain"}
        assert "text/html of 0.2 MB left out" in result["data"]["text/plain"]


def test_pictures_come_as_png(kernel: GuestKernel) -> None:
    if importlib.util.find_spec("matplotlib"):
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"
    else:
        code = (
            "from IPython.display import Image, display\n"
            "display(Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + bytes(32), format='png'))"
        )
    display = kernel.run(code).of("display_data")[0]
    assert display["data"]["image/png"].startswith("iVBOR")


def test_traceback_is_plain_and_shows_only_user_frames(kernel: GuestKernel) -> None:
    outcome = kernel.run("def f():\n    return 1 / 0\nf()")
    error = outcome.of("error")[0]
    assert error["ename"] == outcome.reply["ename"] == "ZeroDivisionError"
    text = "\n".join(error["traceback"])
    assert "\x1b" not in text
    assert "Cell In[1], line 2, in f" in text
    assert "ipykernel" not in text
    assert "IPython" not in text
    assert text.startswith("Traceback (most recent call last):\n  Cell In[1], line 3")
    assert text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 +", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("def f(n): return f(n)\nf(0)", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E"),
        ("class A:\n    def __repr__(self): raise KeyError('k')\nA()", "KeyError"),
        ("raise ValueError('x' * 20_000_000)", "ValueError"),
        ("await 5", "TypeError"),
        ("%unknown_magic", "UsageError"),
        ("\ud800", "UnicodeEncodeError"),
    ],
)
def test_every_kind_of_error_is_reported_and_survived(
    kernel: GuestKernel, code: str, name: str
) -> None:
    outcome = kernel.run(code)
    assert outcome.reply["status"] == "error"
    assert outcome.reply["ename"] in {name, "SyntaxError"}
    assert len(json.dumps(outcome.reply)) < 1_000_000
    assert kernel.run("1").reply["status"] == "ok"


def test_leaving_by_system_exit_is_an_error_without_advice(kernel: GuestKernel) -> None:
    assert kernel.run("import sys\nsys.exit(2)").outputs() == ["error:SystemExit"]
    passes = (
        "import unittest\n"
        "class Sum(unittest.TestCase):\n"
        "    def test_it(self): self.assertEqual(1 + 1, 2)\n"
        "unittest.main()"  # without tests it fails, from Python 3.12 on
    )
    for code in ("import sys\nsys.exit()", "sys.exit(0)", passes):
        outcome = kernel.run(code)
        assert outcome.reply["status"] == "ok", code
        assert not any(text.startswith("error") for text in outcome.outputs()), code


def test_exit_and_quit_end_the_cell_and_keep_the_kernel(kernel: GuestKernel) -> None:
    kernel.run("kept = 1")
    for code in ("exit()", "quit()", "exit", "quit", "exit(); kept = 2", "def f(): quit()\nf()"):
        outcome = kernel.run(code)
        assert outcome.outputs() == ["error:SystemExit"], code
        assert "the session goes on" in outcome.reply["evalue"]
    time.sleep(0.3)
    assert kernel.run("kept").outputs() == ["execute_result:1"]


@pytest.mark.parametrize("code", ["len?", "%pinfo len", "%pdoc len", "len??"])
def test_what_is_meant_for_a_pager_is_shown(kernel: GuestKernel, code: str) -> None:
    outcome = kernel.run(code)
    assert outcome.reply["status"] == "ok"
    assert outcome.reply["payload"] == []
    [shown] = outcome.of("display_data")
    assert list(shown["data"]) == ["text/plain"]
    assert "Return the number of items in a container." in shown["data"]["text/plain"]
    assert "\x1b" not in shown["data"]["text/plain"]


def test_exception_groups_and_causes_are_shown_whole(kernel: GuestKernel) -> None:
    chain = kernel.run("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('k') from e")
    text = "\n".join(chain.of("error")[0]["traceback"])
    assert text.index("ZeroDivisionError") < text.index("direct cause") < text.index("KeyError")
    if sys.version_info >= (3, 11):
        group = kernel.run("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])")
        text = "\n".join(group.of("error")[0]["traceback"])
        assert "ValueError: 1" in text
        assert "TypeError: 2" in text
        assert "Cell In[2]" in text


def test_awaiting_cells_run_and_context_variables_live_on(kernel: GuestKernel) -> None:
    outcome = kernel.run("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'")
    assert outcome.outputs() == ["execute_result:'awaited'"]
    kernel.run("import contextvars\nv = contextvars.ContextVar('v')\n_ = v.set(7)")
    assert kernel.run("v.get()").outputs() == ["execute_result:7"]


def test_cells_queued_behind_a_failed_one_are_aborted(kernel: GuestKernel) -> None:
    first = kernel.begin("import time\ntime.sleep(0.2)\n1/0")
    second = kernel.begin("2")
    assert kernel.finish(first).reply["status"] == "error"
    assert kernel.finish(second).reply["status"] == "aborted"
    assert kernel.run("3").reply["status"] == "ok"


def test_input_fails_at_once_and_says_why(kernel: GuestKernel) -> None:
    outcome = kernel.run("input('name? ')")
    assert outcome.reply["ename"] == "StdinNotImplementedError"


def test_the_shell_has_the_class_by_which_libraries_know_a_notebook(kernel: GuestKernel) -> None:
    assert kernel.run("str(type(get_ipython()))").outputs() == [
        "execute_result:\"<class 'ipykernel.zmqshell.ZMQInteractiveShell'>\""
    ]


@pytest.mark.parametrize("place", ["input_transformers_cleanup", "input_transformers_post"])
def test_a_transformer_that_fails_fails_once(kernel: GuestKernel, place: str) -> None:
    kernel.run(f"get_ipython().{place}.append(lambda lines: 1 / 0)")
    outcome = kernel.run("1")
    assert outcome.reply["ename"] == "ZeroDivisionError"
    assert "All are removed now: run the cell again." in outcome.text("stderr")
    outcome = kernel.run("shown = !echo 1\nshown[0]")
    assert outcome.outputs() == ["execute_result:'1'"]
