"""Whatever a kernel says of its variables becomes what a tool result may hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_mcp.errors import LaunchError
from kernel_mcp.kernels.kernel import Kernel, PendingReply
from kernel_mcp.kernels.message_codec import Message
from kernel_mcp.sessions.snapshot import MAX_DESCRIBED, PART_BYTES, Dump, descriptions, handed_over
from kernel_mcp.tools.models import Variable
from tests.unit.json_values import JSON


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["name", "type", "preview", "length", "size", "shape", "x"]), JSON
        )
        | JSON,
        max_size=5,
    )
    | JSON
)
def test_any_json_becomes_variables(value: Any) -> None:
    for item in descriptions(value):
        Variable.model_validate(item, strict=True)


def test_long_lists_and_texts_are_cut() -> None:
    found = descriptions([{"name": "n" * 10_000, "preview": "a\nb\x1b[2J"}] * 1000)
    assert len(found) == MAX_DESCRIBED
    assert len(found[0]["name"]) <= 200
    assert "\n" not in found[0]["preview"]
    assert "\x1b" not in found[0]["preview"]


def test_sizes_that_cannot_be_are_left_out() -> None:
    (found,) = descriptions([{"name": "x", "size": -1, "length": 2**70, "shape": [1, -2]}])
    assert (found["size"], found["length"], found["shape"]) == (None, None, None)


class Unread:
    """A kernel that has not read what was sent to it before, so that it can be given nothing."""

    def __init__(self) -> None:
        self.exit = None
        self.handle = self
        self.read = False
        self.came = b""
        self.thread: threading.Thread | None = None

    def usage(self) -> Any:
        return SimpleNamespace(cpu_s=0.0)

    @contextmanager
    def asking(
        self,
        channel: str,
        kind: str,
        content: dict[str, Any],
        buffers: Sequence[bytes] = (),
        given: int | None = None,
    ) -> Iterator[PendingReply]:
        if given is not None:
            if not self.read:
                raise LaunchError("requests are waiting to be read")
            self.thread = threading.Thread(target=self._drain, args=[os.dup(given)])
            self.thread.start()
        self.read = True
        answer = PendingReply()
        answer.message = Message("reply", "", {"status": "ok", "came": given is not None})
        answer.done.set()
        yield answer

    def _drain(self, descriptor: int) -> None:
        with open(descriptor, "rb") as pipe:
            self.came = pipe.read()


@pytest.mark.anyio
async def test_a_large_dump_reaches_a_kernel_that_has_just_begun(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(bytes(PART_BYTES + 1))
    kernel = Unread()
    with anyio.fail_after(30):
        async with handed_over(cast("Kernel", kernel), Dump(path, PART_BYTES + 1, (), {}, ())):
            assert kernel.thread is not None
            await anyio.to_thread.run_sync(kernel.thread.join)
    assert len(kernel.came) == PART_BYTES + 1
