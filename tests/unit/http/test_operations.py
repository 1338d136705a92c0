"""Health, readiness and metrics, as an HTTP client sees them."""

from __future__ import annotations

import builtins
import re
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from kernel_mcp.config.settings import Settings
from kernel_mcp.http.callers import caller_of
from kernel_mcp.http.operations import RequestIds, meters_of_http, routes
from kernel_mcp.identity import Principal
from kernel_mcp.telemetry import Levels, Meters, Readiness
from kernel_mcp.telemetry.origin import HERE, Origin


@dataclass
class Server:
    """The routes of a server whose state a test sets."""

    meters: Meters = field(default_factory=lambda: meters_of_http(Settings()))
    readiness: Readiness = field(default_factory=Readiness)
    draining: bool = False

    def get(self, path: str) -> Any:
        async def levels() -> Levels:
            return Levels(sessions={"idle": 2})

        found = routes(self.readiness, lambda: self.draining, self.meters, levels)
        return TestClient(Starlette(routes=found)).get(path)


def test_a_server_that_answers_lives() -> None:
    found = Server().get("/healthz")
    assert (found.status_code, found.text) == (200, "ok\n")


def test_a_server_is_ready_when_it_can_start_kernels() -> None:
    server = Server()
    found = server.get("/readyz")
    assert (found.status_code, found.text) == (503, "preparing for kernels\n")
    server.readiness.ready = True
    assert server.get("/readyz").status_code == 200
    assert server.get("/readyz").headers["cache-control"] == "no-store"


def test_a_server_that_drains_is_not_ready_and_lives() -> None:
    server = Server(readiness=Readiness(ready=True), draining=True)
    found = server.get("/readyz")
    assert (found.status_code, found.text) == (503, "draining\n")
    assert server.get("/healthz").status_code == 200


def test_metrics_are_text_with_the_levels_of_the_moment() -> None:
    server = Server()
    server.meters.note("cell", {"status": "ok", "duration_s": 0.1})
    found = server.get("/metrics")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/plain; version=")
    assert 'kernel_mcp_sessions{state="idle"} 2.0' in found.text
    assert 'kernel_mcp_cells_total{outcome="ok"} 1.0' in found.text


def test_without_the_package_the_answer_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in sys.modules if each.startswith("kernel_mcp.telemetry.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    found = Server(meters=meters_of_http(Settings())).get("/metrics")
    assert found.status_code == 501
    assert "py3-none-any.whl[http]'" in found.json()["error"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("req-1", True), ("", False), ("a b", False), ("x" * 65, False)],
    ids=["proxy", "none", "words", "long"],
)
def test_a_request_is_known_by_its_id_and_principal(given: str, kept: bool) -> None:
    seen: list[Origin] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(HERE.get())
        assert caller_of(Request(scope)).request == seen[0].request
        await PlainTextResponse("")(scope, receive, send)

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"principal": Principal("ada")}
        await RequestIds(app)(scope, receive, send)

    TestClient(outer).get("/", headers={"x-request-id": given} if given else {})
    (origin,) = seen
    assert origin.principal == "ada"
    assert (origin.request == given) is kept
    assert re.fullmatch(r"[\w.-]{1,64}", origin.request)
    assert HERE.get() == Origin()
