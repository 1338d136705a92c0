"""State that hibernation finds beside variables: files, threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from kernel_specs.restricted.hibernation import requests
from kernel_specs.restricted.hibernation.requests import running

pytestmark = [pytest.mark.anyio]


def test_semaphores_hold_no_data_that_could_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, tmp = tmp_path / "shm", tmp_path / "tmp"
    for path in (shared / "sem.loky-1", shared / "psm_1", tmp / "sem.csv"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(requests, "SHARED_MEMORY", str(shared))
    monkeypatch.setattr(requests, "SEMAPHORES", f"{shared}/sem.")
    assert requests.left_files(str(tmp)) == [str(tmp / "sem.csv"), str(shared / "psm_1")]


async def test_threads_and_tasks_of_code_are_named_and_those_of_the_kernel_are_not() -> None:
    def thread(name: str, *, daemon: bool = False) -> threading.Thread:
        made = threading.Thread(target=ended.wait, name=name, daemon=daemon)
        made.start()
        return made

    async def waits() -> None:
        await asyncio.sleep(3600)

    ended = threading.Event()
    service = thread("service")
    threads = [thread("of code"), thread("of a library", daemon=True)]
    task = asyncio.ensure_future(waits())
    found = running(service, asyncio.get_running_loop())
    assert (threads[0], "of code", "a running thread") in found
    assert {each for each, _, _ in found}.isdisjoint({service, threads[1]})
    assert [kind for each, _, kind in found if each is task] == ["a running task"]
    ended.set()
    task.cancel()
