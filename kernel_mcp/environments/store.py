"""`EnvironmentStore`: the cache folder of kernel environments.

An environment is built in the folder it stays in, under a lock, and counts from the moment its
manifest is written, which is the last step. It is not built aside and renamed: compiled files
would then carry a path that no longer exists, and every import would pay to correct it. A build
that was killed leaves a folder without a manifest, which the next one clears away.

Files are copied out of uv's cache, not hard-linked: a kernel that got write access to one (with
`--sandbox none`) would otherwise write into every environment on the machine. Where the file
system can share blocks the copies are free; elsewhere numpy, pandas and matplotlib cost 0.3 s
beside the 3.5 s of compiling them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
from packaging.requirements import Requirement

from kernel_mcp.environments.failures import UvResult
from kernel_mcp.environments.interpreters import Interpreter, Interpreters
from kernel_mcp.environments.lock import exclusive
from kernel_mcp.environments.metadata import MANIFEST, installed_modules, installed_versions
from kernel_mcp.environments.names import normalise
from kernel_mcp.environments.sources import Sources
from kernel_mcp.environments.spec import EnvironmentSpec
from kernel_mcp.environments.uv import Progress, Uv
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.launch.base import KernelEnvironment
from kernel_mcp.sandbox.folders import own_folder

FORMAT = 1
BASE_PACKAGES = ("cloudpickle>=3,<4", "ipykernel>=7,<8")
# Dependencies of ipykernel and IPython that a kernel here never uses: there is no debugger to
# talk to and no completion. They are a fifth of the download.
LEFT_OUT = ("debugpy", "jedi", "parso")


@dataclass(frozen=True, slots=True)
class StoredEnvironment:
    """One environment in the cache; `used` is seconds since the epoch, `size` bytes on disk."""

    path: Path
    version: str
    requested: tuple[str, ...]
    used: float
    size: int


class EnvironmentStore:
    """Builds environments at most once each and hands them out."""

    def __init__(
        self,
        cache_dir: Path | None = None,
        *,
        sources: Sources | None = None,
        uv: Uv | None = None,
    ) -> None:
        """`cache_dir` defaults to the user's cache folder. Raises EnvironmentBuildError."""
        self._root = _writable(cache_dir or _default_cache())
        self._envs = self._root / "envs"
        self.uv = uv or Uv.installed(self._root, sources)
        self.interpreters = Interpreters(self._root / "interpreters", self.uv)

    async def ensure(
        self, spec: EnvironmentSpec, progress: Progress | None = None
    ) -> KernelEnvironment:
        """The environment for `spec`, built now if it is not in the cache.

        `progress` is awaited with short lines while it is built. Raises EnvironmentBuildError.
        """
        try:
            packages = normalise(spec.packages)
        except ValueError as error:
            raise EnvironmentBuildError(str(error)) from None
        interpreter = await self.interpreters.find(spec.python, progress)
        folder = self._envs / _name(interpreter, packages)
        ready = _load(folder)
        if ready is None:
            self._envs.mkdir(parents=True, exist_ok=True)
            async with exclusive(_lock_file(folder)) as lock:
                ready = _load(folder)
                if ready is None:
                    ready = await self._build(folder, interpreter, packages, progress, lock)
        return ready

    def stored(self) -> list[StoredEnvironment]:
        """Every finished environment, most recently used first."""
        found = [
            StoredEnvironment(
                path=folder,
                version=str(manifest["interpreter"]["version"]),
                requested=tuple(manifest["requested"]),
                used=(folder / MANIFEST).stat().st_mtime,
                size=_size(folder),
            )
            for folder in self._folders()
            if (manifest := _manifest(folder)) is not None
        ]
        return sorted(found, key=lambda stored: stored.used, reverse=True)

    async def prune(self, older_than_s: float) -> list[Path]:
        """Remove environments unused for so long, and the remains of killed builds.

        A kernel that runs in one loses its files: choose a time longer than servers live.
        """
        removed = []
        limit = time.time() - older_than_s
        for folder in self._folders():
            async with exclusive(_lock_file(folder)):
                manifest = folder / MANIFEST
                if not manifest.exists() or manifest.stat().st_mtime < limit:
                    await anyio.to_thread.run_sync(_remove, folder)
                    removed.append(folder)
        return removed

    def _folders(self) -> list[Path]:
        if not self._envs.is_dir():
            return []
        return sorted(entry for entry in self._envs.iterdir() if entry.is_dir())

    async def _build(
        self,
        folder: Path,
        interpreter: Interpreter,
        packages: tuple[str, ...],
        progress: Progress | None,
        lock: int,
    ) -> KernelEnvironment:
        await anyio.to_thread.run_sync(_remove, folder)
        if progress is not None:
            names = ", ".join(packages) or "the standard library only"
            await progress(f"Building a Python {interpreter.version} environment: {names}")
        result = await self.uv.run(
            [
                "venv",
                "--no-project",
                "--no-config",
                "--python",
                interpreter.executable,
                str(folder),
            ],
            keep=lock,
        )
        if result.code == 0:
            result = await self._install(folder, packages, progress, lock)
        if result.code != 0:
            await anyio.to_thread.run_sync(_remove, folder)
            raise result.error(packages or BASE_PACKAGES, interpreter.version)
        await anyio.to_thread.run_sync(_finish, folder, interpreter, packages)
        ready = _load(folder)
        if ready is None:
            raise EnvironmentBuildError(f"the environment in {folder} vanished while it was built")
        return ready

    async def _install(
        self, folder: Path, packages: tuple[str, ...], progress: Progress | None, lock: int
    ) -> UvResult:
        asked = {Requirement(package).name for package in packages}
        excludes = folder / "excludes.txt"
        excludes.write_text("\n".join(sorted(set(LEFT_OUT) - asked)), encoding="utf-8")
        return await self.uv.run(
            [
                "pip", "install", "--no-build", *self.uv.sources.options(),
                "--link-mode", "copy", "--compile-bytecode",
                "--excludes", str(excludes), "--python", str(folder / "bin/python"),
                "--", *BASE_PACKAGES, *packages,
            ],
            progress,
            keep=lock,
        )  # fmt: skip


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


def _name(interpreter: Interpreter, packages: tuple[str, ...]) -> str:
    """The folder of an environment: its Python for people, then a hash of all that shapes it."""
    shape = json.dumps([FORMAT, asdict(interpreter), packages, BASE_PACKAGES, LEFT_OUT])
    return f"python-{interpreter.version}-{sha256(shape.encode()).hexdigest()[:20]}"


def _finish(folder: Path, interpreter: Interpreter, packages: tuple[str, ...]) -> None:
    """Write the manifest, the mark of a whole environment, and take away write permission."""
    site = next(folder.glob("lib/python3*/site-packages"))
    content = {
        "format": FORMAT,
        "interpreter": asdict(interpreter),
        "requested": packages,
        "packages": installed_versions(site),
        "modules": installed_modules(site),
    }
    _seal(folder)
    draft = folder / f"{MANIFEST}.draft"
    draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    draft.replace(folder / MANIFEST)


def _load(folder: Path) -> KernelEnvironment | None:
    manifest = _manifest(folder)
    if manifest is None or not (folder / "bin/python").exists():
        return None
    with suppress(OSError):  # another user's cache: it is only the date of last use
        os.utime(folder / MANIFEST)
    interpreter = Interpreter(**manifest["interpreter"])
    return KernelEnvironment(
        python=folder / "bin/python",
        readonly=(folder, *interpreter.readonly),
        version=interpreter.version,
        packages=tuple(manifest["packages"]),
    )


def _manifest(folder: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def _remove(folder: Path) -> None:
    """Delete an environment, finished or not; its manifest goes first."""
    if folder.exists():
        (folder / MANIFEST).unlink(missing_ok=True)
        for place, _, _ in os.walk(folder):
            Path(place).chmod(0o755)
        shutil.rmtree(folder)


def _seal(folder: Path) -> None:
    """Everything below is readable by every user (kernels have ids of their own), writable by none.

    uv's cache may hold files in tighter modes; the copies here are our own to change.
    """
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):
                path.chmod(0o555 if mode & stat.S_IXUSR else 0o444)


def _size(folder: Path) -> int:
    return sum(
        (Path(place) / name).lstat().st_size
        for place, _, files in os.walk(folder)
        for name in files
    )
