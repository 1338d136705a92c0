"""Questions that the code of a cell asks a person, such as `input()`, and their answers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol, TypeAlias

import anyio

from kernel_mcp.kernels.run import InputRequest
from kernel_mcp.output.items import Item, TextItem
from kernel_mcp.output.text import one_line
from kernel_mcp.records import dataclass

Mode: TypeAlias = Literal["form", "url"]
"""Modes of MCP elicitation: a form of the client, or a page at an address."""
Action: TypeAlias = Literal["accept", "decline", "cancel"]

PROMPT_CHARS = 500
PRINTED_CHARS = 300
"""Longest excerpt of what the cell printed just before it asked."""
PRINTED_LINES = 3
ANSWER_CHARS = 100_000
MOST_QUESTIONS = 100
"""Questions of one cell."""
NOBODY = "nobody"
"""Action that the kernel is sent if nobody can be asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a person to the question with `key`; `value` counts if it is accepted.

    `typed` is True for one that comes from a page. A client that accepts a secret question has
    only opened its page.
    """

    key: str
    action: Action
    value: str = ""
    typed: bool = False

    def settles(self, question: Question) -> bool:
        """Return True if this answers the question, so that it is closed."""
        return not question.secret or self.typed or self.action != "accept"


@dataclass(frozen=True, slots=True)
class Question:
    """A question that is open.

    key      identifies it among those of its cell
    cell     number of the cell
    prompt   text of the code on one line; hostile
    printed  end of the output since the last question, on one line; hostile
    secret   True for `getpass()`
    choices  answers of which the person chooses one, as the server asks; empty for free text
    """

    key: str
    cell: int
    prompt: str
    printed: str = ""
    secret: bool = False
    choices: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The text for a person. It begins with who asks, which the code cannot change."""
        if self.choices:
            return f"kernel-mcp asks: may the code in notebook cell {self.cell} {self.prompt}"
        before = f" (It printed before: {self.printed})" if self.printed else ""
        return f"Code in notebook cell {self.cell} asks: {self.prompt or '(no prompt)'}{before}"


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A question that is open, or waits for its turn.

    reply  is called with how it ended, a key of `_DID`, and the answer
    key    the kernel's; empty for a question of the server, which has `choices`
    """

    prompt: str
    reply: Callable[[str, str], None]
    key: str = ""
    secret: bool = False
    choices: tuple[str, ...] = ()


class Clock:
    """The time of a scope, which rests while a question is open."""

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._left_s: float | None = None

    def rest(self, *, resting: bool) -> None:
        """Stop the time, or start it again."""
        now = anyio.current_time()
        if resting and self._left_s is None:
            self._left_s, self._scope.deadline = self._scope.deadline - now, math.inf
        elif not resting and self._left_s is not None:
            self._scope.deadline, self._left_s = now + self._left_s, None


class AskingCell(Protocol):
    """The part of a cell that its questions use."""

    number: int

    def rest(self, *, resting: bool) -> None:
        """Stop the clock of the cell's time limit, or start it again."""

    def printed(self) -> list[Item]:
        """Return the output since the last call."""

    def note_change(self) -> None:
        """Wake all who wait for a change of the cell."""


class Questions:
    """The questions of one cell, of which one is open at a time."""

    def __init__(
        self, cell: AskingCell, seconds: float, modes: frozenset[str], note: Callable[..., None]
    ) -> None:
        """A person has `seconds` for each; the client of the call declares `modes`.

        `note` records the facts about each question for the audit trail, without its text.
        """
        self.open: Question | None = None
        self.reply: Callable[[str, str, str], None] = lambda _key, _action, _value: None
        """Sends key, action and value to the kernel."""
        self._cell = cell
        self._seconds = seconds
        self._modes = modes
        self._note = note
        self._opened = False
        """True if the client has opened the page of the open question."""
        self._wish: Wish | None = None
        self._waiting: deque[Wish] = deque()
        self._count = 0
        self._ended = False
        self._nobody = False
        """True once the client has answered that it asks nobody."""
        self._timer: asyncio.TimerHandle | None = None
        self._cut = False
        """True if an answer was too long for the code."""
        self._ends: Counter[str] = Counter()
        self._opening: set[anyio.CancelScope] = set()
        self._closing: set[anyio.CancelScope] = set()
        self._clocks: set[Clock] = set()

    def take(self, request: InputRequest) -> None:
        """Open the question of a kernel, or withdraw that which its code no longer asks."""
        mine = [each for each in (self._wish, *self._waiting) if each is not None and each.key]
        for each in mine:  # code has one question at a time
            if not request.withdrawn or each.key == request.key:
                self.drop(each)
        if request.withdrawn:
            return
        reply = partial(self._reply_to_kernel, request.key)
        prompt = request.prompt.strip()
        if not self._put(Wish(prompt, reply, request.key, request.secret)):
            self.reply(request.key, NOBODY, "")

    def decide(
        self, prompt: str, choices: tuple[str, ...], reply: Callable[[str, str], None]
    ) -> Wish | None:
        """Ask the person for one of `choices`, when it is its turn; None if nobody can be asked.

        `prompt` completes the sentence "May the code in cell N …".
        """
        wish = Wish(prompt, reply, choices=choices)
        return wish if self._put(wish) else None

    @property
    def used_up(self) -> bool:
        """Return True if the cell has asked as often as one may."""
        return self._count + len(self._waiting) >= MOST_QUESTIONS

    def drop(self, wish: Wish) -> None:
        """Withdraw a question whose answer is no longer needed."""
        if wish is self._wish:
            self.withdraw()
        elif wish in self._waiting:
            self._waiting.remove(wish)

    def end(self) -> None:
        """Withdraw all questions, as the cell has ended."""
        self._ended = True
        while self._waiting:
            self._waiting.popleft().reply("withdraw", "")
        self.withdraw()

    def _put(self, wish: Wish) -> bool:
        """Open a question now or in its turn; return False if nobody can be asked."""
        mode: Mode = "url" if wish.secret else "form"
        if self._ended or self._nobody or mode not in self._modes or self.used_up:
            return False
        self._waiting.append(wish)
        if self.open is None:
            self._open_next()
        return True

    def _open_next(self) -> None:
        wish = self._wish = self._waiting.popleft()
        self._count += 1
        self._opened = False
        self.open = Question(
            f"{self._cell.number}-{self._count}",
            self._cell.number,
            one_line(wish.prompt, PROMPT_CHARS),
            "" if wish.choices else _excerpt(self._cell.printed()),
            wish.secret,
            wish.choices,
        )
        self._rest(resting=True)
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._give_up)
        for scope in self._opening:
            scope.cancel()
        self._cell.note_change()

    def _reply_to_kernel(self, key: str, end: str, value: str) -> None:
        if end != "withdraw":
            self.reply(key, NOBODY if end == "cancel" else end, value)

    def answer(self, answer: Answer | None) -> bool:
        """Send an answer to the code; return False if there is none, or no question for it."""
        if self.open is None or answer is None or answer.key != self.open.key:
            return False
        if not answer.settles(self.open):
            self._opened = True
            return False
        self._nobody = self._nobody or answer.action == "cancel"
        value = answer.value[:ANSWER_CHARS] if answer.action == "accept" else ""
        self._cut = self._cut or len(answer.value) > ANSWER_CHARS
        self._close(answer.action, value)
        return True

    def withdraw(self) -> None:
        """Close the open question: the cell has ended, or its code no longer waits."""
        self._close("withdraw")

    @property
    def to_put(self) -> Question | None:
        """The open question, unless the client has opened its page."""
        return None if self._opened else self.open

    @contextmanager
    def ending(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Cancel `scope` inside the block once there is a question to put."""
        if self.to_put is not None:
            scope.cancel()
        self._opening.add(scope)
        try:
            yield
        finally:
            self._opening.discard(scope)

    @contextmanager
    def resting(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Let the time of `scope` rest inside the block while a question is open."""
        clock = Clock(scope)
        clock.rest(resting=self.open is not None)
        self._clocks.add(clock)
        try:
            yield
        finally:
            self._clocks.discard(clock)

    @contextmanager
    def while_open(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Cancel `scope` inside the block once the open question is closed."""
        self._closing.add(scope)
        try:
            yield
        finally:
            self._closing.discard(scope)

    @property
    def words(self) -> list[str]:
        """A notice of how many questions were asked; none for none."""
        ends = [f"{count} {_DID[end]}" for end, count in self._ends.items()]
        most = self._ends.total() >= MOST_QUESTIONS
        bound = f". One cell may ask {MOST_QUESTIONS} times" if most else ""
        cut = f". The code got the first {ANSWER_CHARS:,} characters of an answer"
        words = f"The code asked the person: {', '.join(ends)}{bound}{cut if self._cut else ''}"
        return [words] if ends else []

    def _rest(self, *, resting: bool) -> None:
        self._cell.rest(resting=resting)
        for clock in self._clocks:
            clock.rest(resting=resting)

    def _give_up(self) -> None:
        self._close("late")

    def _close(self, end: str, value: str = "") -> None:
        question, self.open = self.open, None
        wish, self._wish = self._wish, None
        if question is None or wish is None:
            return
        wish.reply(end, f"{self._seconds:g} s" if end == "late" else value)
        if self._timer is not None:
            self._timer.cancel()
        for scope in self._closing:
            scope.cancel()
        if not question.choices:
            self._ends[end] += 1
        self._note(
            cell=question.cell,
            secret=question.secret,
            prompt_chars=len(question.prompt),
            answer=end,
            answer_chars=len(value),
        )
        self._rest(resting=False)
        while self._waiting and self._nobody:
            self._waiting.popleft().reply("cancel", "")
        if self._waiting:
            self._open_next()
        self._cell.note_change()


_DID = {
    "accept": "answered",
    "decline": "declined",
    "cancel": "not asked, as the client cancelled",
    "late": "not answered in time",
    "withdraw": "withdrawn",
}


def _excerpt(items: list[Item]) -> str:
    """Return the last lines of the text in `items`, on one line."""
    text = next((each.text for each in reversed(items) if isinstance(each, TextItem)), "")
    lines = [line.strip() for line in text[-PRINTED_CHARS:].splitlines() if line.strip()]
    return one_line(" / ".join(lines[-PRINTED_LINES:]), PRINTED_CHARS)
