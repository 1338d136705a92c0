"""Settings of a process that are saved where they have changed, and written in another."""

from __future__ import annotations

import contextlib
import decimal
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from kernel_specs.restricted.hibernation import settings
from kernel_specs.restricted.hibernation.process_state import NAME, ProcessState

LAYER = "/packages/session"


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("PATH", f"/shims:{LAYER}/1/bin:/usr/bin")
    monkeypatch.setenv("ALSO", "here")
    monkeypatch.setattr(warnings, "filters", list(warnings.filters))
    monkeypatch.setattr(sys, "path", [f"{LAYER}/1", LAYER, *dict.fromkeys(sys.path)])
    random.seed(1)
    level, context = logging.getLogger("kernel_mcp.tests").level, decimal.getcontext().copy()
    yield
    logging.getLogger("kernel_mcp.tests").setLevel(level)
    logging.disable(logging.NOTSET)
    decimal.setcontext(context)


def changes(state: ProcessState) -> dict[str, Any]:
    state.hold()
    found: dict[str, Any] = {}
    for name, read in state.changes():
        assert NAME.fullmatch(name)
        with contextlib.suppress(TypeError, OSError):
            found |= read()
    return found


def write(state: ProcessState, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        state.write(name, value)


def test_nothing_is_saved_of_what_has_not_changed() -> None:
    state = ProcessState([LAYER])
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    saved = changes(ProcessState([LAYER]))
    assert saved == {}
    os.environ["PATH"] = f"/shims:{LAYER}/2/bin:{LAYER}/1/bin:/usr/bin"
    sys.path.insert(0, f"{LAYER}/2")  # further packages of the session are no setting
    assert changes(state).keys() <= {"setting os.environ"}  # what pytest has set
    assert "PATH" not in changes(state).get("setting os.environ", {})


def test_environment_is_that_of_code_beside_the_kernels_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = ProcessState([LAYER])
    os.environ.update(NEW="1", PATH=f"/shims:{LAYER}/1/bin:/usr/bin:/workspace/bin")
    del os.environ["ALSO"]
    saved = changes(state)["setting os.environ"]
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(ALSO="here", OTHER="2", PATH=f"/shims:{LAYER}/7/bin:/usr/bin")
    del os.environ["NEW"]
    state.write("setting os.environ", saved)
    assert (os.environ["NEW"], os.environ["OTHER"], "ALSO" in os.environ) == ("1", "2", False)
    assert os.environ["PATH"] == "/shims:/usr/bin:/workspace/bin"


def test_the_order_of_imports_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/stdlib", "/w", LAYER, "/site-packages", "/old"])
    state = ProcessState([LAYER])
    sys.path[:] = ["/stdlib", "/w/lib", LAYER, "/site-packages", "/w"]
    saved = changes(state)["setting sys.path"]
    monkeypatch.setattr(sys, "path", ["/stdlib", "/w", LAYER, "/site-packages", "/old", "/new"])
    following = ProcessState([LAYER])
    following.write("setting sys.path", saved)
    assert sys.path == ["/stdlib", "/w/lib", LAYER, "/site-packages", "/w", "/new"]
    assert changes(following)["setting sys.path"][1] == [each for each in sys.path if each != LAYER]


def test_settings_are_written_as_they_were(tmp_path: Path) -> None:
    state = ProcessState([LAYER])
    (tmp_path / "below").mkdir()
    os.chdir("below")
    random.seed(5)
    warnings.filterwarnings("error", message="a thing", module="here")
    logging.getLogger("kernel_mcp.tests").setLevel(33)
    logging.disable(5)
    decimal.getcontext().prec = 7
    filters, numbers = warnings.filters[0], random.getstate()
    saved = changes(state)
    os.chdir(tmp_path)
    random.seed(6)
    warnings.resetwarnings()
    logging.getLogger("kernel_mcp.tests").setLevel(0)
    logging.disable(logging.NOTSET)
    decimal.getcontext().prec = 28
    write(state, saved)
    assert (Path.cwd().name, random.getstate() == numbers) == ("below", True)
    assert warnings.filters[0] == filters
    assert logging.getLogger("kernel_mcp.tests").level == 33
    assert logging.root.manager.disable == 5
    assert decimal.getcontext().prec == 7


def test_the_time_zone_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    os.putenv("TZ", "UTC")
    time.tzset()
    state = ProcessState([])
    try:
        os.putenv("TZ", "America/New_York")
        time.tzset()
        saved = changes(state)["setting time.tzname"]
        os.putenv("TZ", "UTC")
        time.tzset()
        os.putenv("TZ", "America/New_York")
        state.write("setting time.tzname", saved)
        assert time.tzname == ("EST", "EDT")
    finally:
        os.unsetenv("TZ")
        time.tzset()


def test_what_is_not_plain_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Text:
        pass

    state = ProcessState([])
    odd = Text()
    monkeypatch.setattr(os, "environ", {**os.environ, "ODD": odd, "NEW": "1"})
    saved = changes(state)
    assert saved["setting os.environ: ODD"] is odd
    assert saved["setting os.environ"]["NEW"] == "1"
    assert state.is_early("setting os.environ: ODD")
    state.write("setting os.environ: ODD", "text")
    assert str(os.environ["ODD"]) == "text"


def test_what_code_replaces_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ProcessState([])
    random.seed(2)
    numbers = random.getstate()
    monkeypatch.setattr(random, "getstate", sys.exit)
    monkeypatch.setattr(os, "getcwd", sys.exit)
    assert changes(state)["setting random"] == numbers


def test_one_that_cannot_be_read_or_is_not_known_fails_alone(tmp_path: Path) -> None:
    state = ProcessState([])
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    sys.path.append(["odd"])  # type: ignore[arg-type]
    reading = dict(state.changes())
    with pytest.raises(FileNotFoundError):
        reading["setting os.getcwd"]()
    with pytest.raises(TypeError, match="list stands in it"):
        reading["setting sys.path"]()
    os.chdir(tmp_path)
    with pytest.raises(LookupError, match="this version does not know it"):
        state.write("setting of.tomorrow", 1)


@pytest.fixture
def ipython(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A shell, whose settings are those of IPython."""
    shell: Any = InteractiveShell()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(settings, "get_ipython", lambda: shell)
    return shell


def test_settings_of_the_interpreter_are_written_as_they_were() -> None:
    mask, switch, thresholds = os.umask(0o077), sys.getswitchinterval(), gc.get_threshold()
    try:
        state = ProcessState([])
        os.umask(0o027)
        gc.disable()
        gc.set_threshold(5, 6, 7)
        sys.setswitchinterval(0.25)
        threading.stack_size(2**20)
        locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
        signal.signal(signal.SIGUSR1, print)
        changes(state)
        saved = changes(state)  # the second time, too
        os.umask(0o077)
        gc.enable()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch)
        threading.stack_size(0)
        locale.setlocale(locale.LC_ALL, "C")
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert saved["setting handlers of signals: SIGUSR1"] is print
        write(state, saved)
        assert (os.umask(0o077), gc.isenabled(), gc.get_threshold()) == (0o027, False, (5, 6, 7))
        assert (sys.getswitchinterval(), threading.stack_size()) == (0.25, 2**20)
        assert locale.setlocale(locale.LC_NUMERIC) == "C.UTF-8"
        assert signal.getsignal(signal.SIGUSR1) is print
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch)
        threading.stack_size(0)
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.umask(mask)


def test_the_handler_of_the_signal_that_loading_uses_is_refused_and_others_are_written() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        state = ProcessState([])
        with pytest.raises(ValueError, match="SIGALRM"):
            state.write("setting handlers of signals", {"SIGALRM": 1, "SIGUSR1": 1})
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_settings_of_ipython_are_written_as_they_were(
    ipython: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ProcessState([])

    def mine(*_: object) -> str:
        return "mine"

    mine.__module__ = "__main__"
    ipython.run_line_magic("precision", "3")
    ipython.run_line_magic("alias", "hello echo hello")
    ipython.run_line_magic("load_ext", "autoreload")
    ipython.run_line_magic("autoreload", "2")
    ipython.display_formatter.formatters["text/plain"].pprint = False
    ipython.ast_node_interactivity = "all"
    ipython.magics_manager.register_function(mine, "line", "shout")
    ipython.events.register("post_run_cell", mine)
    ipython.display_formatter.formatters["text/html"].for_type(int, mine)
    saved = changes(state)
    other: Any = InteractiveShell()  # type: ignore[no-untyped-call]
    monkeypatch.setattr(settings, "get_ipython", lambda: other)
    write(state, saved)
    formatters = other.display_formatter.formatters
    assert formatters["text/plain"].float_format == "%.3f"
    assert (formatters["text/plain"].pprint, formatters["text/html"](5)) == (False, "mine")
    assert other.alias_manager.is_alias("hello")
    assert other.ast_node_interactivity == "all"
    assert (other.run_line_magic("shout", ""), mine in other.events.callbacks["post_run_cell"]) == (
        *("mine", True),
    )
    assert other.magics_manager.registry["AutoreloadMagics"]._reloader.check_all
