"""Runs uv and turns its failures into words that say what to do."""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import anyio
from anyio.streams.text import TextReceiveStream

from kernel_mcp.errors import EnvironmentBuildError

Progress: TypeAlias = Callable[[str], Awaitable[None]]

_TAIL_LINES = 40
_TAIL_CHARS = 1500
# These would make uv look at some other project's environment or interpreter.
_DROPPED = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT")
# Clients start servers with few variables, so a proxy's certificate is found only where the
# system keeps it; uv's own list of authorities would not do.
_TRUST_SETTINGS = ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "SSL_CERT_FILE")
_SYSTEM_TRUST = Path("/etc/ssl/certs")
_TOLD = re.compile(r"\s*(Resolved|Downloading|Prepared|Installed|Bytecode compiled)\b")
_NO_NETWORK = re.compile(
    r"error sending request|dns error|tcp connect error|Failed to fetch|timed out|network", re.I
)
_NOT_FOUND = re.compile(r"Because (\S+) was not found in the package registry")
_NOT_CACHED = re.compile(r"Because (\S+) was not found in the cache|network was disabled")
_NO_WHEEL = re.compile(r"no usable wheels|no wheels with a matching|Wheels are required")
_NO_VERSION = re.compile(r"Because (?:there is no version of|only) ([^\s<>=!~]+)")


@dataclass(frozen=True, slots=True)
class UvResult:
    """How a run of uv ended: its exit code and the tail of what it printed."""

    code: int
    output: str

    def error(self, wanted: Sequence[str], python: str) -> EnvironmentBuildError:
        """The failure to bring `wanted` to a Python version, with cause, remedy and uv's words."""
        names = ", ".join(wanted)
        return EnvironmentBuildError(
            f"could not build a Python {python} environment with {names}: {self._cause()}\n"
            f"uv said:\n{_cut(self.output)}"
        )

    def _cause(self) -> str:
        if match := _NOT_FOUND.search(self.output):
            return (
                f"the package index has no package {match[1]!r}. Check the spelling; modules and "
                "packages can differ in name, the package is what gets installed."
            )
        if _NOT_CACHED.search(self.output):
            return (
                "the network is switched off for uv and not everything needed is in its cache. "
                "Build this environment once with network."
            )
        if "No solution found" not in self.output and _NO_NETWORK.search(self.output):
            return (
                "the package index cannot be reached. Check the network, the proxy "
                "(HTTPS_PROXY) or the index (UV_DEFAULT_INDEX), then try again."
            )
        if match := _NO_VERSION.search(self.output):
            return f"no release of {match[1]} fits what is asked for. Relax the version."
        if _NO_WHEEL.search(self.output):
            return (
                "a package has no wheel for this Python and platform, and building from source "
                "is switched off because it would run the package's own code. Ask for another "
                "version, or another --python."
            )
        if "No solution found" in self.output:
            return "these requirements contradict each other. Relax or drop one of them."
        return "uv failed."


class Uv:
    """The uv executable with the environment variables it is run with."""

    def __init__(self, executable: str, environ: Mapping[str, str], cwd: Path) -> None:
        """`cwd` is a folder without project files, so that none of them configures uv."""
        self._executable = executable
        self._cwd = cwd
        self._env = {name: text for name, text in environ.items() if name not in _DROPPED}
        self._env["PATH"] = _with_pyenv(self._env)
        self._env["UV_NO_PROGRESS"] = "1"
        if not any(name in environ for name in _TRUST_SETTINGS) and _SYSTEM_TRUST.is_dir():
            self._env["UV_SYSTEM_CERTS"] = "1"

    @classmethod
    def installed(cls, cwd: Path) -> Uv:
        """The uv this server depends on. Raises EnvironmentBuildError when it is missing."""
        import uv

        try:
            executable = uv.find_uv_bin()
        except FileNotFoundError as error:
            raise EnvironmentBuildError(
                "uv, which builds the environments of the kernels, is not installed beside the "
                "server; install it with: pip install uv"
            ) from error
        return cls(executable, os.environ, cwd)

    async def query(self, args: Sequence[str]) -> UvResult:
        """Run uv for what it prints on stdout."""
        done = await anyio.run_process(
            [self._executable, *args],
            cwd=self._cwd,
            env=self._env,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return UvResult(done.returncode, done.stdout.decode(errors="replace").strip())

    async def run(
        self, args: Sequence[str], progress: Progress | None = None, *, keep: int = -1
    ) -> UvResult:
        """Run uv to its end, reporting its milestones; cancellation kills it.

        The file descriptor `keep` stays open in uv: a lock on it outlives a killed server for as
        long as uv goes on writing.
        """
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        async with await anyio.open_process(
            [self._executable, "--color", "never", *args],
            cwd=self._cwd,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            umask=0o022,
            pass_fds=() if keep < 0 else (keep,),
        ) as process:
            assert process.stdout is not None
            async for line in _lines(TextReceiveStream(process.stdout, errors="replace")):
                if not line.startswith("Using Python"):
                    tail.append(line)
                if progress is not None and _TOLD.match(line):
                    await progress(line.strip())
            code = await process.wait()
        return UvResult(code, "\n".join(tail).strip())


async def _lines(stream: TextReceiveStream) -> AsyncIterator[str]:
    rest = ""
    async for text in stream:
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _with_pyenv(environ: Mapping[str, str]) -> str:
    """PATH with every Python of pyenv in front of its shims, which refuse inactive versions."""
    root = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [str(python.parent) for python in (root / "versions").glob("3.*/bin/python3")]
    return os.pathsep.join([*sorted(found, reverse=True), environ.get("PATH", os.defpath)])


def _cut(output: str) -> str:
    return output if len(output) <= _TAIL_CHARS else f"… {output[-_TAIL_CHARS:]}"
