"""Update a notebook that is open in JupyterLab with the cells of its session."""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from pycrdt import Array, Map, Text

from kernel_mcp.barriers import Barrier
from kernel_mcp.lab.sessions import LabSession, Sessions

MOST_TEXT = 500_000
"""Characters of text of one cell that a notebook shows."""
MOST_OUTPUTS = 500
MORE_OUTPUTS = "[… more outputs are in the session …]\n"
HEARD_S = 20.0
LOOK_S = 5.0
"""Seconds between two checks that the server of a silent session is still there."""
_ID = re.compile(r"cell-([0-9]{1,9})")


def content(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a session's cells as a notebook (nbformat 4.5); its metadata has the last `seen`."""
    left_out = record["left_out"]
    first: list[dict[str, Any]] = []
    if left_out:
        words = f"{left_out} earlier cells of this session are not shown."
        first = [{"cell_type": "raw", "id": "left-out", "metadata": {}, "source": words}]
    return {
        "cells": [*first, *record["cells"]],
        "metadata": {
            "kernel-mcp": {"seen": record["seen"]},
            "kernelspec": {"name": "python3", "display_name": "kernel-mcp session"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


class Follower:
    """Follows one session from `begin` on, also when another server restores it.

    `find` returns the shared document once it exists. `returned` is called with the session before
    and after a restore.
    """

    def __init__(
        self,
        joined: LabSession,
        sessions: Sessions,
        find: Callable[[], Awaitable[Any]],
        returned: Callable[[LabSession, LabSession], Awaitable[None]],
    ) -> None:
        self._joined = joined
        self._sessions = sessions
        self._find = find
        self._returned = returned
        self._seen = 0
        self._task: asyncio.Task[None] | None = None
        self.ended = False

    async def begin(self) -> dict[str, Any]:
        """Return the notebook as it is now; later output goes to the shared document.

        Raises SessionNotFound, OSError.
        """
        client, record = await self._join()
        self._task = asyncio.create_task(self._follow(client))
        return content(record)

    async def now(self) -> dict[str, Any]:
        """Return the present notebook while the shared document is being created.

        Raises SessionNotFound.
        """
        return content(await self._sessions.join(self._joined.handle, record=True))

    async def _join(self) -> tuple[AsyncKernelClient, Mapping[str, Any]]:
        """Return a client that receives the session's output from now on, and its cells so far.

        Raises SessionNotFound, OSError, TimeoutError.
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
        return client, found

    async def _follow(self, client: AsyncKernelClient) -> None:
        with Barrier("following a session", self._joined.handle):
            document = await self._find()
            self._seen = int(document.get()["metadata"]["kernel-mcp"]["seen"])
            book = _SharedNotebook(document)
            while True:
                try:
                    await self._receive(client, book)
                finally:
                    client.stop_channels()
                if not self._joined.persisted:
                    break
                client = await self._rejoin(book)
        self.ended = True

    async def _receive(self, client: AsyncKernelClient, notebook: _SharedNotebook) -> None:
        """Show all output until the session ends or its server is gone."""
        while True:
            try:
                message = await client.iopub_channel.get_msg(timeout=LOOK_S)
            except queue.Empty:
                if await self._there() != self._joined:
                    return
                continue
            number = int(str(message["header"]["msg_id"]).rpartition("_")[2])
            if number > self._seen:
                last = False
                with Barrier("showing an output", self._joined.handle):
                    last = notebook.apply(message)
                if last:
                    return

    async def _rejoin(self, notebook: _SharedNotebook) -> AsyncKernelClient:
        """Wait until the session is restored, then continue with the same notebook."""
        while True:
            await asyncio.sleep(LOOK_S)
            found = await self._there()
            if found is None:
                continue
            before, self._joined = self._joined, found
            with Barrier("following a session that is back", found.handle):
                client, record = await self._join()
                self._seen = record["seen"]
                with Barrier("showing what a session has", found.handle):
                    notebook.catch_up(record["cells"])
                with Barrier("connecting a session that is back", found.handle):
                    await self._returned(before, found)
                return client

    async def _there(self) -> LabSession | None:
        return (await self._sessions.listed()).get(self._joined.path)


class _SharedNotebook:
    """The shared document of a notebook (`jupyter_ydoc.YNotebook`)."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._text = 0
        self._clear = False
        self._last = max(map(_number, document.ycells), default=0)
        self._displays: dict[str, tuple[int, int]] = {}
        """Cell number and output index of each display that may be updated, by display id."""

    def apply(self, message: Mapping[str, Any]) -> bool:
        """Apply a message to the notebook; return True if it is the session's last one."""
        kind, said = message["msg_type"], message["content"]
        about = message["metadata"].get("kernel-mcp")
        if about is None:
            return bool(kind == "status" and said["execution_state"] == "dead")
        if about["written"]:
            return False
        cell = self._cell(about["cell"])
        if kind == "execute_input" and about["cell"] > self._last:
            self._last = about["cell"]
            self._document.append_cell(_code_cell(about["cell"], said["code"]))
            cell, self._text, self._clear = self._cell(about["cell"]), 0, False
        if cell is None:  # removed by a person, or no code any more
            return False
        if kind in ("status", "execute_input"):
            busy = kind == "execute_input" or said["execution_state"] == "busy"
            cell["execution_state"] = "running" if busy else "idle"
        elif kind == "clear_output" and not said["wait"]:
            self._empty(cell, about["cell"])
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
            self._empty(cell, number)
        if kind == "stream":
            self._print(outputs, said["name"], said["text"])
        elif len(outputs) < MOST_OUTPUTS:
            output = {"output_type": kind, **said}
            display = output.pop("transient", {}).get("display_id")
            if display is not None:
                self._displays[display] = number, len(outputs)
            outputs.append(Map(output))
        elif len(outputs) == MOST_OUTPUTS:
            more = {"output_type": "stream", "name": "stderr", "text": Text(MORE_OUTPUTS)}
            outputs.append(Map(more))

    def catch_up(self, cells: Sequence[Mapping[str, Any]]) -> None:
        """Add the cells run meanwhile, and complete those that were running."""
        for each in cells:
            number = _number(each)
            there = self._cell(number)
            if number > self._last:
                self._last = number
                self._document.append_cell(dict(each))
            elif there is not None and there.get("execution_state") == "running":
                there["execution_state"] = "idle"
                self._empty(there, number)
                for output in each["outputs"]:
                    there["outputs"].append(Map(_shared(output)))

    def _empty(self, cell: Map, number: int) -> None:
        """Drop the outputs of a cell and the record of its displays."""
        cell["outputs"].clear()
        self._text = 0
        self._displays = {name: at for name, at in self._displays.items() if at[0] != number}

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
        """Return the notebook's code cell for a session's cell; None if it was removed."""
        name, cells = f"cell-{number}", self._document.ycells
        for place in reversed(range(len(cells))):
            if cells[place].get("id") == name:
                found: Map = cells[place]
                return found if found.get("cell_type") == "code" else None
        return None


def _number(cell: Any) -> int:
    """Return the session's number of a notebook cell; 0 for cells of other origin."""
    found = _ID.fullmatch(str(cell.get("id")))
    return int(found.group(1)) if found else 0


def _shared(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return a notebook's output in the form of a shared document."""
    if output["output_type"] != "stream":
        return dict(output)
    text = output["text"]
    return {**output, "text": Text(text if isinstance(text, str) else "".join(text))}


def _code_cell(number: int, code: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "id": f"cell-{number}",
        "metadata": {},
        "execution_count": number,
        "source": code,
        "outputs": [],
    }
