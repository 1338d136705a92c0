"""`EnvironmentStore`: the cache folder of kernel environments.

An environment is built in the folder it stays in, under a lock, and counts from the moment a note
about it is written beside the folder, which is the last step. It is not built aside and renamed:
compiled files would then carry a path that no longer exists, and every import would pay to correct
it. A build that was killed leaves a folder without a note, which the next one clears away.

Whoever uses an environment has a lease on it, the same lock held by many; what has no lease may be
removed. So servers that share a cache take nothing from each other.

Files are copied out of uv's cache, not hard-linked: a kernel that got write access to one (with
`--sandbox none`) would otherwise write into every environment on the machine. Where the file
system can share blocks the copies are free; elsewhere numpy, pandas and matplotlib cost 0.3 s
beside the 3.5 s of compiling them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import anyio

from kernel_mcp.environments import folder as folders
from kernel_mcp.environments.folder import POLL_S, Lease, exclusive_now
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.environments.metadata import EnvironmentSpec, note_file
from kernel_mcp.environments.uv import ProgressCallback, Sources, Uv, silence
from kernel_mcp.environments.workshop import (
    BASE_PACKAGES,
    LEFT_OUT,
    OPERATORS,
    Build,
    Terms,
    Workshop,
)
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.folders import own_folder
from kernel_mcp.sandbox.base import Builder

AGENT_AGE_S = 30 * 86400.0
"""Environments made for agents that nobody used for so long are removed."""
REMAINS_AGE_S = 86400.0
"""So are the remains of killed builds."""
BROKEN_POLLS = 200
"""How often an environment is found in use and not whole before that is an error: for 10 s."""
_OLD_NOTE = "kernel-mcp.json"
"""In the folder of an environment of an older version, which takes no leases."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEnvironment:
    """One environment in the cache; `used` is seconds since the epoch, `size` bytes on disk.

    `agent` says whether only agents have asked for it.
    """

    path: Path
    version: str
    requested: tuple[str, ...]
    used: float
    size: int
    agent: bool = False


class EnvironmentStore:
    """Builds environments at most once each, hands them out, and removes the agents' old ones."""

    def __init__(
        self,
        cache_dir: Path | None = None,
        *,
        sources: Sources | None = None,
        uv: Uv | None = None,
        builder: Builder | None = None,
        most_bytes: int = 0,
    ) -> None:
        """`cache_dir` defaults to the user's cache folder. Raises EnvironmentBuildError.

        Without a `builder` the best of this machine confines uv. Agents' environments and what uv
        has cached take no more than `most_bytes`, 0 for no limit, except for what is in use.
        """
        self._root = _writable(cache_dir or _default_cache())
        self._envs = self._root / "envs"
        self.workshop = Workshop(uv or Uv.installed(self._root, sources), builder)
        self.interpreters = Interpreters(self.workshop.uv)
        self._most_bytes = most_bytes
        self._leases: dict[EnvironmentSpec, Lease] = {}

    async def ensure(
        self, spec: EnvironmentSpec, progress: ProgressCallback = silence, terms: Terms = OPERATORS
    ) -> KernelEnvironment:
        """The environment for `spec`, built now if it is not in the cache; stays until `release`.

        `progress` is awaited with short lines while it is built. Raises EnvironmentBuildError.
        """
        interpreter = await self.interpreters.find(spec.python, progress)
        folder = self._envs / _name(interpreter, spec)
        built = False
        try:
            self._envs.mkdir(parents=True, exist_ok=True)
            patience = BROKEN_POLLS
            while (ready := self._leased(spec, folder, interpreter, terms)) is None:
                with exclusive_now(_lock_file(folder)) as lock:
                    if lock is not None and folders.load(folder, interpreter) is None:
                        build = Build(self.workshop, interpreter, spec.packages, terms)
                        await build.run(folder, progress, lock)
                        built = True
                    elif lock is None:
                        patience -= not _being_built(folder)
                        if not patience:
                            raise EnvironmentBuildError(_broken(folder))
                        await anyio.sleep(POLL_S)
            if built:
                await anyio.to_thread.run_sync(self.evict)
        except OSError as error:
            raise EnvironmentBuildError(
                f"the environment in {folder} could not be made: {error}. Check the free space and "
                "the permissions of the cache folder, or choose another one with --cache-dir."
            ) from error
        return ready

    def release(self, spec: EnvironmentSpec) -> None:
        """Nobody here uses the environment of `spec` any more: it may be removed."""
        lease = self._leases.pop(spec, None)
        if lease is not None:
            lease.close()

    def size(self, environment: KernelEnvironment) -> int:
        """Bytes that an environment has on disk."""
        note = folders.read_note(environment.python.parent.parent)
        return 0 if note is None else note.size

    def stored(self) -> list[StoredEnvironment]:
        """Every finished environment, most recently used first."""
        found = [
            StoredEnvironment(
                path=folder,
                version=note.version,
                requested=note.requested,
                used=_changed(note_file(folder)),
                size=note.size,
                agent=note.agent,
            )
            for folder in self._folders()
            if (note := folders.read_note(folder)) is not None
        ]
        return sorted(found, key=lambda stored: stored.used, reverse=True)

    async def prune(self, older_than_s: float) -> list[Path]:
        """Remove environments unused for so long, and the remains of killed builds.

        What is in use stays.
        """
        limit = time.time() - older_than_s
        return [
            folder
            for folder in self._folders()
            if (folders.read_note(folder) is None or _changed(note_file(folder)) < limit)
            and await anyio.to_thread.run_sync(_remove_unused, folder)
        ]

    def evict(self) -> list[Path]:
        """Remove what agents had made and nobody has used for long, the oldest first; blocks.

        What uv has cached may have half of the limit.
        """
        most_bytes = self._most_bytes
        self.workshop.tidy()
        now = time.time()
        removed = [path for path in self._remains(now) if _remove_unused(path)]
        cached = folders.tree_size(self.workshop.uv.cache)
        if 0 < most_bytes < 2 * cached and self.workshop.empty_cache():
            cached = 0
        agents = [stored for stored in self.stored() if stored.agent]
        total = cached + sum(stored.size for stored in agents)
        for stored in reversed(agents):
            old = now - stored.used > AGENT_AGE_S
            if not (old or 0 < most_bytes < total):
                break
            if _remove_unused(stored.path):
                total -= stored.size
                removed.append(stored.path)
        for path in removed:
            logger.info("removed the environment %s, which nobody used", path.name)
        return removed

    def _leased(
        self, spec: EnvironmentSpec, folder: Path, interpreter: Interpreter, terms: Terms
    ) -> KernelEnvironment | None:
        """A whole environment, held for `spec`; None while there is none."""
        lease = Lease.taken(_lock_file(folder))
        if lease is None:
            return None
        ready = folders.load(folder, interpreter)
        if ready is None:
            lease.close()
            self.release(spec)  # its files are gone
            return None
        if not terms.agent:
            folders.belongs_to_operator(folder)
        self.release(spec)
        self._leases[spec] = lease
        return ready

    def _folders(self) -> list[Path]:
        if not self._envs.is_dir():
            return []
        return sorted(entry for entry in self._envs.iterdir() if entry.is_dir())

    def _remains(self, now: float) -> Iterator[Path]:
        for folder in self._folders():
            old = now - _changed(folder) > REMAINS_AGE_S
            if old and folders.read_note(folder) is None and not (folder / _OLD_NOTE).exists():
                yield folder


def _default_cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("kernel-mcp")


def _writable(root: Path) -> Path:
    try:
        own_folder(root)
    except OSError as error:
        raise EnvironmentBuildError(
            f"cannot keep kernel environments in {root}: {error.strerror or error}; or choose "
            "another folder with --cache-dir"
        ) from error
    return root.resolve()


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _name(interpreter: Interpreter, spec: EnvironmentSpec) -> str:
    """The folder of an environment: its Python for people, then a hash of all that shapes it."""
    packages = [str(each) for each in spec.packages]
    shape = json.dumps([folders.FORMAT, asdict(interpreter), packages, BASE_PACKAGES, LEFT_OUT])
    return f"python-{interpreter.version}-{sha256(shape.encode()).hexdigest()[:20]}"


def _being_built(folder: Path) -> bool:
    """Whether somebody holds the lock alone; else others use what is not whole."""
    lease = Lease.taken(_lock_file(folder))
    if lease is not None:
        lease.close()
    return lease is None


def _broken(folder: Path) -> str:
    return (
        f"files of the environment {folder} are gone, and another server still uses it, so that it "
        "cannot be built again. End that server, or choose another cache folder with --cache-dir."
    )


def _remove_unused(folder: Path) -> bool:
    """Remove an environment that nobody uses or builds: whether that was done. Blocks."""
    try:
        with exclusive_now(_lock_file(folder)) as alone:
            if alone is not None:
                folders.remove(folder)
            return alone is not None
    except OSError as error:
        logger.warning("cannot remove the environment %s: %s", folder.name, error)
        return False


def _changed(path: Path) -> float:
    """When a file was changed, seconds since the epoch; now, when it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
