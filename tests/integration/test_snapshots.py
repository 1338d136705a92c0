"""What a real kernel answers when its variables are taken out of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.guest_client import DELIMITER, GuestKernel, guest, sign, wait_until

PART = 100_000


def ask(
    kernel: GuestKernel, kind: str, content: dict[str, Any], buffers: Sequence[bytes] = ()
) -> tuple[dict[str, Any], list[bytes]]:
    """A request on the shell channel: content and buffers of its reply."""
    send(kernel, kind, content, buffers)
    return answer(kernel)


def send(
    kernel: GuestKernel, kind: str, content: dict[str, Any], buffers: Sequence[bytes] = ()
) -> None:
    header = {"msg_id": "m", "msg_type": kind, "session": "s", "username": "u"}
    header |= {"version": "5.3", "date": "2024-01-01T00:00:00Z"}
    parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
    kernel.channels["shell"].send_multipart([DELIMITER, sign(parts), *parts, *buffers])


def answer(kernel: GuestKernel) -> tuple[dict[str, Any], list[bytes]]:
    assert kernel.channels["shell"].poll(30_000)
    frames = kernel.channels["shell"].recv_multipart()
    parts = frames[frames.index(DELIMITER) + 2 :]
    content = json.loads(parts[3])
    assert isinstance(content, dict)
    return content, parts[4:]


def begin_dump(**options: Any) -> dict[str, Any]:
    return {"max_bytes": 10**8, "seconds": 8, "shared": True, "leave": [], **options}


def dump(kernel: GuestKernel, **options: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The reply to a dump request, and the parts of the dump."""
    reply, _ = ask(kernel, "kernel_mcp_dump_request", begin_dump(**options))
    parts: list[bytes] = []
    while sum(map(len, parts)) < reply["size"]:
        _, buffers = ask(kernel, "kernel_mcp_dump_part_request", {"bytes": PART})
        parts += buffers
    assert sum(map(len, parts)) == reply["size"]
    return reply, parts


def load(kernel: GuestKernel, parts: list[bytes], **options: Any) -> dict[str, Any]:
    for part in parts:
        ask(kernel, "kernel_mcp_load_part_request", {}, [part])
    reply, _ = ask(kernel, "kernel_mcp_load_request", {"seconds": 8, "leave": [], **options})
    return reply


@pytest.fixture
def kernels(tmp_path: Path) -> Any:
    """Makes kernels that end with the test."""
    folders = [tmp_path / name for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
    with guest(folders[0]) as first, guest(folders[1]) as second:
        yield first, second


BAD = """
class Bad:
    def __setstate__(self, state):
        raise ValueError("no")
a, c, common = 1, 3, ["common"]
bad = Bad()
bad.x = 1
b, d = [common], [common]
"""


def test_one_memo_keeps_sharing_and_names_what_lies_behind_a_bad_one(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    old, new = kernels
    old.run(BAD)
    reply, parts = dump(old)
    assert reply["lost"] == {}
    found = load(new, parts)
    assert found["lost"] == {"bad": "ValueError: no"}
    assert found["names"] == ["Bad", "a", "c", "common"]
    assert found["behind"] == ["b", "d"]
    _, parts = dump(old, leave=["bad"])
    assert load(new, parts)["behind"] == []
    assert new.run("b[0] is d[0] is common").outputs() == ["execute_result:True"]


def test_apart_a_bad_one_costs_only_itself(kernels: tuple[GuestKernel, GuestKernel]) -> None:
    old, new = kernels
    old.run(BAD)
    _, parts = dump(old, shared=False)
    found = load(new, parts)
    assert found["lost"] == {"bad": "ValueError: no"}
    assert found["names"] == ["Bad", "a", "c", "common", "b", "d"]
    assert new.run("isinstance(Bad(), Bad), b").outputs() == ["execute_result:(True, [['common']])"]


def test_an_interrupt_ends_a_dump_and_the_kernel_goes_on(tmp_path: Path) -> None:
    with guest(tmp_path) as kernel:
        kernel.run(
            "import time\nclass Slow:\n    def __reduce__(self):\n"
            "        open('begun', 'w').close()\n        time.sleep(60)\n"
            "        return list, ()\nx, y = Slow(), 1"
        )
        send(kernel, "kernel_mcp_dump_request", begin_dump(seconds=400))
        wait_until((kernel.workspace / "begun").exists)
        kernel.interrupt()
        assert answer(kernel)[0]["status"] == "aborted"
        assert kernel.run("y").outputs() == ["execute_result:1"]


def test_memory_of_variables_is_let_go_with_the_dump(tmp_path: Path) -> None:
    with guest(tmp_path) as kernel:
        kernel.run(
            "import pickle\nclass Large:\n    data = bytearray(200_000)\n"
            "    def __reduce_ex__(self, _):\n"
            "        return bytearray, (pickle.PickleBuffer(self.data),)\nx = Large()"
        )
        ask(kernel, "kernel_mcp_dump_request", begin_dump())
        assert kernel.run("Large.data.append(1)").reply["ename"] == "BufferError"
        ask(kernel, "kernel_mcp_dump_part_request", {"bytes": 0})
        assert kernel.run("Large.data.append(1)").reply["status"] == "ok"


def test_an_incomplete_dump_is_not_loaded(kernels: tuple[GuestKernel, GuestKernel]) -> None:
    old, new = kernels
    old.run("x = 1")
    _, parts = dump(old)
    reply = load(new, [parts[0][:-1]])
    assert reply["status"] == "error"
    assert "not complete" in reply["reason"]
    assert load(new, parts)["names"] == ["x"]


def test_names_that_python_and_ipython_keep_are_not_taken(tmp_path: Path) -> None:
    with guest(tmp_path) as kernel:
        kernel.run("x = 1\nx")
        kernel.run("_own, __version__ = 2, '3'")
        reply, _ = dump(kernel)
        assert reply["names"] == ["x", "_own", "__version__"]
        assert [item["name"] for item in reply["variables"]] == ["x"]


def test_more_variables_than_are_kept_are_counted(tmp_path: Path) -> None:
    with guest(tmp_path) as kernel:
        kernel.run("globals().update({f'v{i}': i for i in range(2500)})")
        reply, _ = dump(kernel)
        assert len(reply["names"]) == 2000
        assert reply["lost"] == {"500 more": "only 2,000 variables are kept"}
