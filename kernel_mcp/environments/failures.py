"""`UvResult`: how a run of uv ended, and its failures in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_mcp.errors import EnvironmentBuildError

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
    r" distributions .*(is|are) disabled|--no-build"
)
_NO_VERSION = re.compile(r"Because (?:there is no version of|only) ([^\s<>=!~]+)")
_BUILD_FAILED = re.compile(r"Failed to build `?([^\s`]+)")
_NO_SPACE = re.compile(r"No space left on device|os error 28|Disk quota exceeded")


@dataclass(frozen=True, slots=True)
class UvResult:
    """How a run of uv ended: its exit code and the tail of what it printed."""

    code: int
    output: str

    @property
    def lacks_wheel(self) -> bool:
        """Whether it failed because building from source is switched off."""
        return bool(self.code and _NO_WHEEL.search(self.output))

    @property
    def conflict(self) -> bool:
        """Whether no versions fit all that is asked for."""
        return bool(self.code and "No solution found" in self.output)

    def error(self, wanted: Sequence[str], python: str) -> EnvironmentBuildError:
        """The failure to bring `wanted` to a Python version, with cause, remedy and uv's words."""
        names = ", ".join(wanted)
        return EnvironmentBuildError(
            f"could not build a Python {python} environment with {names}: {self.cause()}\n"
            f"{self.said()}"
        )

    def said(self) -> str:
        """The end of uv's own words."""
        cut = self.output if len(self.output) <= _SAID_CHARS else f"… {self.output[-_SAID_CHARS:]}"
        return f"uv said:\n{cut}"

    def cause(self) -> str:
        """The cause and what to do about it."""
        told = " ".join(self.output.split())  # uv breaks lines where they grow long
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
            return (
                "a package has no wheel for this Python and platform, and building from source "
                "is switched off because it would run the package's own code. Ask for another "
                "version, or another --python."
            )
        if self.conflict:
            return "these requirements contradict each other. Relax or drop one of them."
        return "uv failed."


def _file_name(address: str) -> str:
    return address.rstrip("/").rpartition("/")[2]
