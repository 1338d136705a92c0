"""SECURITY.md and the pages below docs/security: short, whole, and with tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp.config.settings import Settings
from kernel_mcp.units import GIB

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "SECURITY.md"
DETAILS = sorted((ROOT / "docs/security").glob("*.md"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
MOST_BYTES = 9 * 1000
"""Size of two printed pages."""
LINK = re.compile(r"\]\(([^)\s]*)\)")
LEAST_ATTACKS = 20


def section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of a table, without its two rows of heading."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def anchors(page: Path) -> set[str]:
    """Return the names that links to parts of a page may use, as GitHub makes them."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def links() -> Iterator[tuple[Path, str]]:
    """Yield the links of all documents that lead to or from the pages on security."""
    for page in DOCUMENTS:
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve() if link[0] != "#" else page
            if "://" not in link and (page in {PAGE, *DETAILS} or target in {PAGE, *DETAILS}):
                yield page, link


def test_the_page_is_short() -> None:
    assert len(PAGE.read_bytes()) <= MOST_BYTES


def test_every_attack_names_a_test_that_exists() -> None:
    found = rows(section("Attacks"))
    assert len(found) > LEAST_ATTACKS
    for attack, defence, residual, test in found:
        named = LINK.findall(test)
        assert all((attack, defence, residual, named)), attack
        for path in named:
            assert "def test_" in (ROOT / path).read_text(), path


def test_every_link_to_or_from_the_pages_leads_somewhere() -> None:
    lost = []
    for page, link in links():
        path, _, part = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (part and part not in anchors(target)):
            lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert lost == []


@pytest.mark.parametrize("page", DETAILS, ids=lambda page: page.name)
def test_every_page_of_details_is_linked_and_says_first_what_it_covers(page: Path) -> None:
    assert f"({page.relative_to(ROOT)})" in section("Details")
    _, first, *_ = page.read_text().split("\n\n")
    assert re.match("This page covers ", first)


def test_the_limits_that_the_page_names_are_the_defaults() -> None:
    limits = Settings().limits
    said = (
        f"{limits.memory_bytes // GIB} GiB of memory, {limits.cpus:g} processors, "
        f"{limits.pids} processes, {limits.disk_bytes // GIB} GiB of workspace, "
        f"{Settings().timeout_s / 60:g} minutes for a cell"
    )
    assert said in section("On by default")
