"""Has a notebook that is open in JupyterLab follow the cells of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from pycrdt import Array, Map, Text

from kernel_mcp.barriers import Barrier
from kernel_mcp.lab.joined import Joined, Sessions

MOST_TEXT = 500_000
"""Characters of text of one cell that a notebook shows."""
MOST_OUTPUTS = 500
HEARD_S = 20.0


def content(cells: list[dict[str, Any]], left_out: int) -> dict[str, Any]:
    """A notebook of these cells (nbformat 4.5)."""
    first: list[dict[str, Any]] = []
    if left_out:
        words = f"{left_out} earlier cells of this session are not shown."
        first = [{"cell_type": "raw", "id": "left-out", "metadata": {}, "source": words}]
    return {
        "cells": [*first, *cells],
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "kernel-mcp session"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


class Follower:
    """Follows one session from `begin` on; `find` gives the shared document once that is there."""

    def __init__(
        self, joined: Joined, sessions: Sessions, find: Callable[[], Awaitable[Any]]
    ) -> None:
        self._joined = joined
        self._sessions = sessions
        self._find = find
        self._seen = 0
        self._task: asyncio.Task[None] | None = None
        self.ended = False

    async def begin(self) -> dict[str, Any]:
        """The notebook as it is now; what comes after goes to the shared document.

        Raises SessionNotFound, OSError.
        """
        client = AsyncKernelClient()
        client.load_connection_info(await self._sessions.connection(self._joined.handle))
        client.start_channels(shell=False, stdin=False, hb=False, control=False)
        try:
            await asyncio.wait_for(client.iopub_channel.get_msg(), HEARD_S)  # the welcome
            found = await self._sessions.join(self._joined.handle, record=True)
        except BaseException:
            client.stop_channels()
            raise
        self._seen = found["seen"]
        self._task = asyncio.create_task(self._follow(client))
        return content(found["cells"], found["left_out"])

    async def _follow(self, client: AsyncKernelClient) -> None:
        with Barrier("following a session", self._joined.handle):
            book = _Book(await self._find())
            while not self.ended:
                message = await client.iopub_channel.get_msg()
                number = int(str(message["header"]["msg_id"]).rpartition("_")[2])
                if number > self._seen:
                    with Barrier("showing an output", self._joined.handle):
                        self.ended = book.take(message)
        self.ended = True
        client.stop_channels()


class _Book:
    """The shared document of a notebook (`jupyter_ydoc.YNotebook`)."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._text = 0
        self._clear = False
        self._displays: dict[str, tuple[int, int]] = {}
        """The cell of each display that may change, and its place there."""

    def take(self, message: Mapping[str, Any]) -> bool:
        """Show what a message says; whether it is the last one of the session."""
        kind, said = message["msg_type"], message["content"]
        about = message["metadata"].get("kernel-mcp")
        if about is None:
            return bool(kind == "status" and said["execution_state"] == "dead")
        if about["written"]:
            return False
        cell = self._cell(about["cell"])
        if kind == "execute_input" and cell is None:
            self._document.append_cell(_code_cell(about["cell"], said["code"]))
            cell, self._text, self._clear = self._cell(about["cell"]), 0, False
        if cell is None:  # removed by a person
            return False
        if kind in ("status", "execute_input"):
            busy = kind == "execute_input" or said["execution_state"] == "busy"
            cell["execution_state"] = "running" if busy else "idle"
        elif kind == "clear_output" and not said["wait"]:
            cell["outputs"].clear()
        elif kind == "clear_output":
            self._clear = True
        elif kind == "update_display_data":
            self._update(said)
        else:
            self._show(cell, about["cell"], kind, said)
        return False

    def _show(self, cell: Map, number: int, kind: str, said: Mapping[str, Any]) -> None:
        outputs: Array = cell["outputs"]
        if self._clear:
            self._clear = False
            outputs.clear()
        if kind == "stream":
            self._print(outputs, said["name"], said["text"])
        elif len(outputs) < MOST_OUTPUTS:
            output = {"output_type": kind, **said}
            display = output.pop("transient", {}).get("display_id")
            if display is not None:
                self._displays[display] = number, len(outputs)
            outputs.append(Map(output))

    def _print(self, outputs: Array, name: str, text: str) -> None:
        left = MOST_TEXT - self._text
        if left <= 0:
            return
        self._text += len(text)
        if self._text >= MOST_TEXT:
            text = f"{text[:left]}\n[… more text is in the session …]\n"
        last = outputs[len(outputs) - 1] if len(outputs) else None
        if isinstance(last, Map) and last.get("name") == name and isinstance(last["text"], Text):
            last["text"] += text
        else:
            outputs.append(Map({"output_type": "stream", "name": name, "text": Text(text)}))

    def _update(self, said: Mapping[str, Any]) -> None:
        number, place = self._displays.get(said["transient"].get("display_id"), (0, 0))
        cell = self._cell(number)
        if cell is not None and place < len(cell["outputs"]):
            output = {"output_type": "display_data", **said}
            output.pop("transient")
            cell["outputs"][place] = Map(output)

    def _cell(self, number: int) -> Map | None:
        """The cell of a session's cell; the last ones are looked at first."""
        name, cells = f"cell-{number}", self._document.ycells
        for place in reversed(range(len(cells))):
            if cells[place].get("id") == name:
                found: Map = cells[place]
                return found
        return None


def _code_cell(number: int, code: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "metadata": {},
        "execution_count": number,
        "source": code,
        "outputs": [],
    }
