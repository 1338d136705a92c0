"""The seam between the figures and what they are measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks.results import BenchmarkError

ONE = "1"
PANDAS = """\
import pandas as pd

frame = pd.DataFrame({"a": range(1000), "b": range(1000)})
int(frame.groupby(frame.a % 7).b.sum().max())"""
PANDAS_ANSWER = "71786"
PLOT = """\
import matplotlib.pyplot as plt

plt.plot([1, 4, 9, 16])
plt.show()"""
PLOT_AT_ONCE = "import matplotlib.pyplot as plt; plt.plot([1, 2, 3]); plt.show()"
LINES = 10**6
PRINT_LINES = f"for i in range({LINES}): print(i)"
ENDLESS = """\
print("begun", flush=True)
while True: pass"""


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of a cell."""

    text: str
    pictures: int = 0

    def must_hold(self, text: str) -> None:
        """Raises BenchmarkError when the answer lacks `text`."""
        if text not in self.text:
            raise BenchmarkError(f"the answer lacks {text!r}: {self.text[-200:]!r}")

    def must_show_a_picture(self) -> None:
        """Raises BenchmarkError when there is none."""
        if not self.pictures:
            raise BenchmarkError(f"no picture came back: {self.text[-200:]!r}")


class Notebook(Protocol):
    """One session. Every method raises BenchmarkError when it did not go as it has to."""

    async def run(self, code: str) -> Answer:
        """Run a cell to its end."""

    async def begin(self, code: str) -> None:
        """Start a cell that does not end, and return once it is running."""

    async def interrupt(self) -> None:
        """Stop the cell and return once it has ended."""

    async def close(self) -> None:
        """End the session and its kernel."""


class Notebooks(Protocol):
    """Something that has sessions."""

    async def open(self) -> Notebook:
        """A new session; its kernel may start with the first cell."""
