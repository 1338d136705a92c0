"""Hints that clients ask people by: closed where nothing is open, wide with each door."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mcp_types import ToolAnnotations

from kernel_mcp.config.attachments import attachments
from kernel_mcp.config.grants import restricted_to
from kernel_mcp.config.kernelspecs import kernelspecs
from kernel_mcp.config.mounts import Mount
from kernel_mcp.config.secrets import HeaderSecret
from kernel_mcp.config.settings import Settings
from tests.unit.tools.served import served

CLOSED = Settings()
READ_ONLY_MOUNT = Mount(Path("/data"), "/data")
WRITABLE = Mount(Path("/out"), "/out", "rw")
SECRET = HeaderSecret("TOKEN", "api.example.com", "Authorization", "value")
KERNEL = attachments("http://localhost:8888/?token=abc")

pytestmark = pytest.mark.anyio


async def told(settings: Settings, folder: Path) -> dict[str, ToolAnnotations]:
    """The hints about each tool of a server with these settings."""
    given = {
        name: getattr(settings, name)
        for name in (
            "mounts",
            "network",
            "devices",
            "secrets",
            "attach",
            "kernels",
            "sandbox",
            "workspace",
        )
        if getattr(settings, name) != getattr(CLOSED, name)
    }
    given |= {name: getattr(settings, name) for name in ("allow", "allow_install", "offline")}
    async with served(folder, **given) as server:
        tools = (await server.agent.client.list_tools()).tools
    return {tool.name: tool.annotations for tool in tools if tool.annotations is not None}


def those(found: dict[str, ToolAnnotations], hint: str) -> set[str]:
    return {name for name, each in found.items() if getattr(each, hint)}


RUN_CODE = {"execute", "run_cells", "run_script", "verify"}
WRITE = {"write_file", "export_notebook"}
INSTALL = {"install", "run_script", "create_session"}
END = {"reset", "close_session", "undo", "adopt", "edit_notebook", "create_session"}
READ = {
    *("wait", "check_syntax", "list_sessions", "list_variables", "info", "list_files"),
    *("read_file", "list_packages", "read_notebook", "show"),
}


async def test_every_tool_has_a_title_and_all_hints(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        tools = (await server.agent.client.list_tools()).tools
    for tool in tools:
        each = tool.annotations
        assert each is not None, tool.name
        assert tool.title
        assert each.title == tool.title
        given = (each.destructive_hint, each.idempotent_hint, each.open_world_hint)
        assert all(isinstance(hint, bool) for hint in given), tool.name
        assert each.read_only_hint is (tool.name in READ), tool.name
        assert not (each.read_only_hint and each.destructive_hint), tool.name


@pytest.mark.parametrize(
    ("settings", "destroy", "open_world"),
    [
        (CLOSED, END, set()),
        (replace(CLOSED, mounts=(READ_ONLY_MOUNT,)), END, set()),
        (replace(CLOSED, mounts=(READ_ONLY_MOUNT, WRITABLE)), END | RUN_CODE | WRITE, set()),
        (replace(CLOSED, workspace=Path("/work")), END | RUN_CODE | WRITE, set()),
        (replace(CLOSED, devices=(Path("/dev/nvidia0"),)), END | RUN_CODE, set()),
        (replace(CLOSED, network=("example.com",)), END | RUN_CODE, RUN_CODE),
        (replace(CLOSED, secrets=(SECRET,)), END | RUN_CODE, RUN_CODE),
        (replace(CLOSED, attach=KERNEL), END | RUN_CODE, RUN_CODE | {"create_session"}),
        (replace(CLOSED, kernels=kernelspecs("r=ir")), END, set()),
        (replace(CLOSED, kernels=kernelspecs("lab=http://h:1")), END | RUN_CODE, RUN_CODE),
        (replace(CLOSED, sandbox=("none",)), END | RUN_CODE | WRITE, RUN_CODE),
        (replace(CLOSED, allow=("pandas",)), END, INSTALL),
        (replace(CLOSED, allow=("*",)), END, set()),
        (replace(CLOSED, allow_install=("pandas",)), END, INSTALL),
        (replace(CLOSED, allow_install=("*",)), END, INSTALL | RUN_CODE),
        (replace(CLOSED, allow_install=("*",), offline=True), END, set()),
    ],
)
async def test_hints_follow_from_what_is_open(
    settings: Settings, destroy: set[str], open_world: set[str], tmp_path: Path
) -> None:
    found = await told(settings, tmp_path)
    assert those(found, "destructive_hint") == destroy
    assert those(found, "open_world_hint") == open_world
    assert those(found, "read_only_hint") == READ


async def test_hints_of_a_principal_are_those_of_its_doors(tmp_path: Path) -> None:
    settings = replace(CLOSED, mounts=(WRITABLE,), network=("example.com",))
    for doors, destroy, open_world in (
        ((), END, set()),
        (("mount:/out",), END | RUN_CODE | WRITE, set()),
        (("network",), END | RUN_CODE, RUN_CODE),
    ):
        found = await told(
            restricted_to(settings, doors), tmp_path / "-".join(doors).replace("/", "")
        )
        assert those(found, "destructive_hint") == destroy
        assert those(found, "open_world_hint") == open_world
