"""A client that takes all that it gets, as a process: `URL TOKEN`; until it is killed."""

from __future__ import annotations

import sys

import anyio
import httpx2

from tests.integration.httpclient import PATIENCE_S, Wire, bearer

AT_ONCE = 32


async def main(url: str, token: str) -> None:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(headers=bearer(token), timeout=PATIENCE_S, limits=limits) as http:
        client = Wire(http, url)

        async def take() -> None:
            while True:
                await client.call("execute", code="sum(range(10**7))")

        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE):
                tasks.start_soon(take)
            await client.call("list_sessions")
            print("begun", flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
