"""The interactive shell: IPython without tee, history files, colours and shell access."""

# ipykernel and IPython are traitlets classes: untyped, and optional throughout, to mypy.
# mypy: disable-error-code="no-untyped-call, union-attr, attr-defined"

from __future__ import annotations

import ast
import asyncio
import codeop
import contextlib
import gc
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

from ipykernel.jsonutil import json_clean
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult
from traitlets import Any as AnyTrait
from traitlets import Bool, Instance, Type, Unicode, observe

from kernel_specs.restricted.config import (
    INSTALLERS,
    CommandNotAllowedError,
    is_harmless,
    refuse_installation,
)
from kernel_specs.restricted.confine import Reserve
from kernel_specs.restricted.console import tracebacks
from kernel_specs.restricted.console.lacks import lacking
from kernel_specs.restricted.display import bundles, libraries
from kernel_specs.restricted.hibernation.process_state import ProcessState
from kernel_specs.restricted.session_loop import SessionLoop, run_to_end

GOES_ON = (
    "the session goes on and keeps its variables; the tool reset starts it afresh, "
    "the tool close_session ends it"
)


_OWN_TRANSFORMERS = ("IPython.", "kernel_specs.")
DROPPED = "A transformer of cells has failed. All are removed now: run the cell again."


class Shell(ZMQInteractiveShell):
    """Runs cells for the kernel, interruptible exactly where user code runs."""

    displayhook_class = Type(bundles.DisplayHook)
    display_pub_class = Type(bundles.DisplayPublisher)
    gate = AnyTrait()
    reserve = Instance(Reserve, ())
    process_state = Instance(ProcessState)
    """The kernel closes it once the request is answered."""
    loop = Instance(SessionLoop, ())
    enable_tip = Bool(False)
    """A tip in the banner of kernel_info is drawn by `random`, whose state belongs to cells."""

    commands_allowed = Bool(True)
    takes_packages = Bool(False)
    """True if the server installs packages: messages then name its tool."""
    mounted_start = Unicode("")
    """The mount in which cells begin; empty for the workspace."""
    own_builtins: ModuleType | None = None
    """Builtins module of user code; None for Python's own."""
    own_names: Mapping[str, Any] = MappingProxyType({})
    """Names that Python and IPython put into the namespace of cells at the start, with values."""
    last_cell = ""
    """The last cell's code after IPython's transformations."""
    last_error: dict[str, Any] | None = None
    """Content of the cell's last error message; None without one."""
    _interrupted = False

    def run_request(
        self, code: str, *, silent: bool, store_history: bool, cell_id: str | None
    ) -> ExecutionResult:
        """Run one cell as `run_cell` does, transforming it once and without the tee."""
        self._last_traceback = None
        self._last_traceback_during_displayhook = False
        self.last_error = None
        self._interrupted = False
        self.loop.begin_cell()
        self.reserve.renew()
        if "_oh" not in self.user_ns:  # `globals().clear()`: results could not be shown any more
            self.init_user_ns()
        failure = None
        try:
            cell = self.transform_cell(code)
        except Exception as error:  # noqa: BLE001  # shown as the error of the cell
            cell, failure = code, sys.exc_info()
            if not isinstance(error, SyntaxError):  # by which a transformer refuses a cell
                self._drop_transformers()
        self.last_cell = cell
        coroutine = self.run_cell_async(
            code,
            store_history=store_history,
            silent=silent,
            transformed_cell=cell,
            preprocessing_exc_tuple=failure,
            cell_id=cell_id,
        )
        result = None
        try:
            self.gate.open()
            if _may_await(cell) and self.should_run_async(
                code, transformed_cell=cell, preprocessing_exc_tuple=failure
            ):
                result = self.loop.run(coroutine, self._interruptible)
            else:
                result = run_to_end(coroutine)
        except BaseException as error:  # noqa: BLE001  # an interrupt between two steps of IPython
            if isinstance(error, MemoryError):
                self.reserve.open()
            coroutine.close()
            result = self._failed(error, code, silent=silent, store_history=store_history)
        finally:
            if result is not None and tracebacks.is_success(result.error_in_exec):
                result.error_in_exec = None  # as for a program: `unittest.main()`, `sys.exit(0)`
            self.events.trigger("post_execute")
            if not silent:
                self.events.trigger("post_run_cell", result)
            self.gate.close()
            self.gate.cancel = None
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            self.loop.cancel_tasks()
        if self._interrupted and isinstance(result.error_in_exec, asyncio.CancelledError):
            result.error_in_exec = KeyboardInterrupt()
        return result

    def _drop_transformers(self) -> None:
        """Remove cell transformers of user code: a broken one fails on every cell."""
        manager = self.input_transformer_manager
        for each in (
            manager.cleanup_transforms,
            manager.line_transforms,
            manager.token_transformers,
            self.input_transformers_post,
        ):
            own = [one for one in each if str(one.__module__).startswith(_OWN_TRANSFORMERS)]
            if len(own) < len(each):
                each[:] = own
                print(DROPPED, file=sys.stderr)

    def number_cell(self, number: int) -> None:
        """Set the number of the next cell in tracebacks, `In` and `Out`."""
        for inputs in (self.history_manager.input_hist_parsed, self.history_manager.input_hist_raw):
            inputs[number:] = [""] * (number - len(inputs))
        self.execution_count = number

    def interrupted(self) -> None:
        """Note that the task of an awaiting cell is being cancelled because of a SIGINT."""
        self._interrupted = True

    def _interruptible(self, cancel: Callable[[], None]) -> None:
        self.gate.cancel = cancel

    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Publish the exception plainly; IPython's own form costs 5 ms and 20 modules."""
        if exc_tuple is None and sys.exc_info()[0] is not None:
            exc_tuple = sys.exc_info()
        if exc_tuple is not None and tracebacks.is_success(exc_tuple[1]):
            return
        arguments = exc_tuple, filename, tb_offset, exception_only, running_compiled_code
        try:
            self._show_exception(*arguments)
        except MemoryError:  # no memory is left to report the exception, whatever it was
            self.reserve.open()
            self._show_exception(*arguments)

    def _show_exception(
        self,
        exc_tuple: Any,
        filename: str | None,
        tb_offset: int | None,
        exception_only: bool,
        running_compiled_code: bool,
    ) -> None:
        kind, value, trace = self._get_exc_info(exc_tuple)
        if self._interrupted and isinstance(value, asyncio.CancelledError):
            kind, value = KeyboardInterrupt, KeyboardInterrupt()
        if issubclass(kind, MemoryError):
            self.reserve.open()
            self._show_memory_error(_first(value))
        elif (issubclass(kind, SyntaxError) and not running_compiled_code) or kind is UsageError:
            super().showtraceback(
                exc_tuple, filename, tb_offset, exception_only, running_compiled_code
            )
        elif exception_only:
            self._showtraceback(kind, value, tracebacks.exception_only(kind, value))
        else:
            self._showtraceback(kind, value, self._format(kind, value, trace))
            if self.call_pdb:  # `%pdb on`
                try:
                    self.debugger(force=True)
                except StdinNotImplementedError as error:
                    print(error, file=sys.stderr)

    def _show_memory_error(self, value: BaseException) -> None:
        """Publish a MemoryError, then free the locals of its frames."""
        kind, trace = type(value), value.__traceback__
        self._showtraceback(kind, value, self._format(kind, value, trace))
        traceback.clear_frames(trace)
        sys.last_traceback = None
        gc.collect()

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        """Send the error message, shortened; a forked child prints it, as the socket is not its."""
        hook = self.displayhook
        if os.getpid() != hook.session.pid:
            print(*stb, sep="\n", file=sys.stderr, flush=True)
            return
        if getattr(hook, "msg", None) is not None:
            self._last_traceback_during_displayhook = True
        content = {
            "traceback": [tracebacks.shorten(part) for part in stb],
            "ename": etype.__name__,
            "evalue": tracebacks.safe_str(evalue),
            "lacks": "" if isinstance(evalue, MemoryError) else lacking(evalue),
        }
        topic = hook.topic.replace(b"execute_result", b"error")
        hook.session.send(
            hook.pub_socket, "error", json_clean(content), hook.parent_header, ident=topic
        )
        self._last_traceback = content["traceback"]
        self.last_error = content

    def payloadpage_page(
        self, strg: Any, start: int = 0, screen_lines: int = 0, pager_cmd: Any = None
    ) -> None:
        """Show text for a pager as output of the cell."""
        text = strg.get("text/plain", "") if isinstance(strg, dict) else strg
        if start > 0:
            text = "\n".join(text.splitlines()[start:])
        self.display_pub.publish({"text/plain": text})

    def ask_exit(self) -> None:
        """End the cell, for `exit` and `quit`. Raises SystemExit."""
        raise SystemExit(GOES_ON)

    @observe("commands_allowed")
    def _use_automagic(self, change: Any) -> None:
        """Turn automagic on only where commands are allowed."""
        self.automagic = change["new"]

    def system_piped(self, cmd: str) -> None:
        """Run a shell command; its output is captured by the file descriptors 1 and 2."""
        command = self.var_expand(cmd, depth=1)
        self._refuse_installation(command)
        self._require_commands(f"`!{cmd}`")
        status = subprocess.call(command, shell=True)
        self.user_ns["_exit_code"] = status

    system = system_piped
    system_raw = system_piped

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run a shell command and return its output."""
        self._refuse_installation(self.var_expand(cmd, depth=depth + 1))
        self._require_commands(f"`!!{cmd}`")
        return super().getoutput(cmd, split, depth + 1)

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        """Run a line magic that the policy permits."""
        if self.takes_packages and magic_name in INSTALLERS:
            return self.system_piped(f"{magic_name} {line}")
        if not is_harmless(magic_name, line):
            self._require_commands(f"%{magic_name}")
        if magic_name == "time" and (awaiting := self._awaiting(line)):
            return self._time(awaiting)
        if magic_name == "store" and self.find_line_magic("store") is None:
            self.extension_manager.load_extension("storemagic")
        return super().run_line_magic(magic_name, line, _stack_depth + 1)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run a cell magic that the policy permits."""
        if not is_harmless(magic_name):
            self._require_commands(f"%%{magic_name}")
        if magic_name == "time" and not line and (awaiting := self._awaiting(cell)):
            return self._time(awaiting)
        try:
            return super().run_cell_magic(magic_name, line, cell)
        finally:
            self._end_script_thread(line)

    def _end_script_thread(self, line: str) -> None:
        """End the thread of `%%bash` and its kin, which would prevent checkpoints from then on."""
        scripts = self.magics_manager.registry.get("ScriptMagics")
        if scripts is None or scripts.event_loop is None or "--bg" in line.split():
            return
        if hasattr(scripts, "stop_event_loop"):
            scripts.stop_event_loop()
        else:  # before IPython 9
            scripts.event_loop.call_soon_threadsafe(scripts.event_loop.stop)
            scripts.event_loop = None

    def _awaiting(self, text: str) -> list[CodeType]:
        """Compile code that awaits at top level: statements, last value; empty if it does not."""
        if not _may_await(text) or text.lstrip().startswith("-"):  # an option of the magic
            return []
        tree = ast.parse(self.transform_cell(text))
        value = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        parts: list[tuple[ast.Module | ast.Expression, str]] = [(tree, "exec")]
        if isinstance(value, ast.Expr):
            parts.append((ast.Expression(value.value), "eval"))
        found = [
            compile(part, "<timed>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT) for part, mode in parts
        ]
        return found if any(code.co_flags & inspect.CO_COROUTINE for code in found) else []

    def _time(self, parts: list[CodeType]) -> Any:
        """Run code as `%time` does, which awaits nothing itself."""

        async def run() -> Any:
            value = None
            for code in parts:
                value = eval(code, self.user_ns)
                if code.co_flags & inspect.CO_COROUTINE:
                    value = await value
            return value

        timed = partial(self.loop.run, run(), self._interruptible)  # noqa: F841  # named below
        return super().run_line_magic("time", "timed()")

    def take_builtins(self, own: ModuleType) -> None:
        """Run cells with these builtins from now on."""
        self.own_builtins = own
        self._give_builtins()

    def init_user_ns(self) -> None:
        """Fill the namespace of cells, at the start and after a reset of it."""
        super().init_user_ns()
        self.user_ns.setdefault("__name__", "__main__")
        self.own_names = self.own_names or {**self.user_ns, **self.user_ns_hidden}
        self._give_builtins()

    def _give_builtins(self) -> None:
        if self.own_builtins is not None:
            self.user_ns["__builtins__"] = self.user_ns["__builtin__"] = self.own_builtins
            self.user_ns.pop("open", None)  # IPython's wrapper, which refuses descriptors 0 to 2

    def init_display_formatter(self) -> None:
        """Format and complete outputs for a reader without a browser."""
        self.display_formatter = bundles.Formatter(parent=self)
        self.configurables.append(self.display_formatter)  # type: ignore[arg-type]
        self.completed = bundles.Completed(self)

    def enable_matplotlib(self, gui: Any = None) -> Any:
        """Set up plots; those of windows and of a browser are replaced by pictures."""
        return super().enable_matplotlib("inline" if libraries.is_windowed(gui) else gui)

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: there are no windows."""

    def init_instance_attrs(self) -> None:
        """Keep Python's own messages for unfinished cells, which codeop's flag would replace."""
        super().init_instance_attrs()
        self.input_transformer_manager.cleanup_transforms.append(_without_leading_comments)
        self.compile.flags &= ~getattr(codeop, "PyCF_ALLOW_INCOMPLETE_INPUT", 0)

    def init_environment(self) -> None:
        """Leave the environment unchanged: IPython would turn on colours in every program."""

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Keep no copy of each cell's output, as IPython 9 does."""
        yield

    def _format_exception_for_storage(self, exception: BaseException, *_: Any) -> dict[str, Any]:
        """Format no traceback for IPython's history of outputs."""
        return {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    def _format(self, kind: Any, value: Any, trace: Any) -> list[str]:
        return tracebacks.format_exception(kind, value, trace, self._cell_name, self.mounted_start)

    def _cell_name(self, filename: str) -> str | None:
        label = self.compile.format_code_name(filename)
        return f"{label[0]} {label[1]}" if label else None

    def _failed(
        self, error: BaseException, code: str, *, silent: bool, store_history: bool
    ) -> ExecutionResult:
        result = ExecutionResult(ExecutionInfo(code, store_history, silent, True, None))
        result.error_in_exec = error
        self.showtraceback((type(error), error, error.__traceback__))
        return result

    def _refuse_installation(self, command: str) -> None:
        if self.takes_packages:
            refuse_installation(command)

    def _require_commands(self, what: str) -> None:
        if not self.commands_allowed:
            raise CommandNotAllowedError(what)


Shell.__name__ = Shell.__qualname__ = ZMQInteractiveShell.__name__
Shell.__module__ = ZMQInteractiveShell.__module__
"""Libraries and cells detect a notebook by the name of the shell's class."""


def _first(error: BaseException) -> BaseException:
    """Return the first MemoryError of a chain: later ones may come from the kernel itself."""
    while isinstance(error.__context__, MemoryError) and not error.args:
        error = error.__context__
    return error


def _without_leading_comments(lines: list[str]) -> list[str]:
    """Remove comments before a cell magic, which IPython finds in the first line alone."""
    for number, line in enumerate(lines):
        if line.startswith("%%"):
            return lines[number:]
        if line.strip() and not line.startswith("#"):
            break
    return lines


def _may_await(cell: str) -> bool:
    """Return True if a cell may use `await`: it holds "await" or "async".

    A cheap test; IPython's `should_run_async` compiles the cell.
    """
    return "await" in cell or "async" in cell
