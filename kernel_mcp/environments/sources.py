"""`Sources`: where packages come from, as the operator decides."""

from __future__ import annotations

from dataclasses import dataclass


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

    def options(self) -> list[str]:
        """As options of `uv pip`."""
        index = ["--default-index", self.index_url] if self.index_url else []
        links = [word for place in self.find_links for word in ("--find-links", place)]
        return [*index, *links, *(["--offline"] if self.offline else [])]
