"""Lines that code asks a person for: the server has them asked, and sends the answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from IPython.core.error import StdinNotImplementedError

from kernel_specs.restricted.originals import threading

PROMPT_CHARS = 2000
"""Longest prompt that is sent; the server shows less."""

_getpid = os.getpid


class Questions:
    """Asks one question after the other, also of threads, while a cell runs that may ask.

    `send` publishes the content of an `input_request`, in order with the output of the cell.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._turn = threading.Lock()
        self._asker = 0
        """The thread that has the turn."""
        self._pid = 0
        """Id of the process that may ask; 0 for none. Nobody answers a child process."""
        self._key = ""
        self._answer: Mapping[str, Any] | None = None
        self._answered = threading.Event()

    def begin(self, *, allowed: bool) -> None:
        """Note that a cell begins, and whether it may ask."""
        self._pid = _getpid() if allowed else 0

    def end(self) -> None:
        """Note that the cell has ended: threads that wait for an answer get an error."""
        self._pid = 0
        self._answered.set()

    def ask(self, what: str, prompt: str, *, secret: bool) -> str:
        """Return the line that the person gives; `what` is the function that was called.

        Raises EOFError if the person gives none, and StdinNotImplementedError if nobody can be
        asked. Raises RuntimeError if a signal handler asks while its thread waits for an answer.
        """
        if self._pid != _getpid():
            refuse(what)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if self._asker == threading.get_ident():
            raise RuntimeError(f"reentrant call of {what}")
        with self._turn:
            self._asker = threading.get_ident()
            try:
                answer = self._ask(prompt, secret=secret)
            finally:
                self._asker = 0
        action = answer.get("action")
        if action == "accept":
            return str(answer.get("value", ""))
        if action == "decline":
            raise EOFError("the person declined to answer")
        if action == "late":
            raise EOFError(f"the person gave no answer within {answer.get('value')}")
        return refuse(what)

    def _ask(self, prompt: str, *, secret: bool) -> Mapping[str, Any]:
        """Return the server's answer; empty if the cell ends before."""
        self._answer, self._key = None, os.urandom(8).hex()
        self._answered.clear()
        if self._pid != _getpid():  # the cell has ended; after `clear`, as `end` sets the event
            return {}
        content = {"key": self._key, "prompt": prompt[:PROMPT_CHARS], "password": secret}
        try:
            self._send(content)
            self._answered.wait()
        finally:
            if self._answer is None:
                self._send({"key": self._key, "withdrawn": True})
            self._key = ""
        return self._answer or {}

    def take(self, answer: Mapping[str, Any]) -> None:
        """Take an answer of the server (service thread); one to no open question is dropped."""
        if self._key and answer.get("key") == self._key:
            self._answer = answer
            self._answered.set()


def refuse(what: str) -> NoReturn:
    """Raise StdinNotImplementedError with a hint."""
    raise StdinNotImplementedError(  # no EOFError: debuggers would end silently
        f"{what} has nobody to ask in this session: put the value into the code instead, as in "
        "name = 'value'"
    )
