"""Find the Python that a kernel environment is made from, with its exact version.

Each server probes for itself: programs to run on the host and folders that kernels may read never
come from the cache. Interpreters start without packages; one in an environment of the operator's
never starts.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

from kernel_mcp.config.requirements import NEWEST_PYTHON, OLDEST_PYTHON
from kernel_mcp.environments.progress import Milestones
from kernel_mcp.environments.uv import ProgressCallback, Uv, silence
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.linux.commands import output_of
from kernel_mcp.records import dataclass

_PROBE_TIMEOUT_S = 20
_PROBE = """
import json, os, platform, sys
print(json.dumps({
    "executable": os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable),
    "version": platform.python_version(),
    "implementation": sys.implementation.name + getattr(sys, "abiflags", ""),
    "prefix": os.path.realpath(sys.base_prefix),
    "exec_prefix": os.path.realpath(sys.base_exec_prefix),
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One installed Python; paths are real, so equal values are the same program."""

    executable: str
    version: str
    implementation: str
    prefix: str
    exec_prefix: str

    @property
    def readonly(self) -> tuple[Path, ...]:
        """Folders that must be readable to run it."""
        return tuple(sorted({Path(self.prefix), Path(self.exec_prefix)}))


@dataclass(frozen=True, slots=True)
class _Found:
    """Result of a probe, with the stat of the executable."""

    interpreter: Interpreter
    path: str
    stamp: tuple[int, ...]

    @property
    def holds(self) -> bool:
        """True if the executable is unchanged since the probe."""
        try:
            return _stamp(self.path) == self.stamp
        except OSError:
            return False


class Interpreters:
    """Resolves `--python`; caches each answer until the executable changes."""

    def __init__(
        self, uv: Uv, own: Callable[[str], Interpreter | None] = lambda _request: None
    ) -> None:
        """`own` returns the interpreter of an environment that `--python` names; it may block."""
        self._uv = uv
        self._own = own
        self._known: dict[str, _Found] = {}

    async def find(
        self, request: str, progress: ProgressCallback = silence, *, fetch: bool = False
    ) -> Interpreter:
        """Return the interpreter for a version, a path, or (empty) the server's own.

        With `fetch` uv may download one. Raises EnvironmentBuildError, with the installed versions,
        if there is none.
        """
        known = self.recalled(request)
        if known is not None:
            return known
        if (own := await anyio.to_thread.run_sync(self._own, request)) is not None:
            return own
        path = request if "/" in request else await self._locate(request, progress, fetch)
        found = await self._probe(path, request)
        self._known[request] = _Found(found, path, _stamp(path))
        return found

    def recalled(self, request: str) -> Interpreter | None:
        """Return the answer of `find` if it is cached and valid, else None; starts no process."""
        own = _own()
        if _matches(request, own.version):
            return own
        known = self._known.get(request)
        return known.interpreter if known is not None and known.holds else None

    async def versions(self) -> list[str]:
        """Return the installed versions that kernels can run on, newest first."""
        from packaging.version import Version

        listed = await self._uv.query(
            ["python", "list", "--only-installed", "--output-format", "json"]
        )
        found = {version for version, _ in _usable(listed.output)}
        return sorted(found, key=Version, reverse=True)

    async def offered(self, version: str) -> str:
        """Return the newest release of `version` that uv could download; empty for none."""
        if self._uv.sources.offline:
            return ""
        listing = ["python", "list", "--only-downloads", "--output-format", "json", version]
        listed = await self._uv.query(listing)
        return next((found for found, _ in _usable(listed.output)), "")

    async def _locate(self, version: str, progress: ProgressCallback, fetch: bool) -> str:
        find = ["python", "find", "--system", "--no-project", "--no-python-downloads", version]
        result = await self._uv.query(find)
        if result.code != 0 and fetch:
            await progress(f"Python {version} is not installed; asking uv to fetch it")
            told = Milestones(progress, f"Fetching Python {version}")
            install = ["python", "install", "--no-bin", version]
            fetched = await told.during(lambda: self._uv.run(install, told.take))
            if fetched.code == 0:
                result = await self._uv.query(find)
        if result.code != 0:
            raise await self._missing(version, fetch)
        return result.output

    async def _missing(self, version: str, fetch: bool) -> EnvironmentBuildError:
        listed = await self._uv.query(
            ["python", "list", "--only-installed", "--output-format", "json"]
        )
        why = "none could be fetched" if fetch else "sessions may fetch none"
        permit = "" if fetch else ", or permits fetching it with --allow-install '*'"
        return EnvironmentBuildError(
            f"there is no Python {version} on this machine and {why}. "
            f"Installed: {_installed(listed.output)}. Take one of these. The operator names "
            f"another one with --python, a path too, or installs it{permit}."
        )

    async def _probe(self, path: str, request: str) -> Interpreter:
        try:
            with anyio.fail_after(_PROBE_TIMEOUT_S):
                done = await output_of([path, "-I", "-S", "-c", _PROBE])
            found = Interpreter(**json.loads(done.stdout))
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            raise EnvironmentBuildError(
                f"--python {request}: {path} does not run as a Python interpreter. Give a version "
                "such as 3.12, or the path of a working python3."
            ) from error
        if not OLDEST_PYTHON <= _pair(found.version) <= NEWEST_PYTHON:
            raise EnvironmentBuildError(
                f"--python {request}: that is Python {found.version}; kernels run on Python "
                f"{'.'.join(map(str, OLDEST_PYTHON))} to {'.'.join(map(str, NEWEST_PYTHON))}."
            )
        return found


def _own() -> Interpreter:
    return Interpreter(
        executable=os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable),
        version=platform.python_version(),
        implementation=sys.implementation.name + getattr(sys, "abiflags", ""),
        prefix=os.path.realpath(sys.base_prefix),
        exec_prefix=os.path.realpath(sys.base_exec_prefix),
    )


def _matches(request: str, version: str) -> bool:
    return not request or version == request or version.startswith(f"{request}.")


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _stamp(path: str) -> tuple[int, ...]:
    status = Path(path).stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _installed(output: str) -> str:
    """Return the usable versions in `uv python list`, each once with its path, for people."""
    first = dict(reversed(_usable(output)))
    return ", ".join(f"{version} ({path})" for version, path in first.items()) or "none usable"


def _usable(output: str) -> list[tuple[str, str]]:
    """Return version and path of each CPython in `uv python list` that kernels can run on."""
    try:
        return [
            (entry["version"], entry["path"])
            for entry in json.loads(output)
            if entry.get("implementation", "cpython") == "cpython"
            and OLDEST_PYTHON <= _pair(entry["version"]) <= NEWEST_PYTHON
        ]
    except (ValueError, KeyError, TypeError):
        return []
