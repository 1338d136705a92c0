"""Documents agree with the code and with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_mcp import __version__
from kernel_mcp.config.settings import OPTIONS
from kernel_mcp.tools import SCHEMAS
from tests.reference import DOCS, PAGES, definitions, parts, schemas, with_part
from tests.unit.tools.served import served

pytestmark = [pytest.mark.anyio]

ROOT = DOCS.parent
README = ROOT / "README.md"
README_BYTES = 8 * 1024
CHANGELOG = ROOT / "CHANGELOG.md"
CHANGELOG_BYTES = 6 * 1024
LINK = re.compile(r"\]\(([^()\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> Iterator[str]:
    """Anchors of a page: its own, and those that GitHub makes of headings."""
    text = prose(page)
    yield from re.findall(r'<a id="([^"]+)">', text)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(page: Path) -> list[str]:
    """Links of a page to files of the project."""
    return [link for link in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]


def leads_to(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= README_BYTES


def test_the_changelog_is_a_page_that_has_this_version() -> None:
    text = CHANGELOG.read_text("utf-8")
    assert len(text.encode()) <= CHANGELOG_BYTES
    versions = re.findall(r"^## \[(.*)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", __version__]
    kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelog_names_flags_that_exist_and_those_that_were_removed() -> None:
    text = CHANGELOG.read_text("utf-8")
    before, _, after = text.partition("### Removed")
    removed, _, after = after.partition("###")
    flags = {f"--{option.name}" for option in OPTIONS} | {"--config"}
    assert set(re.findall(r"--[a-z][a-z-]*", before + after)) <= flags
    gone = set(re.findall(r"^- `(--[a-z-]+)`", removed, re.MULTILINE))
    assert gone
    assert not gone & flags


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        target, anchor = leads_to(page, link)
        assert target.exists(), link
        assert not anchor or anchor in set(anchors(target)), link


def test_the_index_names_every_page_of_its_folder_and_leads_to_all() -> None:
    index = DOCS / "README.md"
    named = {leads_to(index, link)[0] for link in links(index)}
    assert set(DOCS.glob("*.md")) - {index} <= named
    found, ahead = set[Path](), [README]
    while ahead:
        page = ahead.pop()
        found.add(page)
        targets = {leads_to(page, link)[0] for link in links(page)}
        ahead += [each for each in targets - found if each.suffix == ".md"]
    assert set(pages()) <= found


async def test_generated_parts_are_up_to_date() -> None:
    for name, text in (await parts()).items():
        page = (DOCS / PAGES[name]).read_text("utf-8")
        assert with_part(page, name, text) == page, "run: make reference"
    assert SCHEMAS.read_text("utf-8") == await schemas(), "run: make reference"


async def test_generated_parts_have_every_flag_and_tool() -> None:
    made = await parts()
    tools, _, _ = await definitions()
    assert all(f"| `{option.flag}" in made["flags"] for option in OPTIONS)
    assert re.findall(r"^### (\w+)$", made["tools"], re.MULTILINE) == [each.name for each in tools]


def test_a_page_without_the_part_is_refused() -> None:
    page = "<!-- a -->\nold\n<!-- end of a -->\n"
    assert with_part(page, "a", "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError, match="expected one part 'b', found 0"):
        with_part(page, "b", "new\n")


async def test_the_overview_of_tools_names_each_once_and_its_session() -> None:
    page = (DOCS / "tools.md").read_text("utf-8")
    table = page.partition("## Overview")[2].partition("## Arguments")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    tools, _, _ = await definitions()
    assert sorted(named) == sorted(each.name for each in tools)
    alone = next(line for line in page.splitlines() if line.startswith("Every tool but"))
    without = {each.name for each in tools if "session" not in each.input_schema["properties"]}
    assert set(re.findall(r"`(\w+)`", alone.partition(" has the argument")[0])) == without


async def test_the_table_of_a_cell_names_every_field(tmp_path: Path) -> None:
    page = (DOCS / "answers.md").read_text("utf-8")
    table = page.partition("| field | |")[2]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    calls = {"execute": {"code": "say 1"}, "run_script": {"script": "say 1"}}
    async with served(tmp_path) as server:
        for tool, arguments in calls.items():
            meta = (await server.call(tool, **arguments)).result.meta or {}
            has = set(meta["kernel-mcp/cell"])
            assert has - ({"stdout", "stderr"} if tool == "run_script" else set()) == named
