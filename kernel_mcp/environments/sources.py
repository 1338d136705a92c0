"""`Sources`: where packages come from, as the operator decides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernel_mcp.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Sources:
    """The package index and its stand-ins.

    index_url   instead of uv's own default index; empty for that
    offline     nothing is fetched: only uv's cache and `find_links` count
    find_links  folders and pages with wheels, looked at beside the index
    """

    index_url: str = ""
    offline: bool = False
    find_links: tuple[str, ...] = ()

    def folders(self) -> list[Path]:
        """The local folders among them, with absolute paths."""
        places = [place.removeprefix("file://") for place in (self.index_url, *self.find_links)]
        return [Path(place) for place in places if place.startswith("/")]

    def options(self) -> list[str]:
        """As options of `uv pip`."""
        index = ["--default-index", self.index_url] if self.index_url else []
        links = [word for place in self.find_links for word in ("--find-links", place)]
        return [*index, *links, *(["--offline"] if self.offline else [])]


def sources(settings: Settings) -> Sources:
    """Where this server's packages come from."""
    return Sources(settings.index_url, settings.offline, settings.find_links)
