"""The names of a kernel's variables, which are all that is left of them when it dies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_NAMES = 2000
NAME_CHARS = 200


class KnownNames:
    """What a kernel has said about its names, in the order in which they came; hostile data.

    `more` counts names beyond `MOST_NAMES`.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self.more = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def hear(self, news: object) -> None:
        """Take in the `names` of an execute reply: those that came and those that have gone."""
        if not isinstance(news, list) or len(news) != 2:
            return
        for name in _texts(news[1]):
            if name in self._names:
                del self._names[name]
            else:
                self.more = max(0, self.more - 1)
        self.add(_texts(news[0]))

    def add(self, names: Iterable[str]) -> None:
        """Take in names that the kernel has now."""
        for name in names:
            if name in self._names:
                continue
            if len(self._names) < MOST_NAMES:
                self._names[name] = None
            else:
                self.more += 1


def _texts(value: object) -> list[str]:
    if not isinstance(value, list):
        return []
    return [
        name for name in value[:MOST_NAMES] if isinstance(name, str) and len(name) <= NAME_CHARS
    ]
