"""The kernel's word that it is ready, and with it its process id on the host."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from kernel_mcp.errors import BoundaryBroken, LaunchError
from kernel_mcp.launch.base import take_no_descriptors
from kernel_mcp.linux.folders import Identity
from kernel_mcp.sandbox.base import Sandbox
from kernel_mcp.sandbox.promise import Facts, broken, read_facts

# No kernel is handed over before what its sandbox promises has been read of its process.

logger = logging.getLogger(__name__)

UNPROMISED = ("nothing was promised, and nothing was looked at",)


@dataclass(frozen=True, slots=True)
class Inspected:
    """A kernel that holds what its sandbox promises.

    `words` say what was found, for people. `forget` has to be called once the kernel has ended.
    """

    words: tuple[str, ...]
    forget: Callable[[], None]


class Inspector:
    """Compares kernels with their promise, with the server and with one another.

    One for all launchers of a server.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._server = read_facts(os.getpid())
        self._living: dict[int, tuple[int, Facts]] = {}
        """Kernels by pidfd: their process ids and what was found."""

    def inspect(
        self,
        pid: int,
        pidfd: int,
        identity: Identity | None,
        *,
        forked: bool = False,
        others: Collection[str] = (),
        ceilings: Mapping[str, int] | None = None,
    ) -> Inspected:
        """Look at a kernel that is ready and has run no code; takes some 0.3 ms.

        `others` are namespaces that it may not be in, beside those of the server and of the kernels
        that were inspected and not forgotten; `ceilings` bound its resource limits. `pidfd` has to
        stay open until `forget`.
        Raises BoundaryBroken for what does not hold, LaunchError when it has ended.
        """
        promise = self._sandbox.promise(identity, forked=forked)
        if promise is None:
            return Inspected(UNPROMISED, _nothing)
        try:
            found = read_facts(pid, pidfd)
        except ProcessLookupError:
            raise LaunchError("the kernel ended right after it had become ready") from None
        except PermissionError as reason:
            raise BoundaryBroken(
                f"the kernel was ended before it ran any code: the server may not look at it "
                f"({reason}), so that nobody can tell whether its sandbox holds. Give the server "
                "CAP_SYS_PTRACE (for containers: --cap-add SYS_PTRACE), or run it as an ordinary "
                "user."
            ) from reason
        taken = set(found.alone(promise).values())
        problems = broken(
            promise, found, self._server, {*others, *self._of_others(taken)}, ceilings
        )
        if problems:
            way = "forked from its template" if forked else "started"
            text = (
                f"a kernel that was {way} in the {self._sandbox.name} sandbox was ended before it "
                f"ran any code, because that does not hold: {'; '.join(problems)}. Run "
                "`kernel-mcp doctor` and see what it says."
            )
            logger.error("%s", text)
            raise BoundaryBroken(text)
        self._living[pidfd] = (pid, found)
        own = " ".join(kind for kind in promise.namespaces if kind in found.namespaces)
        writable = [] if promise.writable is None else [f"writable: {' '.join(found.writable)}"]
        spaces = [f"namespaces of its own: {own}"] if own else []
        return Inspected((*found.words(), *writable, *spaces), lambda: self._forget(pidfd))

    def lineage(self, pid: int) -> frozenset[str]:
        """What all processes hold that are between one of a template's kernels and the server.

        Raises ProcessLookupError, PermissionError.
        """
        found: set[str] = set()
        pid = read_facts(pid).parent
        while pid > 1 and pid != os.getpid():
            facts = read_facts(pid)
            found.update(facts.held)
            pid = facts.parent
        return frozenset(found)

    def _of_others(self, taken: set[str]) -> set[str]:
        """What living kernels hold, of those that hold any of `taken`.

        Linux gives the number of a namespace that is gone to the next: who holds one is looked at
        again.
        """
        held: set[str] = set()
        for pidfd, (pid, facts) in list(self._living.items()):
            if not taken.isdisjoint(facts.held):
                try:
                    held.update(read_facts(pid, pidfd).held)
                except OSError:
                    continue  # it has ended, its namespaces with it
        return held

    def _forget(self, pidfd: int) -> None:
        self._living.pop(pidfd, None)


def _nothing() -> None:
    """There is nothing to forget."""


_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid, as the receiver's namespaces number them."""
MESSAGE_BYTES = 64 * 1024


class ReadinessChannel:
    """A pair of connected sockets: one end for the kernel, one to wait on.

    The operating system adds the sender's process id, translated into this namespace.
    """

    def __init__(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        self._host, guest = socket.socketpair(socket.AF_UNIX, kind)
        self._host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        take_no_descriptors(self._host)
        self._host.setblocking(False)
        self.guest_fd = guest.detach()
        """To be passed to the process and closed by whoever starts it."""
        self.said: dict[str, Any] = {}
        """All that came with the word."""

    async def wait(self) -> int:
        """Return the host's process id of the ready kernel.

        Raises LaunchError when it says that it failed or closes its end without a word.
        """
        await anyio.wait_readable(self._host)
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            packet, extra, _, _ = self._host.recvmsg(MESSAGE_BYTES, space)
        except ConnectionResetError:
            packet, extra = b"", []
        if not packet:
            raise LaunchError("the kernel ended before it was ready")
        said = _parse(packet)
        if said.get("ready") is not True:
            raise LaunchError(f"the kernel could not start: {str(said.get('error'))[:2000]}")
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                self.said = said
                return int(_CREDENTIALS.unpack(data)[0])
        raise LaunchError("the kernel's readiness came without credentials")

    def close(self) -> None:
        """Close the host's end."""
        self._host.close()


def _parse(packet: bytes) -> dict[str, Any]:
    try:
        said = json.loads(packet)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {"error": "its readiness message is not JSON"}
