"""The tools for a session's packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_mcp.packages.result import PackageStatus
from tests.unit.tools.served import served

pytestmark = [pytest.mark.anyio]


async def test_what_was_installed_is_described_as_the_session_sees_it(tmp_path: Path) -> None:
    told: list[str | None] = []
    async with served(tmp_path) as server:
        answer = await server.call(
            "install", packages=["kmtest"], on_progress=lambda _n, _of, text: told.append(text)
        )
        assert not answer.failed
        assert answer.text == answer.data["summary"]
        assert answer.data["session"] == server.session.handle
        assert answer.data["allowed_imports"] == ["kmtest"]
        assert not answer.data["reset_needed"]
        (package,) = answer.data["packages"]
        assert (package["name"], package["version"], package["state"]) == ("kmtest", "1.0", "works")
        assert (package["previous"], package["requested"]) == ("", True)
    assert told == ["Resolved"]


async def test_a_package_that_does_not_work_is_an_error_with_the_same_description(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as server:
        server.installer.state = PackageStatus.FAILS
        answer = await server.call("install", packages=["kmtest"])
        assert answer.failed
        assert answer.data["packages"][0]["state"] == "fails"
        server.installer.state = PackageStatus.NEEDS_RESET
        answer = await server.call("install", packages=["kmtest"])
        assert not answer.failed
        assert answer.data["reset_needed"]


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (["rich"], "--allow-install rich"),
        (["-r x"], "'-r x' is an option"),
        (["json"], "part of Python itself"),
        ("kmtest, rich", "--allow-install rich"),
    ],
)
async def test_what_may_not_be_installed_is_refused(
    tmp_path: Path, packages: object, words: str
) -> None:
    async with served(tmp_path) as server:
        assert words in await server.agent.refused("install", packages=packages)


async def test_packages_are_listed_with_where_they_come_from(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        found = (await server.call("list_packages")).data
        assert found["packages"] == [
            {"name": "ipykernel", "version": "7.0", "source": "environment"}
        ]
        assert found["installable"] == "beside, kmtest"
        table = (await server.call("list_packages", match="ipy")).text
        assert table.endswith("install may add: beside, kmtest.\nipykernel 7.0")
        assert (await server.call("list_packages", match="other")).data["packages"] == []
    async with served(tmp_path / "other", allow_install=()) as server:
        assert (await server.call("list_packages")).data["installable"] == "nothing"
