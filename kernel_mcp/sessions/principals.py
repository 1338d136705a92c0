"""Quotas of principals: their bounds, their current use, and the reaction when one is exceeded.

The package `limits` enforces the limits of one kernel. This module enforces those of all kernels of
one principal together, and its share of the processors.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from weakref import WeakValueDictionary

import anyio

from kernel_mcp.barriers import Barrier
from kernel_mcp.config.quotas import Quotas
from kernel_mcp.config.settings import Limits, Settings
from kernel_mcp.errors import SessionLimitReached
from kernel_mcp.identity import Principal
from kernel_mcp.records import dataclass
from kernel_mcp.sessions.session import Session
from kernel_mcp.units import format_bytes

logger = logging.getLogger(__name__)

CHECK_S = 0.25
"""Seconds between two comparisons of use and quotas while code of any principal runs."""
REST_S = 1.0
"""The same while no code runs."""
MOST_ASLEEP = 64
"""Hibernated sessions of one principal without a quota of its own."""
MOST_KNOWN = 10_000
AT_WORK = 1
"""Maximum number of concurrent calls of one principal that the server computes itself, if there are
several principals."""


@dataclass(frozen=True, slots=True)
class Use:
    """The use that one principal makes of its quotas.

    sessions   sessions with a kernel; one with its branches counts once
    asleep     hibernated sessions
    cells      cells that run or wait
    computing  kernels in which code runs
    memory     bytes of all kernels
    largest    bytes of the kernel that is killed first if the memory quota is exceeded
    disk       bytes of all workspaces and added packages
    """

    sessions: int = 0
    asleep: int = 0
    cells: int = 0
    computing: int = 0
    memory: int = 0
    largest: int = 0
    disk: int = 0

    def __add__(self, other: Use) -> Use:
        """Return the sum of both; `largest` is the larger one."""
        return Use(
            **{
                each.name: (max if each.name == "largest" else _sum)(
                    getattr(self, each.name), getattr(other, each.name)
                )
                for each in fields(self)
            }
        )


def _sum(one: int, other: int) -> int:
    return one + other


NOTHING = Use()


class Others:
    """The use of quotas on other servers that share them; this class is for a server alone.

    `kind` is "sessions" or "asleep" in all methods.
    """

    def use(self, principal: str) -> Use:
        """Return a principal's use on the other servers, as last reported."""
        return NOTHING

    async def claim(self, principal: str, kind: str, own: int, most: int) -> bool:
        """Return True if `own` sessions here and those on other servers are at most `most`.

        Later claims of other servers count them. Raises KernelMcpError if the others' use cannot be
        determined.
        """
        return True

    async def idlest(
        self, principal: str, kind: str, without: Collection[str]
    ) -> tuple[str, float] | None:
        """Return the server that has the longest idle session, and the session's idle seconds.

        Servers in `without` are ignored. None if no other server has such a session.
        """
        return None

    async def evict_one(self, where: str, principal: str, kind: str) -> bool:
        """Request that the server `where` ends its longest idle session; return True if it did.

        It hibernates a session, or closes a hibernated one for the kind "asleep".
        """
        return False

    async def gives_way(self, principal: str, use: Use, most: int) -> bool:
        """Return True if a principal's largest kernel here must end to keep within `most` bytes.

        The other servers no longer count that kernel, so that only one ends at a time. Raises
        KernelMcpError if the others' use cannot be determined.
        """
        return True


class Principals:
    """The quotas of principals. By default each of several has at most half of the sessions."""

    def __init__(self, settings: Settings, others: Others | None = None) -> None:
        self.others = others or Others()
        self._given = settings.quotas
        self._known: OrderedDict[str, Principal] = OrderedDict()
        most, asleep = settings.max_sessions, MOST_ASLEEP
        if settings.several:
            most, asleep = (most + 1) // 2, (asleep + 1) // 2
        self._default = settings.quotas.over(Quotas(sessions=most, asleep=asleep))
        self.several = settings.several
        self._call_limiters: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()

    def seen(self, who: Principal) -> None:
        """Note a call of a principal; its present quotas apply from now on."""
        self._known[who.name] = who
        self._known.move_to_end(who.name)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def quotas(self, name: str) -> Quotas:
        """Return the quotas of a principal; `sessions` and `asleep` are never None."""
        who = self._known.get(name)
        return self._default if who is None else who.quotas.over(self._default)

    def shared(self, name: str) -> Quotas:
        """Return the quotas that apply to all servers together: those set by the operator."""
        who = self._known.get(name)
        return self._given if who is None else who.quotas.over(self._given)

    def limits(self, name: str, wanted: Limits | None, own: Limits) -> Limits | None:
        """Return the limits of one session, cut to its principal's quotas.

        None stands for `own`, the limits of the settings.
        """
        quotas, limits = self.quotas(name), wanted or own
        memory, cpus = limits.memory_bytes, limits.cpus
        if quotas.memory:
            memory = min(memory or quotas.memory, quotas.memory)
        if quotas.cpu:
            cpus = min(cpus or quotas.cpu, quotas.cpu)
        limits = replace(limits, memory_bytes=memory, cpus=cpus)
        return None if limits == own else limits

    def call_limiter(self, name: str) -> anyio.CapacityLimiter:
        """Return the limiter of a principal for calls that the server computes itself.

        With several principals at most `AT_WORK` calls of each run at a time.
        """
        most = AT_WORK if self.several else sys.maxsize
        return self._call_limiters.setdefault(name, anyio.CapacityLimiter(most))

    def check_cells(self, name: str, sessions: Iterable[Session]) -> None:
        """Raise SessionLimitReached if one more cell would exceed a principal's quota."""
        if not (most := self.quotas(name).cells):
            return
        there = sum(map(cells_of, sessions)) + self.others.use(name).cells
        if there >= most:
            raise SessionLimitReached(
                f"The cell was not run: {there} cells of yours run or wait, and at most {most} may "
                "(your quota `cells`). Wait for one to end (wait), or stop one (interrupt)."
            )


def cells_of(session: Session) -> int:
    """Return the number of cells that run or wait in a session."""
    return len(session.queue) + (session.queue.current is not None)


def weights(kernels: Mapping[str, Sequence[tuple[Session, float]]]) -> dict[str, float]:
    """Return processor weights of kernels by session handle, so that principals get equal shares.

    `kernels` has the kernels of each principal with their own weights. The kernels of a principal
    share the weight of the heaviest one.
    """
    found = {}
    for own in kernels.values():
        total = sum(weight for _, weight in own)
        most = max((weight for _, weight in own), default=0.0)
        for session, weight in own:
            found[session.handle] = most * weight / total if total else weight
    return found


class Overseer:
    """Compares the use of each principal with its quotas, and ends kernels or cells beyond them."""

    def __init__(self, principals: Principals, sessions: Callable[[], Iterable[Session]]) -> None:
        self._principals = principals
        self._sessions = sessions
        self._disk: dict[str, int] = {}
        """Bytes on disk of each session at the last comparison, by handle."""
        self._shared: dict[str, tuple[Session, Use]] = {}
        """Principals whose use on all servers exceeds their memory quota: the session that would
        end, and the use here."""
        self._asking: set[str] = set()

    async def run(self) -> None:
        """Compare until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                busy = self.look()
                for name, (session, use) in self._shared.items():
                    if name not in self._asking:
                        self._asking.add(name)
                        tasks.start_soon(self._settle, name, session, use)
                with Barrier("sharing the processors among principals"):
                    self.share()
                await anyio.sleep(CHECK_S if busy else REST_S)

    async def _settle(self, name: str, session: Session, use: Use) -> None:
        """End the largest kernel of a principal here, unless one on another server must end.

        If the other servers cannot be asked, only the use here counts.
        """
        most = self._principals.quotas(name).memory or 0
        others = self._principals.others
        elsewhere = others.use(name).memory
        try:
            with Barrier("asking what a principal has elsewhere", session.handle) as barrier:
                ends = await others.gives_way(name, use, most)
            if barrier.failure is not None:
                ends = use.memory > most
            if ends:
                self._stop(session, "memory", use.memory + elsewhere, most)
        finally:
            self._asking.discard(name)

    def look(self) -> bool:
        """Compare each principal with its quotas, and return True if code of any runs."""
        busy = False
        there = {each.handle for each in self._sessions()}
        self._shared = {}
        self._disk = {key: size for key, size in self._disk.items() if key in there}
        for name, own in self._by_owner().items():
            with Barrier("comparing a principal with its quotas"):
                self._compare(name, own)
            busy = busy or any(each.state == "busy" for each in own)
        return busy

    def _by_owner(self) -> dict[str, list[Session]]:
        found = defaultdict(list)
        for session in self._sessions():
            if is_running(session):
                found[session.owner].append(session)
        return found

    def _compare(self, name: str, own: Sequence[Session]) -> None:
        quotas, others = self._principals.quotas(name), self._principals.others.use(name)
        if quotas.memory:
            largest, largest_bytes, total = memory_of(own)
            if total + others.memory > quotas.memory and largest_bytes >= others.largest:
                assert largest is not None
                if others.memory:
                    self._shared[name] = largest, Use(memory=total, largest=largest_bytes)
                else:
                    self._stop(largest, "memory", total, quotas.memory)
                return
        if quotas.disk:
            self._compare_disk(own, quotas.disk, others.disk)

    def _compare_disk(self, own: Sequence[Session], most: int, elsewhere: int) -> None:
        """Interrupt the cell that writes most if the disk quota is exceeded.

        Other cells go on: they may remove files.
        """
        taken = {each.handle: disk_of(each) for each in own}
        grown = {
            each: taken[each.handle] - self._disk.get(each.handle, 0)
            for each in own
            if each.state == "busy"
        }
        self._disk.update(taken)
        writer = max(grown, key=lambda each: grown[each], default=None)
        total = sum(taken.values()) + elsewhere
        if total > most and writer is not None and grown[writer] > 0 and writer.kernel is not None:
            cause = _too_much("disk", total, most)
            logger.info("session %s: %s", writer.handle, cause)
            writer.kernel.handle.limits.exceed(cause)

    def _stop(self, session: Session, quota: str, used: int, most: int) -> None:
        cause = _too_much(quota, used, most)
        logger.info("session %s: %s", session.handle, cause)
        if session.kernel is not None:
            session.kernel.handle.limits.kill_for(cause)

    def share(self) -> None:
        """Set the processor weight and limit of each kernel in which code runs.

        Principals get equal shares. The quota `cpu` is divided equally among a principal's kernels.
        """
        awake = {
            name: [
                (each, each.kernel.handle.limits.weight)
                for each in own
                if each.kernel is not None and each.kernel.handle.limits.awake
            ]
            for name, own in self._by_owner().items()
        }
        found = weights(awake) if self._principals.several else {}
        for name, own in awake.items():
            cpus = self._principals.quotas(name).cpu or 0.0
            sharing = len(own) + self._principals.others.use(name).computing
            for session, weight in own:
                if session.kernel is not None:
                    limits = session.kernel.handle.limits
                    part = found.get(session.handle, weight)
                    limits.weigh(part, cpus / sharing if cpus else 0.0)


def _too_much(quota: str, used: int, most: int) -> str:
    return (
        f"your sessions together take {format_bytes(used)} of {quota}, and at most "
        f"{format_bytes(most)} are yours (your quota `{quota}`); close a session that is not needed"
        + (", or remove files" if quota == "disk" else "")
    )


def _memory(session: Session) -> int:
    return session.kernel.handle.usage().memory_bytes if session.kernel is not None else 0


def is_running(session: Session) -> bool:
    """Return True if a session has a live kernel; the figures of an ended one are out of date."""
    return session.kernel is not None and session.kernel.handle.exit is None


def memory_of(sessions: Sequence[Session]) -> tuple[Session | None, int, int]:
    """Return the session to stop if memory is exceeded, its bytes, and the bytes of all.

    It is the largest busy session, else the largest one; None without sessions.
    """
    held = {each.handle: _memory(each) for each in sessions}
    largest = max(
        sessions, key=lambda each: (each.state == "busy", held[each.handle]), default=None
    )
    most = 0 if largest is None else held[largest.handle]
    return largest, most, sum(held.values())


def disk_of(session: Session) -> int:
    """Return the bytes of a session's workspace and packages, as last measured; 0 if never."""
    limits = session.kernel.handle.limits if session.kernel is not None else None
    return limits.quotas[0].measured.bytes if limits is not None and limits.quotas else 0
