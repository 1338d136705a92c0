"""The operator's view of the sessions of a running server, on a Unix socket in its folder.

A client must run as the server's user or as root, and must send the key that is stored beside the
socket. Code in a sandbox cannot read the key, even if it can connect to the socket.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.grants import granted
from kernel_mcp.config.settings import Settings
from kernel_mcp.linux.proc import Usage
from kernel_mcp.sessions.principals import disk_of
from kernel_mcp.units import KIB, MIB

if TYPE_CHECKING:
    from kernel_mcp.sessions.manager import SessionManager
    from kernel_mcp.sessions.session import Session

SOCKET, KEY = "operator", "operator.key"
"""File names in the folder of a running server, which no other user may enter."""
ANSWER_S = 2.0
"""Time limit of a question and its answer, in seconds."""
WORK_S = 20.0
"""Additional seconds for a question that is not empty: its answer needs more work."""
BY_OPERATOR = "was stopped by the operator of the server"
MOST_BYTES = 16 * MIB
MOST_ASKED = 64 * KIB
"""Maximum bytes of a key and a question together."""
_KEY_BYTES = 32
_CREDENTIALS = struct.Struct("3i")

Facts = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""A function from a question to its answer; the empty question lists the server's sessions."""


async def summary_of(session: Session, now: float, settings: Settings) -> dict[str, Any]:
    """Return a summary of a session; `now` is the time by the clock of sessions, in seconds.

    Its field `persisted_id` is that of the persisted entry, the same on later servers; empty for
    none. `tasks` are the numbers of cells that have not ended and that MCP tasks follow.
    `asks` is the number of the cell with an open question to a person, None for none. `pid` is the
    process of the kernel, and `cell` the number of the running cell; both are 0 for none. `client`
    is the program that sent the last cell, as that names itself. `doors` are the grants of its
    code, by kind, from `settings`.
    """
    kernel, used, pid = session.kernel, Usage(), 0
    if kernel is not None and kernel.exit is None:
        with Barrier("measuring a kernel", session.handle):
            pid, used = kernel.handle.pid, await kernel.handle.limits.used()
    running = session.queue.current
    last = session.queue.cells[-1] if len(session.queue.cells) else None
    began = running.started if running is not None else None
    asks = running.questions if running is not None else None
    return {
        "session": session.handle,
        "name": session.name,
        "persisted_id": "" if (entry := session.persistence.entry) is None else entry.key.id,
        "principal": session.owner,
        "state": session.state,
        "memory_bytes": used.memory_bytes,
        "disk_bytes": disk_of(session),
        "pid": pid,
        "cpu_s": round(used.cpu_s, 2),
        "cell": 0 if running is None else running.number,
        "cell_s": 0.0 if began is None else round(now - began, 1),
        "client": "" if last is None else last.origin.program,
        "doors": granted(settings, session.request.network, session.request.tools),
        "age_s": round(now - session.created, 1),
        "cells": len(session.cells),
        "tasks": [
            cell.number
            for cell in session.cells.unreported
            if cell.outcome is None and session.queue.news.is_followed(cell)
        ],
        "asks": None if asks is None or asks.open is None else asks.open.cell,
    }


async def stop_sessions(manager: SessionManager, handles: Collection[str]) -> dict[str, str]:
    """Stop sessions; return for each why it was not saved, empty if it was."""
    ended: dict[str, str] = {}

    async def stop(session: Session) -> None:
        ended[session.handle] = await manager.stop(session, BY_OPERATOR)

    async with anyio.create_task_group() as tasks:
        for session in manager.sessions:
            if session.handle in handles:
                tasks.start_soon(stop, session)
    return ended


@asynccontextmanager
async def serving_admin(folder: Path, facts: Facts) -> AsyncIterator[None]:
    """Serve the operator's socket inside this block, with answers from `facts`.

    A question is one line: the key and a JSON object. If the socket cannot be opened, the failure
    is logged, and the block runs without the socket.
    """
    key = secrets.token_hex(_KEY_BYTES // 2)
    with Barrier("offering a list of sessions to the operator") as barrier:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(folder / KEY, flags, 0o600), "w", encoding="ascii") as file:
            file.write(key)
        listener = await anyio.create_unix_listener(folder / SOCKET, mode=0o600)
    if barrier.failure is not None:
        yield
        return

    async def answer(stream: anyio.abc.SocketStream) -> None:
        with Barrier("telling the operator of sessions"), anyio.move_on_after(ANSWER_S) as bound:
            async with stream:
                given, words = await _received(stream)
                if _entitled(stream) and hmac.compare_digest(given, key.encode()):
                    question = json.loads(words)
                    bound.deadline += WORK_S if question else 0
                    await stream.send(json.dumps(await facts(question)).encode())

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield
        tasks.cancel_scope.cancel()


def _entitled(stream: anyio.abc.SocketStream) -> bool:
    """Return True if the peer process runs as the server's user or as root."""
    raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    given = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(given)
    return uid in (os.geteuid(), 0)


async def _received(stream: anyio.abc.SocketStream) -> tuple[bytes, bytes]:
    """Return the received key and question, both unchecked."""
    found = b""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while b"\n" not in found and len(found) < MOST_ASKED:
            found += await stream.receive(MOST_ASKED)
    return found[:_KEY_BYTES], found[_KEY_BYTES:]


def ask_all(state: Path, question: Mapping[str, Any] | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the answer of each running server whose folder is in `state`.

    Servers that do not answer in time, or not in JSON, are left out. The empty question requests
    the list of sessions.
    """
    for folder in sorted(state.glob("s-*")):
        with suppress(OSError, ValueError):
            answer = json.loads(_ask(folder, json.dumps(question or {}).encode()))
            if isinstance(answer, dict):
                yield answer


def _ask(folder: Path, question: bytes) -> bytes:
    """Return the answer of one server. Raises OSError, which includes a timeout."""
    key = (folder / KEY).read_bytes()
    ends = time.monotonic() + ANSWER_S + (WORK_S if len(question) > len("{}") else 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(ANSWER_S)
        asked.connect(str(folder / SOCKET))
        asked.sendall(key + question + b"\n")
        answer = b""
        while len(answer) < MOST_BYTES:
            asked.settimeout(max(0.01, ends - time.monotonic()))
            piece = asked.recv(MIB)
            if not piece:
                break
            answer += piece
    return answer
