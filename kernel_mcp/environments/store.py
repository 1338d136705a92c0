"""`EnvironmentStore`: the cache folder of kernel environments.

An environment is built in its final folder, under an exclusive lock, and is finished once its note
is written beside the folder. Building aside and renaming would leave wrong paths in compiled files,
which every import would have to correct. The next build clears a folder without a note.

Servers hold a shared lock on each environment they use. `prune` and `evict` remove environments
without one, so servers can share a cache.

Files are copied out of uv's cache, not hard-linked: with `--sandbox none` a kernel could otherwise
write into every environment. Reflinks make copies free; elsewhere numpy, pandas and matplotlib cost
0.3 s beside the 3.5 s of compiling them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path

import anyio

from kernel_mcp.config.settings import Settings
from kernel_mcp.environments import folder as folders
from kernel_mcp.environments.build import (
    BASE_PACKAGES,
    LEFT_OUT,
    OPERATORS,
    Build,
    Terms,
    implied,
    note_unfit,
    noted_unfit,
)
from kernel_mcp.environments.build_sandbox import BuildSandbox
from kernel_mcp.environments.folder import POLL_S, Lease, exclusive_now
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.environments.metadata import EnvironmentSpec, note_file
from kernel_mcp.environments.own import OwnEnvironment, own_environment
from kernel_mcp.environments.pinned_requirements import NOTHING, PinnedRequirements, read_pinned
from kernel_mcp.environments.progress import Bulletin
from kernel_mcp.environments.uv import ProgressCallback, Sources, Uv, silence
from kernel_mcp.errors import ConfigError, EnvironmentBuildError, UnfitPackages
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.linux.folders import home_folder, is_own, lasting_folder, own_folder
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import Builder

AGENT_AGE_S = 30 * 86400.0
"""Seconds without use after which agents' environments are removed."""
REMAINS_AGE_S = 86400.0
"""Seconds after which the remains of killed builds are removed."""
BROKEN_POLLS = 200
"""Attempts (10 s) on a locked, unfinished environment before that is an error."""
_OLD_NOTE = "kernel-mcp.json"
"""The note of older versions, inside the folder; those take no locks."""
_UNFIT = ".unfit.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredEnvironment:
    """One environment in the cache.

    `used` is the last use in seconds since the epoch, `size` bytes on disk. `agent` is True if only
    agents have requested it.
    """

    path: Path
    version: str
    requested: tuple[str, ...]
    used: float
    size: int
    agent: bool = False


class EnvironmentStore:
    """Builds each environment at most once, leases it, and removes agents' old ones."""

    def __init__(
        self,
        cache_dir: Path | None = None,
        *,
        sources: Sources | None = None,
        uv: Uv | None = None,
        builder: Builder | None = None,
        most_bytes: int = 0,
        apart: bool | None = None,
    ) -> None:
        """`cache_dir` defaults to that of `default_cache`. Raises EnvironmentBuildError.

        `apart` is that of `own_environment`. Without a `builder` uv runs in the best sandbox of
        this machine. Agents' environments and uv's cache may hold `most_bytes` (0 for no limit)
        besides those in use.
        """
        self._root = _writable(cache_dir or default_cache())
        if cache_dir is None and self._root == _beside_state().resolve():
            logger.warning(
                "this user has no home folder to write to: environments of kernels are kept in "
                "%s; --cache-dir names another",
                self._root,
            )
        self._envs = self._root / "envs"
        self.build_sandbox = BuildSandbox(uv or Uv.installed(self._root, sources), builder)
        self.interpreters = Interpreters(self.build_sandbox.uv, self._interpreter)
        self._most_bytes = most_bytes
        self._apart = apart
        self._leases: dict[EnvironmentSpec, Lease] = {}
        self._below: dict[EnvironmentSpec, EnvironmentSpec] = {}
        """Environments with the kernel's packages, by the spec of the one that they supplement."""

    async def ensure(
        self, spec: EnvironmentSpec, progress: ProgressCallback = silence, terms: Terms = OPERATORS
    ) -> KernelEnvironment:
        """Return the environment for `spec`, built if it is not cached; leased until `release`.

        `progress` is awaited with short lines, also while another server builds it. An environment
        of the operator's stays unchanged and is supplemented by one built here. So is one whose
        packages the kernel does not work with. Raises EnvironmentBuildError.
        """
        own = await anyio.to_thread.run_sync(self._own, spec)
        if own is not None:
            below = self._below[spec] = EnvironmentSpec(own.minor, own.lacks(spec.packages))
            try:
                await self.interpreters.find(own.minor, progress, fetch=not terms.agent)
            except EnvironmentBuildError as error:
                base = Path(own.interpreter.executable)
                step = f"`uv python install {own.minor}` brings one"
                if not base.is_relative_to(own.root):
                    step += f"; or, if you trust its base, put {base.parent} on the server's PATH"
                raise EnvironmentBuildError(
                    f"--python {own.root}: nothing of an environment is started outside a sandbox, "
                    f"so a Python {own.minor} of the machine's own has to install what kernels "
                    f"need beside it, and uv finds none and could fetch none: {step}."
                ) from error
            ours = await self.ensure(below, progress, terms)
            return await anyio.to_thread.run_sync(own.above, ours, below.packages)
        interpreter = await self.interpreters.find(spec.python, progress, fetch=not terms.agent)
        folder = self._envs / _name(interpreter, spec)
        bulletin = Bulletin(_lock_file(folder), progress)
        built = False
        try:
            self._envs.mkdir(parents=True, exist_ok=True)
            patience = BROKEN_POLLS
            while (ready := self._leased(spec, folder, interpreter, terms)) is None:
                with exclusive_now(_lock_file(folder)) as lock:
                    if lock is not None and folders.load(folder, interpreter) is None:
                        build = Build(self.build_sandbox, interpreter, spec, terms)
                        try:
                            await self._run(build, folder, bulletin.written(lock), lock)
                        finally:
                            bulletin.clear(lock)
                        built = True
                    elif lock is None:
                        patience -= not _being_built(folder)
                        if not patience:
                            raise EnvironmentBuildError(_broken(folder))
                        await bulletin.read()
                        await anyio.sleep(POLL_S)
            if built:
                await anyio.to_thread.run_sync(self.evict)
        except OSError as error:
            raise EnvironmentBuildError(
                f"the environment in {folder} could not be made: {error}. Check the free space and "
                "the permissions of the cache folder, or choose another one with --cache-dir."
            ) from error
        note = folders.read_note(folder)
        if note is None or not note.apart:
            return ready
        listed = await anyio.to_thread.run_sync(partial(self._described, folder))
        below = self._below[spec] = EnvironmentSpec(spec.python)
        ours = await self.ensure(below, progress, terms)
        return await anyio.to_thread.run_sync(listed.above, ours, ())

    def unfit(self, spec: EnvironmentSpec) -> dict[str, str]:
        """Return the packages of `spec` that were recently unavailable, with the reasons.

        Starts no process.
        """
        spec = spec if spec.pinned else self._below.get(spec, spec)
        interpreter = self.interpreters.recalled(spec.python)
        if interpreter is None:
            return {}
        note = _unfit_file(self._envs / _name(interpreter, spec))
        return noted_unfit(note, self.build_sandbox.uv.sight)

    def forget_unfit(self) -> None:
        """Delete the records of unavailable packages: the next build tries them again."""
        for file in self._envs.glob(f"*{_UNFIT}"):
            with suppress(OSError):  # another user's cache
                file.unlink()

    async def _run(self, build: Build, folder: Path, progress: ProgressCallback, lock: int) -> None:
        """Build, unless packages are known to be unavailable. Raises UnfitPackages then."""
        note, sight = _unfit_file(folder), self.build_sandbox.uv.sight
        if known := noted_unfit(note, sight):
            raise UnfitPackages(known)
        try:
            await build.run(folder, progress, lock)
        except UnfitPackages as error:
            note_unfit(note, sight, error.unfit)
            raise
        except EnvironmentBuildError as error:  # e.g. no network: the others may be in a cache
            if known := noted_unfit(note, sight, ever=True):
                raise UnfitPackages(known) from error
            raise

    def release(self, spec: EnvironmentSpec) -> None:
        """Release this server's lease on the environment of `spec`."""
        for each in (spec, self._below.pop(spec, spec)):
            if each not in self._below.values():
                self._end_lease(each)

    async def read_pinned(self, settings: Settings) -> PinnedRequirements:
        """Return the requirements in the files that these settings name; empty without files.

        Raises ConfigError, also where `--python` names an environment of the operator's.
        """
        if settings.requirements is None and settings.project is None:
            return NOTHING
        wanted = EnvironmentSpec(settings.python)
        if await anyio.to_thread.run_sync(self._own, wanted) is not None:
            raise ConfigError(
                f"--python {settings.python}: the packages of an environment of yours stay as they "
                "are; leave --requirements and --project out, or give --python a version"
            )
        index = await self.build_sandbox.uv.default_index()
        return await anyio.to_thread.run_sync(read_pinned, settings, index, os.environ)

    async def uv_version(self) -> str:
        """Return the version of uv that builds environments; empty if it does not report one."""
        return await self.build_sandbox.uv.version()

    def size(self, environment: KernelEnvironment) -> int:
        """Return the bytes on disk of an environment; 0 if that is not known."""
        support = environment.support
        roots = [environment.root, *([support.site.parents[2]] if support else [])]
        return sum(note.size for root in roots if (note := folders.read_note(root)) is not None)

    @property
    def downloads(self) -> Path:
        """Uv's cache, from which the next environments are built."""
        return self.build_sandbox.uv.cache

    def stored(self) -> list[StoredEnvironment]:
        """Return the finished environments, most recently used first."""
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
        """Remove unleased environments unused for `older_than_s`, and killed builds."""
        limit = time.time() - older_than_s
        return [
            folder
            for folder in self._folders()
            if (folders.read_note(folder) is None or _changed(note_file(folder)) < limit)
            and await anyio.to_thread.run_sync(_remove_unused, folder)
        ]

    def evict(self) -> list[Path]:
        """Remove agents' unleased environments beyond `AGENT_AGE_S` or the limit; blocks.

        The oldest go first, after killed builds; uv's cache may have half of the limit.
        """
        most_bytes = self._most_bytes
        self.build_sandbox.tidy()
        now = time.time()
        removed = [path for path in self._remains(now) if _remove_unused(path)]
        cached = folders.tree_size(self.downloads)
        if 0 < most_bytes < 2 * cached and self.build_sandbox.empty_cache():
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
        """Return a finished environment, leased for `spec`; None if there is none."""
        lease = Lease.taken(_lock_file(folder))
        if lease is None:
            return None
        ready = folders.load(folder, interpreter)
        if ready is None:
            lease.close()
            self._end_lease(spec)  # its files have been removed
            return None
        if not terms.agent:
            folders.belongs_to_operator(folder)
        self._end_lease(spec)
        self._leases[spec] = lease
        return ready

    def _end_lease(self, spec: EnvironmentSpec) -> None:
        lease = self._leases.pop(spec, None)
        if lease is not None:
            lease.close()

    def _own(self, spec: EnvironmentSpec) -> OwnEnvironment | None:
        return own_environment(spec.python, apart=self._apart)

    def _described(self, folder: Path) -> OwnEnvironment:
        """Describe an environment built here as one of the operator's.

        Raises EnvironmentBuildError.
        """
        found = own_environment(str(folder), apart=self._apart)
        assert found is not None  # it has a pyvenv.cfg
        return found

    def _interpreter(self, request: str) -> Interpreter | None:
        own = own_environment(request, apart=self._apart)
        return None if own is None else own.interpreter

    def _folders(self) -> list[Path]:
        if not self._envs.is_dir():
            return []
        return sorted(entry for entry in self._envs.iterdir() if entry.is_dir())

    def _remains(self, now: float) -> Iterator[Path]:
        for folder in self._folders():
            old = now - _changed(folder) > REMAINS_AGE_S
            if old and folders.read_note(folder) is None and not (folder / _OLD_NOTE).exists():
                yield folder


def default_cache() -> Path:
    """Return the folder of the XDG base directory specification, or one beside that for state.

    The latter is for users without a writable home folder of their own, as in many containers.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "kernel-mcp"
    home = home_folder()
    if home is not None and is_own(place := home / ".cache" / "kernel-mcp"):
        return place
    return _beside_state()


def _beside_state() -> Path:
    state = lasting_folder()
    return state.with_name(f"{state.name}-cache")


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


def _unfit_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_UNFIT}")


def _name(interpreter: Interpreter, spec: EnvironmentSpec) -> str:
    """Return the folder's name: Python version and a hash of all that shapes the environment."""
    packages = [str(each) for each in spec.packages]
    own = [BASE_PACKAGES, LEFT_OUT, implied(["", *(each.name for each in spec.packages)])]
    pinned = [spec.pinned.digest] if spec.pinned else []
    shape = json.dumps([folders.FORMAT, asdict(interpreter), packages, *own, *pinned])
    return f"python-{interpreter.version}-{sha256(shape.encode()).hexdigest()[:20]}"


def _being_built(folder: Path) -> bool:
    """Return True if a builder holds the exclusive lock of an environment.

    False for an unfinished one that others use under a shared lock.
    """
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
    """Remove an environment unless it is leased; return True if it was removed. Blocks."""
    try:
        with exclusive_now(_lock_file(folder)) as alone:
            if alone is not None:
                folders.remove(folder)
            return alone is not None
    except OSError as error:
        logger.warning("cannot remove the environment %s: %s", folder.name, error)
        return False


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
