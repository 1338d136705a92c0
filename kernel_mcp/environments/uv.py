"""Run uv, with a cache of the server's own."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from anyio.streams.text import TextReceiveStream

from kernel_mcp.config.settings import Settings
from kernel_mcp.errors import EnvironmentBuildError
from kernel_mcp.linux.commands import output_of, running
from kernel_mcp.linux.process import search_path, tie_to_server
from kernel_mcp.output.terminal import clean
from kernel_mcp.records import dataclass
from kernel_mcp.sandbox.base import SandboxCommand


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of packages.

    index_url   address of the package index; empty for uv's default index
    offline     only uv's cache and `find_links`, no network
    find_links  folders and pages with wheels, besides the index
    """

    index_url: str = ""
    offline: bool = False
    find_links: tuple[str, ...] = ()

    def folders(self) -> list[Path]:
        """Return the local folders among the index and `find_links`, absolute."""
        places = [place.removeprefix("file://") for place in (self.index_url, *self.find_links)]
        return [Path(place) for place in places if place.startswith("/")]

    def options(self) -> list[str]:
        """Return the options for `uv pip`."""
        index = ["--default-index", self.index_url] if self.index_url else []
        links = [word for place in self.find_links for word in ("--find-links", place)]
        return [*index, *links, *(["--offline"] if self.offline else [])]


def sources(settings: Settings) -> Sources:
    """Return the package sources of these settings."""
    return Sources(settings.index_url, settings.offline, settings.find_links)


_SAID_CHARS = 1500
_NO_NETWORK = re.compile(
    r"error sending request|dns error|tcp connect error|Failed to fetch|timed out|network", re.I
)
_NOT_FOUND = re.compile(r"Because (\S+) was not found in the package registry")
_NOT_FOUND_LOCALLY = re.compile(r"Because (\S+) was not found in the provided package locations")
_NOT_CACHED = re.compile(
    r"Because (\S+) was not found in the cache"
    r"|disabled, but the requested data wasn't found in the cache for: `([^`]+)`"
    r"|network was disabled"
)
_NO_WHEEL = re.compile(
    r"no usable wheels|no wheels with a matching|Wheels are required|[Bb]uilding source"
    r" distributions .{0,200}(is|are) disabled|--no-build"
)
_WITHOUT_WHEEL = re.compile(
    r"Because (?:all versions of )?([^\s<>=!~]+)(?:[<>=!~]\S*)? ha(?:s|ve) no "
)
_NO_VERSION = re.compile(r"Because (?:there is no version of|only) ([^\s<>=!~]+)")
_BUILD_FAILED = re.compile(r"Failed to build `?([^\s`]+)")
_OTHER_FILE = re.compile(r"Hash mismatch for `([^`]+)`")
_FROM_A_PLACE = re.compile(r"Package `([^`]+)` was included as a URL dependency")
_NO_SPACE = re.compile(r"No space left on device|os error 28|Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class UvResult:
    """The exit code of uv and the end of its output."""

    code: int
    output: str

    @property
    def lacks_wheel(self) -> bool:
        """True if uv failed because a package has no wheel and source builds are off."""
        return bool(self.code and _NO_WHEEL.search(self.output))

    @property
    def conflict(self) -> bool:
        """True if the requirements have no solution."""
        return bool(self.code and "No solution found" in self.output)

    def names(self, requirement: str) -> bool:
        """Return True if the output names the package of a requirement."""
        name = re.match(r"[\w.-]*", requirement)
        assert name is not None  # which may be empty
        return bool(re.search(rf"(?<![\w.-]){re.escape(name[0])}(?![\w-])", self.output))

    def error(self, wanted: Sequence[str], python: str) -> EnvironmentBuildError:
        """Return the error for `wanted` on a Python version.

        It has the cause, the remedy and the end of uv's output.
        """
        names = ", ".join(wanted)
        return EnvironmentBuildError(
            f"could not build a Python {python} environment with {names}: {self.cause()}\n"
            f"{self.said()}"
        )

    def said(self) -> str:
        """Return the end of uv's output."""
        cut = self.output if len(self.output) <= _SAID_CHARS else f"… {self.output[-_SAID_CHARS:]}"
        return f"uv said:\n{cut}"

    def cause(self) -> str:
        """Return the cause of the failure and its remedy."""
        told = " ".join(self.output.split())  # uv wraps long lines
        if match := _NOT_FOUND.search(told) or _NOT_FOUND_LOCALLY.search(told):
            return (
                f"the package index has no package {match[1]!r}. Check the spelling; modules and "
                "packages can differ in name, the package is what gets installed."
            )
        if match := _NOT_CACHED.search(told):
            missing = _file_name(match[1] or match[2] or "something needed")
            return (
                f"the network is switched off for uv (--offline) and {missing} is not in its "
                "cache. Install it once with network, or give a folder with its wheel as "
                "--find-links."
            )
        if match := _OTHER_FILE.search(told):
            return (
                f"the index has other files of {match[1]} than the hashes allow that were written "
                "down for it. Find out which is right; then lock or hash it again."
            )
        if match := _FROM_A_PLACE.search(told):
            return (
                f"a package takes {match[1]} from a place of its own choice, and packages are "
                "taken by name from the index alone. Ask for another version of what needs it."
            )
        if _NO_SPACE.search(told):
            return "the disk is full. Free some space, then try again."
        if not self.conflict and _NO_NETWORK.search(told):
            return (
                "the package index cannot be reached. Check the network, the proxy "
                "(HTTPS_PROXY) or the index (--index-url), then try again."
            )
        if match := _BUILD_FAILED.search(told):
            return (
                f"{match[1]} has no wheel for this Python and platform, and building it from "
                "source failed. Ask for another version, or another --python."
            )
        if match := _NO_VERSION.search(told):
            return f"no release of {match[1]} fits what is asked for. Relax the version."
        if self.lacks_wheel:
            match = _WITHOUT_WHEEL.search(told)
            return (
                f"{match[1] if match else 'a package'} has no wheel for this Python and platform, "
                "and building from source is switched off because it would run the package's own "
                "code. Ask for another version, or another --python."
            )
        if self.conflict:
            return "these requirements contradict each other. Relax or drop one of them."
        return "uv failed."


def _file_name(address: str) -> str:
    return address.rstrip("/").rpartition("/")[2]


ProgressCallback: TypeAlias = Callable[[str], Awaitable[None]]
"""Awaited with short lines about the work in progress."""


async def silence(_text: str) -> None:
    """Discard the text, as a ProgressCallback."""


CACHE = "uv-cache"
_TAIL_LINES = 40
_LINE_CHARS = 2000
# These would make uv use the folder, environment or interpreter of another project.
_DROPPED = (
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT",
    "UV_NO_CACHE", "UV_PROJECT", "UV_PYTHON", "UV_PYTHON_SEARCH_PATH", "UV_SYSTEM_PYTHON",
    "UV_WORKING_DIRECTORY", "UV_WORKING_DIR",
)  # fmt: skip
# Clients start servers with few variables, so a proxy's certificate is found only in the system's
# store; uv's own list of authorities does not contain it.
_TRUST_SETTINGS = ("UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "SSL_CERT_FILE")
_SYSTEM_TRUST = Path("/etc/ssl/certs")
_PROGRESS = re.compile(r"(Resolved|Downloading|Downloaded|Prepared|Installed|Bytecode compiled)\b")

Command: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], SandboxCommand]
"""Function from uv's arguments and environment to the command that runs in its place."""


class Uv:
    """The uv executable with its environment variables."""

    def __init__(
        self,
        executable: str,
        environ: Mapping[str, str],
        root: Path,
        sources: Sources | None = None,
    ) -> None:
        """Prepare uv's environment variables; its cache is a folder in `root`."""
        self.executable = executable
        self._version = ""
        self.cache = root / CACHE
        self.sources = sources or Sources()
        self._env = {name: text for name, text in environ.items() if name not in _DROPPED}
        self._env["PATH"] = _interpreters(self._env)
        self._env["UV_NO_PROGRESS"] = "1"
        self._env["UV_CACHE_DIR"] = str(self.cache)
        if self.sources.offline:
            self._env["UV_OFFLINE"] = "1"
        if not any(name in environ for name in _TRUST_SETTINGS) and _SYSTEM_TRUST.is_dir():
            self._env["UV_SYSTEM_CERTS"] = "1"

    @classmethod
    def installed(cls, root: Path, sources: Sources | None = None) -> Uv:
        """Return the uv installed with the server. Raises EnvironmentBuildError if missing."""
        import uv

        try:
            executable = uv.find_uv_bin()
        except FileNotFoundError as error:
            raise EnvironmentBuildError(
                "uv, which builds the environments of the kernels, is not installed beside the "
                "server; install it with: pip install uv"
            ) from error
        return cls(executable, os.environ, root, sources)

    @property
    def sight(self) -> str:
        """Digest of all settings that decide which packages uv finds."""
        settings = sorted(item for item in self._env.items() if item[0].startswith("UV_"))
        return sha256(repr((settings, self.sources)).encode()).hexdigest()

    async def version(self) -> str:
        """Return the version of uv; empty if it does not report one."""
        if not self._version:
            told = (await self.query(["--version"])).output.split()
            self._version = told[1] if told[:1] == ["uv"] and len(told) > 1 else ""
        return self._version

    async def default_index(self) -> str:
        """Return the address of uv's default index from its help text; empty if it has none."""
        told = " ".join((await self.query(["pip", "install", "--help"])).output.split())
        found = re.search(r"default package index \(by default: <(\S+?)>\)", told)
        return found[1] if found else ""

    async def query(self, args: Sequence[str]) -> UvResult:
        """Run uv; return its exit code and stdout."""
        done = await output_of([self.executable, *args], env=self._env)
        return UvResult(done.code, done.stdout.decode(errors="replace").strip())

    async def run(
        self,
        args: Sequence[str],
        progress: ProgressCallback = silence,
        *,
        keep: int = -1,
        confined: Command | None = None,
        started: Callable[[int], None] | None = None,
    ) -> UvResult:
        """Run uv to its end, reporting milestones; cancellation kills it.

        uv inherits the descriptor `keep`: if the server is killed, a lock on it is held until uv
        exits. `confined` puts uv into a sandbox. `started` is called with the process id.
        """
        argv = [self.executable, "--color", "never", *args]
        if confined is None:
            command = SandboxCommand([*tie_to_server(), *argv], (), self._env)
        else:
            command = confined(argv, self._env)
        return await run_command(command, progress, keep=keep, started=started)


async def run_command(
    command: SandboxCommand,
    progress: ProgressCallback = silence,
    *,
    keep: int = -1,
    started: Callable[[int], None] | None = None,
) -> UvResult:
    """Run a command to its end as `Uv.run` does; its output is cleaned like that of cells."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    kept = () if keep < 0 else (keep,)
    passed = (*command.pass_fds, *kept)
    async with AsyncExitStack() as until_end:
        try:
            process = await until_end.enter_async_context(
                running(command.argv, env=command.env, pass_fds=passed)
            )
        finally:
            command.close_passed()
        assert process.stdout is not None
        if started is not None:
            started(process.pid)
        async for line in _lines(TextReceiveStream(process.stdout, errors="replace")):
            text = clean(line)
            if not text.startswith("Using Python"):
                tail.append(text)
            if _PROGRESS.match(text.lstrip()):
                await progress(text.strip())
        code = await process.wait()
    return UvResult(code, "\n".join(tail).strip())


async def _lines(stream: TextReceiveStream) -> AsyncIterator[str]:
    rest = ""
    async for text in stream:
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield line[:_LINE_CHARS]
        rest = rest[:_LINE_CHARS]
    if rest:
        yield rest


def _interpreters(environ: Mapping[str, str]) -> str:
    """Return PATH with every Python of pyenv before its shims, which refuse inactive versions.

    Virtual and conda environments are left out: uv would start their Python with its packages.
    """
    try:
        root = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        found = [str(python.parent) for python in (root / "versions").glob("3.*/bin/python3")]
    except (OSError, RuntimeError):  # the home of another user, as after `su`, or none
        found = []
    places = [*sorted(found, reverse=True), *search_path(environ).split(os.pathsep)]
    return os.pathsep.join(filter(_is_base, places))


def _is_base(programs: str) -> bool:
    try:
        folder = Path(programs)
        marks = (folder.with_name("pyvenv.cfg"), folder.with_name("conda-meta"))
        return folder.is_absolute() and not any(mark.exists() for mark in marks)
    except OSError:
        return True
