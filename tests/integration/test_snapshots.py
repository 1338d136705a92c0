"""The answers of a real kernel when its variables are dumped."""

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
    return {"max_bytes": 10**8, "seconds": 8, "leave": [], **options}


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
    return step(kernel, **options)


def step(kernel: GuestKernel, **options: Any) -> dict[str, Any]:
    content = {"seconds": 8, "count": 0, "leave": [], "files": [], **options}
    return ask(kernel, "kernel_mcp_load_request", content)[0]


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
bad.x = common
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


def test_a_bad_one_that_shares_nothing_costs_only_itself(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    old, new = kernels
    old.run(BAD.replace("bad.x = common", "bad.x = 1"))
    found = load(new, dump(old)[1])
    assert found["lost"] == {"bad": "ValueError: no"}
    assert found["names"] == ["Bad", "a", "c", "common", "b", "d"]
    assert new.run("b[0] is d[0] is common").outputs() == ["execute_result:True"]


EQUAL = """
class Equal:
    __slots__ = ("count",)
    def __init__(self, count):
        self.count = count
    def __reduce__(self):
        return Equal, (self.count,)
    def __eq__(self, other):
        return self.count == other.count
    def __hash__(self):
        return 7
"""


def test_objects_that_are_equal_by_a_rule_of_their_class_are_shared_all_the_same(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    for kernel in kernels:
        (kernel.workspace / "rules.py").write_text(EQUAL)
    old, new = kernels
    old.run("import rules\none = rules.Equal(0)\nheld = [one]")
    assert load(new, dump(old)[1])["lost"] == {}
    assert new.run("one.count = 5\nheld[0].count").outputs() == ["execute_result:5"]


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


def test_more_variables_than_are_kept_are_all_named(tmp_path: Path) -> None:
    with guest(tmp_path) as kernel:
        kernel.run("globals().update({f'v{i}': i for i in range(2500)})")
        reply, _ = dump(kernel)
        assert len(reply["names"]) == 2000
        assert list(reply["lost"]) == [f"v{i}" for i in range(2000, 2500)]
        assert set(reply["lost"].values()) == {"only 2,000 variables are kept"}


def test_names_that_code_gives_another_meaning_are_its_own(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    old, new = kernels
    old.run("'a result'")
    old.run("_ = In = 5\n_i = [6]\n_7 = None\nglobals()['x' * 300] = globals()['a\\nb'] = 1")
    reply, parts = dump(old)
    assert reply["names"] == ["In", "_", "_i", "_7"]
    assert list(reply["lost"]) == ["xxxxxxxxxxxxxxxxxxxx…", "a\\nb…"]
    load(new, parts)
    assert new.run("_, In, _7, Out[1]").outputs()[0].endswith("(5, 5, None, 'a result')")


def test_variables_are_loaded_in_steps_where_one_may_do_harm(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    old, new = kernels
    old.run(BAD.replace("bad.x = common", "bad.x = 1"))
    reply, parts = dump(old)
    assert reply["stored"] == ["a", "c", "Bad", "bad", "common", "b", "d"]
    assert load(new, parts, count=1)["names"] == ["a"]
    found = step(new, count=1, leave=["c"])
    assert found["names"] == ["Bad"]
    assert found["left"] == 4
    found = step(new)
    assert found["lost"] == {"bad": "ValueError: no"}
    assert found["left"] == 0
    assert new.run("a, b, 'c' in dir()").outputs() == ["execute_result:(1, [['common']], False)"]


SLOW = """
import time
end = time.thread_time() + 1.5
while time.thread_time() < end:
    pass
class Thing: pass
"""


@pytest.mark.ways
def test_imports_take_nothing_of_the_time_of_a_variable(
    kernels: tuple[GuestKernel, GuestKernel],
) -> None:
    old, new = kernels
    for kernel in kernels:
        (kernel.workspace / "slow.py").write_text(SLOW)
        kernel.run("import sys; sys.path.insert(0, '.')")
    old.run("import slow; x = slow.Thing(); del slow")
    _, parts = dump(old, seconds=8)
    assert load(new, parts, seconds=8)["names"] == ["sys", "x"]
    assert load(kernels[1], dump(old, seconds=4)[1], seconds=4)["lost"] == {}


def test_files_in_folders_of_the_kernel_are_named_and_looked_for(
    kernels: tuple[GuestKernel, GuestKernel], tmp_path: Path
) -> None:
    old, new = kernels
    (tmp_path / "1" / ".cache").mkdir()
    (tmp_path / "1" / ".cache" / "font").write_text("not told")
    kept, gone = tmp_path / "1" / "kept.csv", tmp_path / "1" / "gone.csv"
    kept.write_text("x")
    gone.write_text("x")
    reply, parts = dump(old)
    assert {str(kept), str(gone)} <= set(reply["files"])
    assert not any("font" in path for path in reply["files"])
    gone.unlink()
    found = load(new, parts, files=[str(kept), str(gone)])
    assert found["missing"] == [str(gone)]
