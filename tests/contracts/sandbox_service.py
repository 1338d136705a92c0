"""A service of sandboxes on loopback: the stand-in of a commercial one, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INTERPRETER = r"""
import ast, json, signal, sys, traceback
out, space, runs = sys.stdout, {}, False
def interrupt(number, frame):
    global runs
    if runs:
        runs = False
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def say(**event):
    out.write(json.dumps(event) + "\n")
    out.flush()
class Stream:
    def __init__(self, name): self.name = name
    def write(self, text):
        if text: say(type=self.name, text=text)
        return len(text)
    def flush(self): pass
sys.stdout, sys.stderr = Stream("stdout"), Stream("stderr")
for line in sys.stdin:
    try:
        tree = ast.parse(json.loads(line))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        runs = True
        exec(compile(tree, "cell", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
            runs = False
            if value is not None: say(type="result", data={"text/plain": repr(value)})
    except BaseException as error:
        runs = False
        say(type="error", name=type(error).__name__, value=str(error),
            traceback=traceback.format_exc())
    runs = False
    say(type="end")
"""


class SandboxService:
    """The sandboxes that a service has made, by their numbers."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, subprocess.Popen[str]] = {}
        self.made = 0
        self._lock = threading.Lock()

    def create(self) -> str:
        """Start a sandbox, and return its number."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", INTERPRETER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with self._lock:
            self.made += 1
            self.sandboxes[str(self.made)] = process
            return str(self.made)

    def execute(self, number: str, code: str) -> Iterator[str]:
        """Run code, and yield its events, a line each."""
        process = self.sandboxes[number]
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if json.loads(line) == {"type": "end"}:
                return
            yield line
        reason = f"was ended by signal {-process.wait()}"
        yield json.dumps({"type": "gone", "reason": reason}) + "\n"

    def interrupt(self, number: str) -> None:
        """Interrupt the code that runs."""
        self.sandboxes[number].send_signal(signal.SIGINT)

    def delete(self, number: str) -> None:
        """End a sandbox."""
        process = self.sandboxes.pop(number)
        process.kill()
        process.communicate()


@contextmanager
def sandbox_service() -> Iterator[tuple[str, SandboxService]]:
    """Serve on loopback; yield the address, and the service itself."""
    service = SandboxService()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            match self.path.strip("/").split("/"):
                case ["sandboxes"]:
                    self._answer(json.dumps({"sandboxID": service.create()}))
                case ["sandboxes", number, "execute"]:
                    self.send_response(200)
                    self.end_headers()
                    for line in service.execute(number, json.loads(body)["code"]):
                        self.wfile.write(line.encode())
                        self.wfile.flush()
                case ["sandboxes", number, "interrupt"]:
                    service.interrupt(number)
                    self._answer("")

        def do_DELETE(self) -> None:
            service.delete(self.path.rpartition("/")[2])
            self._answer("")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _answer(self, text: str) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for number in list(service.sandboxes):
            service.delete(number)
