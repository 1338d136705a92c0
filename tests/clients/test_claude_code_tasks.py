"""Claude Code in a terminal, where it takes tasks: background, stop, continue, questions.

The model is a script: see `test_claude_code`. The terminal is a pseudo-terminal that nobody reads
for its words; what counts is what the model is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import queue
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import installed
from tests.clients.test_claude_code import PREFIX, Cli, Model, _handler

pytestmark = pytest.mark.full

PACKAGE = "@anthropic-ai/claude-code@2.1.332"
"""npm on Node 20 installs an older one, without tasks, if no version is named."""
PATIENCE_S = 120.0
POINTER = "\N{HEAVY RIGHT-POINTING ANGLE QUOTATION MARK ORNAMENT}"
"""The mark before the line or the button that takes keys."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
NOTE = "<task-notification>"
UNTIL = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"


@dataclass
class Terminal(Model):
    """A model whose requests can be awaited: `texts` are those of the last message of each."""

    texts: queue.Queue[str] = field(default_factory=queue.Queue)
    stops: bool = False
    """True if it stops a task before it makes its last call."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """See `Model`."""
        last = json.dumps(body["messages"][-1], ensure_ascii=False)
        if self.stops and self.made == len(self.calls) - 1 and (task := task_in(last)):
            self.stops = False
            return {
                "type": "tool_use",
                "id": "stop",
                "name": "TaskStop",
                "input": {"task_id": task},
            }
        found = super().reply(body)
        self.texts.put(last)
        return found

    def awaits(self, part: str) -> str:
        """The text of the next request with this part."""
        others: list[str] = []
        try:
            while part not in (text := self.texts.get(timeout=PATIENCE_S)):
                others.append(text[-1000:])
        except queue.Empty:
            pytest.fail(f"no request has {part!r}; there were {others}")
        return text


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("claude"), PACKAGE)


@pytest.fixture
def cli(programs: Path, tmp_path: Path) -> Cli:
    about = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "customApiKeyResponses": {"approved": ["none"], "rejected": []},
        "projects": {
            str(tmp_path / "work"): {
                "hasTrustDialogAccepted": True,
                "hasCompletedProjectOnboarding": True,
            }
        },
    }
    (tmp_path / ".claude.json").write_text(json.dumps(about))
    (work := tmp_path / "work").mkdir()
    kept = ("--persist", "1G,1d", "--state-dir", str(tmp_path / "s"))
    return Cli(programs, tmp_path, (*kept, "--workspace", str(tmp_path / "files")), project=work)


@contextmanager
def terminal(cli: Cli, model: Model, *flags: str) -> Iterator[Screen]:
    """A terminal in which the program runs."""
    web = ThreadingHTTPServer(("127.0.0.1", 0), _handler(model))
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    ours, theirs = pty.openpty()
    words = [*cli.configured(), "--allowedTools", PREFIX.rstrip("_"), *flags]
    process = subprocess.Popen(
        [str(cli.programs / "claude"), "--model", "claude-sonnet-4-5", *words],
        cwd=cli.project,
        env={
            **cli.environ(),
            "TERM": "xterm-256color",
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{web.server_address[1]}",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
        },
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen = Screen(ours)
    reader = threading.Thread(target=screen.read)
    reader.start()
    try:
        screen.awaits(POINTER)
        yield screen
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        reader.join()
        os.close(ours)
        web.shutdown()
        thread.join()
        web.server_close()


class Screen:
    """A terminal: the text that it has shown since it was last asked, and a keyboard."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._shown = ""
        self._changed = threading.Condition()

    def read(self) -> None:
        """Read until the program has ended."""
        with contextlib.suppress(OSError):  # EIO: it has
            while part := os.read(self._terminal, 65536):
                with self._changed:
                    self._shown += part.decode("utf-8", "replace")
                    self._changed.notify_all()

    def awaits(self, text: str) -> None:
        """Wait until this was shown."""
        with self._changed:
            found = self._changed.wait_for(lambda: text in self._words, PATIENCE_S)
            assert found, f"{text!r} was not shown: {self._words[-3000:]!r}"
            self._shown = self._words.partition(text)[2]

    @property
    def _words(self) -> str:
        """The text without escape sequences."""
        return ESCAPES.sub("", self._shown)

    def finds(self, pattern: re.Pattern[str]) -> str:
        """Wait until something like this was shown; that text."""
        with self._changed:
            assert self._changed.wait_for(lambda: pattern.search(self._words), PATIENCE_S)
            found = pattern.search(self._words)
            assert found is not None
            return found.group()

    def types(self, text: str) -> None:
        """Type a word, and end it when it is shown: what comes at once counts as pasted."""
        os.write(self._terminal, text.encode())
        self.awaits(text)
        os.write(self._terminal, b"\r")

    def presses_enter(self) -> None:
        os.write(self._terminal, b"\r")


def say(screen: Screen, model: Terminal, text: str, part: str) -> str:
    """Type a line, and return the model's next request with this part."""
    screen.types(text)
    return model.awaits(part)


def noted(screen: Screen, model: Terminal) -> str:
    """Press the button of a dialog until a task has ended; what the model is told of that.

    The program drops keys that come while it draws.
    """
    for _ in range(int(PATIENCE_S)):
        screen.presses_enter()
        with contextlib.suppress(queue.Empty):
            if NOTE in (text := model.texts.get(timeout=1)):
                return text
    pytest.fail("the task has not ended")


def task_in(text: str) -> str:
    """The client's own id of a task, from what the model is told of it."""
    return text.rpartition("background as task ")[2].partition(" ")[0] if "as task" in text else ""


def calls(*codes: str) -> Sequence[tuple[str, dict[str, Any]]]:
    return [("execute", {"code": code, "wait": 3}) for code in codes]


def test_a_long_cell_goes_on_in_the_background_and_its_result_arrives_by_itself(cli: Cli) -> None:
    model = Terminal(calls(f"print('begun')\n{UNTIL}print('the end')"))
    with terminal(cli, model) as typed:
        told = say(typed, model, "begin", "background as task")
        assert "the end" not in told
        (cli.folder / "files" / "default" / "go").touch()
        note = model.awaits(NOTE)
        assert "<status>completed</status>" in note
        assert "begun\\nthe end" in note


def test_a_stopped_task_interrupts_its_cell_and_what_it_printed_can_be_read(cli: Cli) -> None:
    long = calls("0", f"print('begun')\n{UNTIL}")
    model = Terminal([*long, ("wait", {"cell": 2})], stops=True)
    with terminal(cli, model) as typed:
        shown = say(typed, model, "begin", "begun")
        assert "interrupted" in shown


def test_a_result_is_there_after_the_client_was_left_and_continued(cli: Cli) -> None:
    model = Terminal(calls("x = 5", f"print('begun')\n{UNTIL}"))
    with terminal(cli, model) as typed:
        say(typed, model, "begin", "background as task")
        typed.awaits("done")
    model = Terminal([*model.calls, ("execute", {"code": "x + 1", "wait": 60})], made=2)
    with terminal(cli, model, "--continue") as typed:
        note = model.awaits(NOTE)
        assert "begun" in note
        assert "interrupted" in note or "the server ended" in note
        model.awaits("")
        assert model.seen[-1].text.splitlines()[0] == "6"


def test_a_person_answers_the_question_of_code_in_a_form(cli: Cli) -> None:
    model = Terminal(calls("print('hello', input('Name? '))"))
    with terminal(cli, model) as typed:
        typed.types("begin")
        typed.awaits("asks:")
        typed.types("Ada")
        assert "hello Ada" in noted(typed, model)


def test_a_person_types_a_secret_on_a_page(cli: Cli) -> None:
    code = "from getpass import getpass\nprint('length', len(getpass('Token?')))"
    model = Terminal(calls(code))
    with terminal(cli, model) as typed:
        typed.types("begin")
        url = typed.finds(re.compile(r"http://127\.0\.0\.1:[0-9]{1,5}/[\w-]{43}"))
        with urllib.request.urlopen(url, b"answer=hunter2") as page:
            assert "Sent" in page.read().decode()
        note = noted(typed, model)
        assert "length 7" in note
        assert "hunter2" not in note


def test_without_a_person_code_that_asks_gets_its_hint(cli: Cli) -> None:
    seen = cli.run(("execute", {"code": "input('Name? ')"}), ("execute", {"code": "'goes on'"}))
    assert "nobody to ask" in seen[0].text
    assert "goes on" in seen[1].text
