"""A model of the variables of a session, by the answers that its server has delivered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tests.integration.agent import Answer, lost

ABSENT = -1
"""Stands for the value of a variable that is not there; values are counted from 0."""
IN_WORDS = ("all variables", "its variables are gone", "its variables and files are gone")
"""How answers say, besides the names, that nothing is left."""
AS_EARLIER = "variables are as after cell "
"""How answers say that variables may have older values: those cells are to be run again."""


@dataclass
class Verdict:
    """The findings: variables with wrong values, silent losses, and losses without names.

    `alarms` are variables that were said to be lost and are there.
    """

    wrong: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)


class Model:
    """One session. `may_be` maps names to what they may be now; no answer has told which."""

    def __init__(self) -> None:
        self.may_be: dict[str, set[int]] = {}
        self._named: set[str] = set()
        self._excused: set[str] = set()
        self._past: dict[str, set[int]] = {}
        self._as_earlier = False

    def hear(self, answer: Answer) -> None:
        """An answer about this session was delivered."""
        named, excused = self._told_by(answer)
        self._named |= named
        self._excused |= excused
        self._as_earlier |= AS_EARLIER in answer.text.lower()

    def _told_by(self, answer: Answer) -> tuple[set[str], set[str]]:
        """Return the names that an answer calls lost: by name, and by name or in words."""
        known = {name for name, values in self.may_be.items() if values != {ABSENT}}
        named = known.intersection(lost(answer))
        whole = any(words in answer.text.lower() for words in IN_WORDS)
        return named, known if whole else set(named)

    def assign(self, name: str, value: int, *, surely: bool) -> None:
        """A cell that makes `name` has run, or may have."""
        values = {value} if surely else {value, *self.may_be.get(name, {ABSENT})}
        self.may_be[name] = values
        self._past.setdefault(name, set()).add(value)
        if surely:
            self._named.discard(name)
            self._excused.discard(name)

    def remove(self, *, surely: bool) -> None:
        """Everything was asked to go; unless `surely`, it may be there, and may not go unsaid."""
        if surely:
            self.may_be = {name: {ABSENT} for name in self.may_be}
            self._excused.clear()
            self._named.clear()
            self._past.clear()
            self._as_earlier = False

    def compare(self, seen: dict[str, int], shown_by: Answer | None = None) -> Verdict:
        """Judge what the session holds; from now on it is what it should hold.

        What the answer that has shown it calls lost may have gone after the look. A value of before
        is right once an answer said that variables are as they were then.
        """
        found = Verdict()
        shown_as_earlier = shown_by is not None and AS_EARLIER in shown_by.text.lower()
        as_earlier = self._as_earlier or shown_as_earlier
        named, excused = self._told_by(shown_by) if shown_by is not None else (set(), set())
        for name in sorted({*seen, *self.may_be}):
            value, may_be = seen.get(name, ABSENT), self.may_be.get(name, {ABSENT})
            if value == ABSENT and ABSENT not in may_be:
                if name not in self._excused:
                    found.silent.append(name)
                elif name not in self._named:
                    found.unnamed.append(name)
            elif value not in may_be:
                if as_earlier and value in self._past.get(name, ()):
                    continue
                found.wrong.append(f"{name} is {value}, not {sorted(may_be)}")
            elif value != ABSENT and name in self._named - named and len(may_be) == 1:
                found.alarms.append(name)
        self.settle(seen)
        self._named, self._excused, self._as_earlier = named, excused, shown_as_earlier
        return found

    def settle(self, seen: dict[str, int]) -> None:
        """Take what was seen for the truth."""
        self.may_be = {name: {value} for name, value in seen.items()}
        self._named.clear()
        self._excused.clear()
        self._as_earlier = False

    def lacks(self, listed: Collection[str]) -> list[str]:
        """Variables that are surely there, of which nothing was said, and that a list lacks."""
        return [
            name
            for name, values in self.may_be.items()
            if ABSENT not in values and name not in self._excused and name not in listed
        ]
