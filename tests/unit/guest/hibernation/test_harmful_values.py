"""Values that kill or block the process that pickles them are found in forked children."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kernel_specs.restricted.hibernation.attempt_limits import TimeUpError
from kernel_specs.restricted.hibernation.harmful_values import harmful


def test_a_search_whose_time_is_up_names_what_it_has_found(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def work(names: Sequence[str], say: Callable[[str], None]) -> None:
        for name in names:
            say(name)
            if name == "deadly":
                os._exit(3)
            begun.touch()
            threading.Event().wait()

    def ask() -> None:
        if begun.exists():
            raise TimeUpError

    found = harmful(["deadly", "waits"], work, ask)
    assert found == {"deadly": "ended the process that stored it (code 3)"}


def test_the_next_child_goes_on_after_a_value_that_killed_one(tmp_path: Path) -> None:
    def work(names: Sequence[str], say: Callable[[str], None]) -> None:
        for name in names:
            say(name)
            (tmp_path / name).touch()
            if name.startswith("deadly"):
                os.kill(os.getpid(), 9)

    found = harmful(["a", "deadly 1", "b", "deadly 2", "c"], work)
    assert found == dict.fromkeys(
        ["deadly 1", "deadly 2"], "ended the process that stored it (SIGKILL)"
    )
    assert (tmp_path / "c").exists()
