"""`python -m benchmarks.customers`: an MCP server with customers, their orders and a long text."""

from __future__ import annotations

from typing import Any

from mcp.server import MCPServer

CUSTOMERS = 200
ORDERS = 3
server = MCPServer("customers")


@server.tool()
def list_customers() -> list[dict[str, Any]]:
    """List all customers."""
    return [{"id": each, "name": f"Customer {each}", "city": "Oslo"} for each in range(CUSTOMERS)]


@server.tool()
def list_orders(customer: int) -> list[dict[str, Any]]:
    """List the orders of a customer."""
    return [
        {"id": 10 * customer + each, "customer": customer, "amount": 7 * customer + each}
        for each in range(ORDERS)
    ]


@server.tool()
def long_text(characters: int) -> str:
    """Return so many characters."""
    return "x" * characters


if __name__ == "__main__":
    server.run("stdio")
