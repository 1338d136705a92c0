"""Code of cells calls the tools of a real MCP server, through a real client of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import crm
from tests.integration.servers import Servers

pytestmark = [pytest.mark.anyio]

JOIN = """
from tools import crm
customers = crm.list_customers()
orders = {each["id"]: crm.list_orders(each["id"]) for each in customers}
totals = {number: sum(each["amount"] for each in rows) for number, rows in orders.items()}
best = sorted(customers, key=lambda each: -totals[each["id"]])[:3]
for each in best:
    print(each["name"], totals[each["id"]])
"""
JOINED = "Customer 199 5973\nCustomer 198 5943\nCustomer 197 5913\n"


def listed(folder: Path, **facts: Any) -> str:
    """Write the file of `--tool-servers` for the customers of the tests, and return its path."""
    row = {
        "command": sys.executable,
        "args": ["-m", "tests.crm", str(folder / "log")],
        "cwd": str(Path(crm.__file__).parents[1]),
        **facts,
    }
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"crm": row}}))
    return str(file)


async def test_customers_are_joined_with_their_orders_in_one_cell(
    servers: Servers, tmp_path: Path
) -> None:
    flags = ("--tool-servers", listed(tmp_path), "--allow-tool", "crm.list_*")
    async with servers.agent(*flags) as agent:
        answer = await agent.run(JOIN)
        assert JOINED in answer.text
        assert "The code called tools: crm 201 times" in answer.text
        assert len(JOIN) + len(answer.text) <= 2500
