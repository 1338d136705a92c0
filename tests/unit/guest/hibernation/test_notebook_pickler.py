"""Values that the pickler of notebooks saves, as another process would load them."""

from __future__ import annotations

import abc
import gc
import io
import logging
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_specs.restricted.console.streams import Console
from kernel_specs.restricted.hibernation.attempt_limits import CannotKeepError
from kernel_specs.restricted.hibernation.notebook_pickler import (
    Identities,
    NotebookPickler,
    NotebookUnpickler,
)


def pickled(value: object) -> io.BytesIO:
    """A file with the pickle of a value. Raises what pickling raises."""
    file = io.BytesIO()
    pickler = NotebookPickler(
        file, lambda _buffer: True, namespace={}, identities=Identities(), ask=bool
    )
    pickler.dump(value)
    file.seek(0)
    return file


def read(file: io.BytesIO, classes: list[type] | None = None) -> Any:
    """The value of a pickle; `classes` are those of its dump."""
    return NotebookUnpickler(
        file, (), nans={}, classes=[] if classes is None else classes, ask=bool
    ).load()


def use_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the streams of a console those of this process; pytest sets others in fixtures."""
    iopub: Any = SimpleNamespace(waiting=False, lock=threading.RLock())
    console = Console(iopub)
    for name, stream in console._streams.items():
        monkeypatch.setattr(sys, name, stream)


def test_a_standard_stream_is_loaded_as_that_of_the_loading_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_console(monkeypatch)
    stdout = sys.stdout
    saved = [sys.stdout, {"err": sys.stderr}, sys.stdout]
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a child that saves
    file = pickled(saved)
    monkeypatch.setattr(sys, "stdout", stdout)
    out, errors, again = read(file)
    assert out is again is stdout
    assert errors == {"err": sys.stderr}


def test_another_open_file_is_refused() -> None:
    with pytest.raises(CannotKeepError, match="an open file"):
        pickled(io.TextIOWrapper(io.BytesIO()))


class Collecting(logging.Handler):
    """Keeps the messages of its records."""

    def __init__(self) -> None:
        super().__init__(level=5)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.seen.append(record.getMessage())


def test_a_handler_of_logging_comes_back_with_a_lock_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_console(monkeypatch)
    handler = logging.StreamHandler(sys.stdout)
    found = read(pickled(handler))
    assert found.stream is sys.stdout
    assert found.lock not in (None, handler.lock)
    collecting = Collecting()
    collecting.handle(logging.makeLogRecord({"msg": "first"}))
    found = read(pickled(collecting))
    found.handle(logging.makeLogRecord({"msg": "second"}))
    assert (found.seen, found.level) == (["first", "second"], 5)


def test_a_class_that_only_a_registry_refers_to_stays_until_its_variable_is_loaded() -> None:
    class Base(abc.ABC):  # noqa: B024
        pass

    class Registered:
        pass

    Base.register(Registered)
    files = [pickled(Base), pickled(Registered)]
    gone = weakref.ref(Registered)
    del Base, Registered
    gc.collect()
    gc.collect()  # Python 3.10 needs a second pass
    assert gone() is None
    classes: list[type] = []
    base = read(files[0], classes)
    gc.collect()
    assert issubclass(read(files[1], classes), base)
