"""The kernel: ipykernel's request handling with the lean path for a cell."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr, assignment, attr-defined, misc"

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, ClassVar

from ipykernel.ipkernel import IPythonKernel
from IPython.core.compilerop import CachingCompiler
from traitlets import Any as AnyTrait
from traitlets import Type

from kernel_specs.restricted import service, variables
from kernel_specs.restricted.checkpoints.requests import CheckpointRequests, Lifeline
from kernel_specs.restricted.config import BootConfig
from kernel_specs.restricted.console import tracebacks
from kernel_specs.restricted.console.iopub import IOPubPublisher
from kernel_specs.restricted.console.streams import Console, CStdout
from kernel_specs.restricted.console.tracebacks import forgetting
from kernel_specs.restricted.hibernation.requests import SnapshotRequests
from kernel_specs.restricted.interrupts import InterruptGate
from kernel_specs.restricted.originals import signal
from kernel_specs.restricted.questions import Questions
from kernel_specs.restricted.record import Recorder
from kernel_specs.restricted.service import ServiceThread
from kernel_specs.restricted.session_loop import SessionLoop, run_to_end
from kernel_specs.restricted.shell import Shell
from kernel_specs.restricted.usage import UsageMeter

RETRY_SECONDS = 0.05
MOST_RETRY_SECONDS = 1.0
"""Pauses double from one to the other while code of the kernel is broken."""
MAIN_THREAD_REQUESTS = frozenset(
    {"execute_request", "complete_request", "inspect_request", "history_request"}
)
"""Requests that run user code or read its objects: never handled by the service thread."""


_chdir, _getcwd = os.chdir, os.getcwd


def _current_folder() -> str:
    """Return the working folder, or the root folder if it has been removed."""
    try:
        return _getcwd()
    except OSError:
        return os.sep


class SandboxKernel(CheckpointRequests, SnapshotRequests, IPythonKernel):
    """IPythonKernel whose main thread reads, runs and answers, one request after the other."""

    shell_class = Type(Shell)
    compiler_class = Type(CachingCompiler)
    """Names cells `<ipython-input-…>`: ipykernel's own names cost a Python loop over every byte."""
    shell_stream = AnyTrait()
    control_stream = AnyTrait()
    gate: InterruptGate = AnyTrait()
    console: Console = AnyTrait()
    iopub: IOPubPublisher = AnyTrait()
    service: ServiceThread = AnyTrait()
    io_loop: SessionLoop = AnyTrait()
    lifeline: Lifeline = AnyTrait()
    boot: BootConfig = AnyTrait()
    allow_imports: Callable[[Iterable[str]], None] = AnyTrait(default_value=frozenset)
    """Extends the import guard, where there is one."""

    tools_fd = -1
    """The socket where code waits for calls of the gateway of tools; -1 if no tools are open."""
    _execute_sleep = 0.0
    """Output is sent before the reply by construction: there is nothing to wait for."""
    _ended = False
    _retry_seconds = RETRY_SECONDS

    msg_types: ClassVar = [
        *IPythonKernel.msg_types,
        *SnapshotRequests.SNAPSHOT_REQUESTS,
        *CheckpointRequests.CHECKPOINT_REQUESTS,
        "kernel_mcp_prewarm_request",
    ]
    control_msg_types: ClassVar = [
        *(name for name in IPythonKernel.control_msg_types if name not in MAIN_THREAD_REQUESTS),
        "kernel_mcp_variables_request",
        "kernel_mcp_packages_request",
        "kernel_mcp_script_request",
        "kernel_mcp_state_request",
        "kernel_mcp_answer_request",
    ]

    def start(self) -> None:
        """Create the task that serves control; the caller starts the thread of its loop."""
        self.io_loop = self.shell.loop
        self.io_loop.escaped = self.end_child
        self.io_loop.interrupted = self.shell.interrupted
        self._control_lock = asyncio.Lock()
        self.shell.exit_now = False
        self._pid = os.getpid()
        self.c_stdout = CStdout()
        self._unanswered: tuple[Any, Any] | None = None
        self._names = variables.NameTracker()
        self._folders: dict[str, str] = {}
        self._usage = UsageMeter()
        self._recorder = Recorder(self.boot)
        self._memory_limit = 0
        self._questions = Questions(self._publish_question)
        self.shell_handlers = {
            name: self._answered(handler) for name, handler in self.shell_handlers.items()
        }
        self._answers: set[asyncio.Task[None]] = set()
        self._control = self.service.io_loop.asyncio_loop.create_task(self._serve_control())
        self._publish_status("starting", "shell")
        self.iopub.pump()

    def serve(self) -> None:
        """Handle shell requests until shutdown, one after the other, outside of the loop."""
        while not self._ended:
            self._serve_next()
            self.shell.reserve.close()

    def _serve_next(self) -> None:
        """Wait for the next request, and handle it."""
        self._unanswered = None
        try:
            if not self.shell_stream.held:
                self._aborting = False  # all requests queued when a cell failed are answered
            message = self.shell_stream.receive()
            if message is not None:
                self.io_loop.turn()  # run callbacks that the last cell has left in the loop
            while message is None and not self._ended:
                self.io_loop.wait(self.shell_stream, self.stdin_socket)
                message = self.shell_stream.receive()
            if message is not None:
                run_to_end(self.dispatch_shell(message))
                self._send()
            self._retry_seconds = RETRY_SECONDS
        except Exception as error:
            self.shell.reserve.open()
            with contextlib.suppress(Exception):
                self._answer_failure(error)
                self._publish_status("idle", "shell")
                self.log.error("request could not be handled", exc_info=error)
                self._send()
            with contextlib.suppress(Exception):
                self.shell_stream.pause(self._retry_seconds)
            self._retry_seconds = min(2 * self._retry_seconds, MOST_RETRY_SECONDS)

    def _send(self) -> None:
        self.iopub.pump()
        self.shell_stream.push()

    def _answered(self, handler: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, None]]:
        """Return a shell handler that sends an error reply if `handler` fails."""

        async def handle(stream: Any, ident: Any, parent: Any) -> None:
            try:
                waiting = handler(stream, ident, parent)
                if inspect.isawaitable(waiting):
                    await waiting
            except Exception as error:
                self.shell.reserve.open()
                self._answer_failure(error)
                self.log.error("request could not be handled", exc_info=error)
            self._unanswered = None

        return handle

    def _answer_failure(self, error: Exception) -> None:
        """Send an error reply for a request whose handler failed before its own."""
        if self._unanswered is None:
            return
        ident, parent = self._unanswered
        self._unanswered = None
        kind, is_request, _ = parent["header"]["msg_type"].rpartition("_request")
        if not is_request:
            return
        content = {
            "status": "error",
            "ename": type(error).__name__,
            "evalue": tracebacks.safe_str(error),
            "traceback": tracebacks.exception_only(type(error), error),
        }
        if kind == "execute":
            content["execution_count"] = self.shell.execution_count - 1
            self.session.send(self.iopub, "error", content, parent, self._topic("error"))
        self.session.send(self.shell_stream, f"{kind}_reply", content, parent, ident)

    async def _serve_control(self) -> None:
        while True:
            try:
                message = self.control_stream.receive()
                if message is None:
                    await self.control_stream.readable()
                    continue
                await self.dispatch_control(message)
                self.iopub.pump()
            except MemoryError:  # user code has used up the memory
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                self.log.exception("control request could not be handled")
                await asyncio.sleep(RETRY_SECONDS)

    def set_parent(self, ident: Any, parent: Any, channel: str = "shell") -> None:
        """Attribute output from now on to this request."""
        if channel == "shell":
            self.console.hand_over()  # text printed until now belongs to the previous request
            self.iopub.parent = parent["header"]
            self._unanswered = ident, parent
        super().set_parent(ident, parent, channel)

    def pre_handler_hook(self) -> None:
        """Install the interrupt gate instead of Python's own handler."""
        self.gate.begin()

    def post_handler_hook(self) -> None:
        """Ignore SIGINT until the next request."""
        self.gate.end()

    async def execute_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell while the flush timer ticks."""
        self.console.repair()
        if (number := parent["content"].get("cell_number")) is not None:
            self.shell.number_cell(number)
        self._memory_limit = parent["content"].get("memory_bytes", 0)
        self.service.cell_started()
        self._questions.begin(allowed=parent["content"].get("asks") is True)
        try:
            with self._in_folder_of(parent["content"].get("notebook", "")):
                await super().execute_request(stream, ident, parent)
        finally:
            self._questions.end()
            self.service.cell_ended()

    @contextlib.contextmanager
    def _in_folder_of(self, notebook: str) -> Iterator[None]:
        """Run a cell in the folder of its notebook, or in that to which earlier cells have moved.

        Modules of that folder can be imported meanwhile. Without a notebook nothing changes.
        """
        if not notebook:
            yield
            return
        before, folder = _current_folder(), self._enter_folder(notebook)
        added = folder not in sys.path
        if added:
            sys.path.insert(0, folder)
        try:
            yield
        finally:
            self._folders[notebook] = _current_folder()
            with contextlib.suppress(OSError):
                _chdir(before)
            if added:
                with contextlib.suppress(ValueError):
                    sys.path.remove(folder)

    def _enter_folder(self, notebook: str) -> str:
        """Enter the folder of the last cell of a notebook; return the notebook's own folder."""
        home = self.boot.start or _current_folder()
        own = os.path.normpath(os.path.join(home, notebook, os.pardir))  # noqa: PTH118  # its folder
        for folder in (self._folders.get(notebook, own), own):
            with contextlib.suppress(OSError):
                _chdir(folder)
                break
        return own

    def _publish_execute_input(
        self, code: str, parent: dict[str, Any], execution_count: int
    ) -> None:
        """Publish the code that runs; the server does that for cells that it numbers."""
        if "cell_number" not in parent["content"]:
            super()._publish_execute_input(code, parent, execution_count)

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Run one cell and return its reply, without ipykernel's second transformation."""
        shell = self.shell
        self._usage.begin()
        self._recorder.begin()
        self._forward_input(allow_stdin)
        try:
            result = shell.run_request(
                code, silent=silent, store_history=store_history, cell_id=cell_id
            )
            failed = result.error_before_exec or result.error_in_exec
            self.end_child(_exit_code(failed) if failed is not None else 0)
        finally:
            self.end_child()
            self._restore_input()
        self.c_stdout.flush()
        self.console.flush()
        error = result.error_before_exec
        if error is None:
            error = result.error_in_exec
        reply: dict[str, Any] = {"execution_count": shell.execution_count - 1}
        if error is None and not shell._last_traceback_during_displayhook:
            reply["status"] = "ok"
            reply["user_expressions"] = shell.user_expressions(user_expressions or {})
        else:
            self.shell_stream.hold()  # requests that came before the reply are aborted, no others
            reply["status"] = "error"
            reply["exit_code"] = _exit_code(error)
            reply["begun"] = result.error_before_exec is None
            reply["user_expressions"] = {}
            if error is None:  # while the result was being displayed
                reply.update(shell.last_error or {})
            else:
                reply["ename"] = type(error).__name__
                reply["evalue"] = tracebacks.safe_str(error)
                reply["traceback"] = shell._last_traceback or []
        come, gone = self._names.news(shell.user_ns, shell.user_ns_hidden)
        if come or gone:
            reply["names"] = [come[: variables.MAX_NEWS], gone[: variables.MAX_NEWS]]
        if gone and (removed := variables.removed(gone, shell.last_cell)):
            reply["removed"] = [len(removed), removed[: variables.MAX_NEWS]]
        with contextlib.suppress(Exception):  # of values that are measured, or of /proc
            reply["used"] = self._usage.report(shell.user_ns, self._memory_limit, error)
        reply["record"] = self._recorder.end()
        reply["payload"] = shell.payload_manager.read_payload()
        shell.payload_manager.clear_payload()
        return reply

    def end_child(self, status: int = 0) -> None:
        """Exit if user code has forked this process in a cell: only its parent is the kernel."""
        if os.getpid() == self._pid:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End `serve` once the current request is answered."""
        self._ended = True
        return {"status": "ok", "restart": restart}

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Return completions. Methods of values may run for that; SIGINT interrupts them."""
        with self._asking_values():
            return dict(super().do_complete(code, cursor_pos))
        return dict(_INTERRUPTED)

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """Return a description of the object that a name refers to.

        Methods of values may run for that; SIGINT interrupts them.
        """
        with self._asking_values():
            return dict(super().do_inspect(code, cursor_pos, detail_level, omit_sections))
        return dict(_INTERRUPTED)

    @contextlib.contextmanager
    def _asking_values(self) -> Iterator[None]:
        try:
            self.gate.open()
            yield
        except KeyboardInterrupt:
            pass
        finally:
            self.gate.close()

    def raw_input(self, prompt: str = "") -> str:
        """Return a line of the person's. Raises EOFError, StdinNotImplementedError."""
        if self._allow_stdin:
            return str(super().raw_input(prompt))
        return self._questions.ask("input()", str(prompt), secret=False)

    def getpass(self, prompt: str = "", stream: Any = None, **options: Any) -> str:
        """Return a line that is a secret. Raises EOFError, StdinNotImplementedError."""
        if self._allow_stdin:
            return str(super().getpass(prompt, stream, **options))
        return self._questions.ask("getpass()", str(prompt), secret=True)

    def _publish_question(self, content: dict[str, Any]) -> None:
        self.session.send(self.iopub, "input_request", content, self.get_parent("shell"))
        self.iopub.pump()

    def ask_for_tools(self) -> bool:
        """Ask the server that its gateway calls; return False in a child, which cannot ask."""
        if os.getpid() != self._pid:
            return False
        self.session.send(self.iopub, "kernel_mcp_tools", {}, self.get_parent("shell"))
        self.iopub.pump()
        return True

    async def kernel_mcp_answer_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Hand an answer to the code that waits for it (service thread)."""
        self._questions.take(parent["content"])
        self.session.send(stream, "kernel_mcp_answer_reply", {}, parent, ident)

    async def kernel_mcp_prewarm_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run a cell with all its messages, which allocates their memory, and drop its traces."""
        with forgetting(self.shell):
            await self.execute_request(stream, ident, parent)

    async def kernel_mcp_variables_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Describe the names of the session; answered while a cell runs."""
        asked = parent["content"]
        match, offset = asked.get("match", ""), asked.get("offset", 0)
        shell = self.shell
        content = variables.describe(shell.user_ns, shell.user_ns_hidden, match, offset)
        self.session.send(stream, "kernel_mcp_variables_reply", content, parent, ident)

    async def kernel_mcp_state_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Reply with `idle`, True if the main thread waits for requests (service thread)."""
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main or 0)
        waits = frame is not None and frame.f_code.co_filename in _WAITING_FILES
        content = {"idle": waits and not self.gate.busy}
        self.session.send(stream, "kernel_mcp_state_reply", content, parent, ident)

    async def kernel_mcp_packages_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Add new packages to sys.path and import them; other requests are answered meanwhile."""
        from kernel_specs.restricted.policy.imports import LiveImports

        live = LiveImports(self.boot, self.allow_imports, self.gate, self.io_loop.add_callback)
        wanted = parent["content"]

        async def answer() -> None:
            modules = await live.take(wanted["allow"], wanted["modules"])
            content = {"modules": modules}
            self.session.send(stream, "kernel_mcp_packages_reply", content, parent, ident)

        task = asyncio.get_running_loop().create_task(answer())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def kernel_mcp_script_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Run the next cell as a whole script."""
        from kernel_specs.restricted import script

        file = script.place(self.boot.workspace, parent["content"]["name"])
        script.Script(self.shell, file).expect()
        self.session.send(stream, "kernel_mcp_script_reply", {}, parent, ident)

    def _abort_queues(self, subshell_id: str | None = None) -> None:
        """Abort only the execute requests queued when a cell failed."""
        self._aborting = True


_WAITING_FILES = (selectors.__file__, service.__file__)
"""Files of the functions in which the main thread waits for requests."""
_INTERRUPTED = {
    "status": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []
}  # fmt: skip


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a program that `error` ends: 130 for an interrupt, 1 by default."""
    if not isinstance(error, SystemExit):
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
