"""Names of variables that a kernel reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_NAMES = 2000
NAME_CHARS = 200


class KnownNames:
    """Names that a kernel reports as defined, in order; hostile data.

    `more` is the number of names beyond `MOST_NAMES`.
    """

    def __init__(self, known: KnownNames | None = None) -> None:
        self._names: dict[str, None] = {} if known is None else dict(known._names)
        self.more: int = 0 if known is None else known.more

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def apply(self, changes: object) -> None:
        """Apply the `names` of an execute reply: a list of new names and one of deleted names."""
        if not isinstance(changes, list) or len(changes) != 2:
            return
        for name in texts(changes[1]):
            if name in self._names:
                del self._names[name]
            else:
                self.more = max(0, self.more - 1)
        self.add(texts(changes[0]))

    def add(self, names: Iterable[str]) -> None:
        """Add names that are defined now."""
        for name in names:
            if name in self._names:
                continue
            if len(self._names) < MOST_NAMES:
                self._names[name] = None
            else:
                self.more += 1


def texts(value: object) -> list[str]:
    """Return the texts in a list that a kernel sent, bounded; `value` is hostile data."""
    if not isinstance(value, list):
        return []
    return [
        name for name in value[:MOST_NAMES] if isinstance(name, str) and len(name) <= NAME_CHARS
    ]
