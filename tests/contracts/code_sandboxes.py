"""A back-end of a third party: sandboxes of a service, which runs Python over HTTP.

It uses the public interface alone: `kernel_mcp.backends.interface` and `kernel_mcp.errors`. Its
text in `--kernel NAME=sandboxes:URL` is the address of the service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import anyio
import httpx2

from kernel_mcp.backends.interface import Emit
from kernel_mcp.errors import LaunchError

TIMEOUT_S = 20.0


class ServiceBackend:
    """All sandboxes of one service."""

    language = "Python"
    lacking: Mapping[str, str] = {}

    def __init__(self, address: str) -> None:
        self.place = address
        self._client = httpx2.AsyncClient(base_url=address, timeout=TIMEOUT_S)

    async def start(self, session: str) -> ServiceKernel:
        """Create a sandbox. Raises LaunchError."""
        try:
            made = await self._client.post("/sandboxes", json={"metadata": {"session": session}})
            made.raise_for_status()
        except httpx2.HTTPError as reason:
            raise LaunchError(
                f"{self.place} gave no sandbox: {reason}. Try again later, or ask the operator."
            ) from reason
        return ServiceKernel(self._client, made.json()["sandboxID"])

    async def aclose(self) -> None:
        """Close the connections to the service."""
        await self._client.aclose()


class ServiceKernel:
    """One sandbox."""

    def __init__(self, client: httpx2.AsyncClient, sandbox: str) -> None:
        self._client = client
        self._path = f"/sandboxes/{sandbox}"
        self._gone = anyio.Event()
        self._reason = ""

    async def execute(self, code: str, emit: Emit) -> bool:
        """Run a cell; the service streams a JSON object a line."""
        succeeded = True
        request = self._client.stream(
            "POST", f"{self._path}/execute", json={"code": code}, timeout=None
        )
        async with request as answer:
            async for line in answer.aiter_lines():
                event = json.loads(line)
                match event["type"]:
                    case "stdout" | "stderr" as name:
                        emit("stream", {"name": name, "text": event["text"]})
                    case "result":
                        emit("execute_result", {"data": event["data"], "metadata": {}})
                    case "error":
                        succeeded = False
                        lines = event["traceback"].splitlines()
                        error = {"ename": event["name"], "evalue": event["value"]}
                        emit("error", {**error, "traceback": lines})
                    case "gone":
                        self._reason = event["reason"]
                        self._gone.set()
                        succeeded = False
        return succeeded

    async def interrupt(self) -> None:
        """Stop the running cell."""
        await self._client.post(f"{self._path}/interrupt")

    async def ended(self) -> str:
        """Wait until the service has reported the end of the sandbox."""
        await self._gone.wait()
        return self._reason

    async def aclose(self) -> None:
        """Delete the sandbox."""
        await self._client.delete(self._path)
