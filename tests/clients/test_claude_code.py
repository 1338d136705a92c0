"""Claude Code drives the server: what its model sees of tools and answers.

The model is a script on this machine: it makes one call after the other and keeps what it is sent.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.clients.node import installed
from tests.integration.unprivileged import USER, as_ordinary_user

pytestmark = pytest.mark.full

PACKAGE = "@anthropic-ai/claude-code@2.1.197"
SERVER = "notebook"
PREFIX = f"mcp__{SERVER}__"
RUN_S = 300
WAITING = "WaitForMcpServers"
Call = tuple[str, dict[str, Any]]


@dataclass
class Seen:
    """A result as it was sent to the model."""

    text: str
    failed: bool
    pictures: int


@dataclass
class Model:
    """Answers requests with `calls`, one each, then ends its turn; `seen` are their results."""

    calls: Sequence[Call]
    made: int = 0
    seen: list[Seen] = field(default_factory=list)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The content block that answers a request."""
        names = {tool["name"] for tool in body.get("tools", [])}
        ours = any(name.startswith(PREFIX) for name in names)
        if not ours and WAITING in names:
            return {"type": "tool_use", "id": f"wait_{id(body)}", "name": WAITING, "input": {}}
        if not ours or self.made == len(self.calls):
            self.seen = _results(body) if ours else self.seen
            return {"type": "text", "text": "done"}
        name, arguments = self.calls[self.made]
        self.made += 1
        used = {"type": "tool_use", "id": f"call_{self.made}", "name": f"{PREFIX}{name}"}
        return {**used, "input": arguments}


def _results(body: dict[str, Any]) -> list[Seen]:
    parts = [
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "tool_result" and part["tool_use_id"].startswith("call_")
    ]
    found = []
    for part in parts:
        content = part["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "\n".join(block["text"] for block in blocks if block["type"] == "text")
        pictures = sum(block["type"] == "image" for block in blocks)
        found.append(Seen(text, bool(part.get("is_error")), pictures))
    return found


def _events(block: dict[str, Any], model: str) -> bytes:
    """The stream of one message that holds `block`."""
    used = block["type"] == "tool_use"
    empty = {**block, "input": {}} if used else {**block, "text": ""}
    delta = (
        {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        if used
        else {"type": "text_delta", "text": block["text"]}
    )
    message: dict[str, Any] = {
        "id": "message",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    reason = {"stop_reason": "tool_use" if used else "end_turn", "stop_sequence": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": message}),
        ("content_block_start", {"index": 0, "content_block": empty}),
        ("content_block_delta", {"index": 0, "delta": delta}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": reason, "usage": {"output_tokens": 1}}),
        ("message_stop", {}),
    ]
    lines = [
        f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n" for name, data in events
    ]
    return "".join(lines).encode()


def _handler(model: Model) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._send(b"", "text/plain")

        def do_GET(self) -> None:
            self._send(b"{}", "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            if "/v1/messages" not in self.path or "count_tokens" in self.path:
                self._send(b'{"input_tokens": 1}', "application/json")
                return
            self._send(_events(model.reply(body), body["model"]), "text/event-stream")

        def _send(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("claude"), PACKAGE)


@dataclass(frozen=True)
class Cli:
    """Claude Code with the server of the README's client line."""

    programs: Path
    folder: Path
    flags: Sequence[str] = ("--allow", "numpy,pandas,matplotlib", "--allow-install", "*")
    ordinary: bool = False
    project: Path | None = None

    def run(self, *calls: Call, **environ: str) -> list[Seen]:
        """Return the results of calls as the model sees them."""
        model = Model(calls)
        web = ThreadingHTTPServer(("127.0.0.1", 0), _handler(model))
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            self._run(f"http://127.0.0.1:{web.server_address[1]}", environ)
        finally:
            web.shutdown()
            thread.join()
            web.server_close()
        assert len(model.seen) == len(calls)
        return model.seen

    def server(self) -> dict[str, Any]:
        """The entry of the server in the client's configuration."""
        root = Path(__file__).parents[2]
        kept = {key: value for key, value in os.environ.items() if key.startswith(("UV_", "XDG_"))}
        kept.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        words = [sys.executable, "-m", "kernel_mcp", *self.flags]
        if self.ordinary:
            variables = [f"{key}={value}" for key, value in kept.items() if key[:3] == "UV_"]
            words = as_ordinary_user(["env", *variables, *words])
        return {
            "command": words[0],
            "args": words[1:],
            "env": {**kept, "PYTHONPATH": str(root)},
        }

    def configured(self) -> list[str]:
        """The words by which it knows of the server."""
        config = self.folder / "servers.json"
        config.write_text(json.dumps({"mcpServers": {SERVER: self.server()}}))
        return ["--mcp-config", str(config), "--strict-mcp-config"]

    def environ(self) -> dict[str, str]:
        """The environment of its processes."""
        path = f"{self.programs}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "HOME": str(self.folder)}

    def _run(self, url: str, environ: dict[str, str]) -> None:
        command = [str(self.programs / "claude"), "-p", "begin", *self.configured()]
        done = subprocess.run(
            [*command, "--allowedTools", PREFIX.rstrip("_"), "--model", "claude-sonnet-4-5"],
            cwd=self.project or self.folder,
            env={
                **self.environ(),
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_API_KEY": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                **environ,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-1000:] + done.stdout[-1000:]


@pytest.fixture
def claude(programs: Path, tmp_path: Path) -> Cli:
    return Cli(programs, tmp_path)


FRAME = (
    "import numpy as np, pandas as pd\ndf = pd.DataFrame({'x': np.arange(5)})\ndf['y'] = df.x**2"
)
PLOT = "import matplotlib.pyplot as plt\nplt.plot(df.x, df.y)\nplt.show()"
STEPS = "import time\nfor n in range(4):\n    print('step', n, flush=True)\n    time.sleep(1)"


def test_an_analysis_with_a_plot_a_long_cell_wrong_arguments_and_a_named_session(
    claude: Cli,
) -> None:
    seen = claude.run(
        ("wait", {}),
        ("execute", {"code": FRAME, "wait": 280}),
        ("execute", {"code": "df.describe()"}),
        ("execute", {"code": PLOT}),
        ("execute", {"code": f"{PLOT}\n1 / 0"}),
        ("execute", {"code": STEPS, "wait": 1.5}),
        ("execute", {"code": "'meanwhile'"}),
        ("wait", {"cell": 5}),
        ("execute", {"code": "1", "session_id": "x"}),
        ("execute", {"code": 5}),
        ("create_session", {"name": "second"}),
        ("execute", {"code": "z = 3\nz", "session": "second"}),
        ("execute", {"code": "z"}),
        ("list_sessions", {}),
        ("execute", {"code": "for n in range(9999): print('row', n)\nraise ValueError('end')"}),
    )
    nothing, frame, table, plot, both, steps, meanwhile, rest, *others = seen
    assert "no cell has been executed" in nothing.text
    assert not frame.failed
    assert "mean" in table.text
    assert (plot.pictures, plot.failed) == (1, False)
    assert (both.pictures, both.failed) == (1, False)
    assert "ZeroDivisionError" in both.text
    assert "step 0" in steps.text
    assert "running: cell 5 goes on" in steps.text
    assert meanwhile.text.startswith("'meanwhile'")
    assert "cell 5, which was running, has ended: ok" in meanwhile.text
    assert rest.text.endswith("step 3")
    unknown, wrong, created, second, foreign, listed, failed = others
    assert (unknown.failed, "did you mean `session`" in unknown.text) == (True, True)
    assert (wrong.failed, "has to be a string" in wrong.text) == (True, True)
    assert "second" in created.text
    assert second.text == "3"
    assert (foreign.failed, "NameError" in foreign.text) == (True, True)
    assert '"name":"second"' in listed.text
    assert failed.failed
    assert failed.text.startswith("row 0\n")
    assert "ValueError: end" in failed.text
    assert "characters left out; the whole: kernel://" in failed.text
    assert "truncated" not in failed.text


def test_a_call_that_it_gives_up_stops_its_cell_and_the_next_answer_says_so(claude: Cli) -> None:
    seen = claude.run(
        ("execute", {"code": "x = 41"}),
        ("execute", {"code": "while True: pass"}),
        ("execute", {"code": "x + 1"}),
        ("execute", {"code": "x"}),
        ("wait", {"cell": 2}),
        MCP_TOOL_TIMEOUT="5000",
    )
    started, given_up, after, later, shown = seen
    assert given_up.failed
    assert "timed out" in given_up.text
    assert after.text.startswith("42")
    assert "cell 2, whose call was cancelled, has ended: interrupted" in after.text
    assert later.text == "41"
    assert "KeyboardInterrupt" in shown.text
    assert not started.failed


@pytest.fixture
def project() -> Iterator[Path]:
    """A folder of an ordinary user with a table that only that user may read."""
    above = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="project-"))
    above.chmod(0o755)
    folder = above / "project"
    folder.mkdir()
    (folder / "sales.csv").write_text("city,sold\nBonn,3\nUlm,4\nBonn,5\n")
    (folder / "sales.csv").chmod(0o600)
    (folder / ".env").write_text("TOKEN=secret-of-the-host")
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)
    try:
        yield folder
    finally:
        shutil.rmtree(above)


@pytest.mark.parametrize("ordinary", [False, True], ids=["the server's own user", "ordinary user"])
def test_an_analysis_of_files_at_their_own_paths_which_it_cannot_change_until_that_is_allowed(
    programs: Path, tmp_path: Path, project: Path, *, ordinary: bool
) -> None:
    place = str(project)
    flags = ("--allow", "pandas,pyarrow", "--mount")
    read = f"import pandas as pd\nP = {place!r}\nsales = pd.read_csv(P + '/sales.csv')"
    save = "sales.to_parquet(P + '/sales.parquet')"

    def run(mount: str, *cells: str) -> list[Seen]:
        cli = Cli(programs, tmp_path, (*flags, mount), ordinary, project)
        return cli.run(*(("execute", {"code": cell, "wait": 280}) for cell in cells))

    # `.` is where Claude Code runs; the words that make another user begin elsewhere
    here = place if ordinary else "."
    seen = run(here, f"{read}\nsales.groupby('city').sold.sum()['Bonn']", save)
    assert "8" in seen[0].text, seen[0]
    assert "Read-only file system" in seen[1].text
    assert sorted(path.name for path in project.iterdir()) == [".env", "sales.csv"]
    seen = run(f"{place}:rw", read, f"{save}\nopen(P + '/.env').read()")
    assert "secret" not in seen[1].text
    made, owner = (project / "sales.parquet").stat(), project.stat()
    assert (made.st_uid, made.st_gid) == (owner.st_uid, owner.st_gid)
    seen = run(here, f"{read}\npd.read_parquet(P + '/sales.parquet').sold.sum()")
    assert "12" in seen[0].text, seen[0]


def test_what_it_had_read_is_there_when_it_is_opened_again_in_the_same_folder(
    programs: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    flags = ("--allow", "numpy,pandas,matplotlib", "--persist", "1G,1d")
    claude = Cli(programs, tmp_path, (*flags, "--state-dir", str(tmp_path / "s")), project=project)
    read = "import pandas as pd\ndf = pd.read_csv('sales.csv')"
    written, first = claude.run(
        ("write_file", {"path": "sales.csv", "content": "city,sold\nBonn,3\nUlm,4\n"}),
        ("execute", {"code": read, "wait": 280}),
    )
    assert (written.failed, first.failed) == (False, False)
    (second,) = claude.run(("execute", {"code": "int(df.sold.sum())", "wait": 280}))
    assert second.text.startswith("7\n")
    assert "Continued from today" in second.text
    assert "pd, df (2 × 2)" in second.text  # noqa: RUF001
