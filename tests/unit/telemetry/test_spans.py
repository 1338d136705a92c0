"""Spans: nested in those of calls, across tasks, with a handle and an outcome and no more."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kernel_mcp.telemetry.origin import Origin
from kernel_mcp.telemetry.spans import OriginContext, Span, caught, of_session


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Has the spans of a provider that is there for this test."""
    provider, found = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield found
    provider.shutdown()


def test_without_a_provider_there_is_no_span() -> None:
    with Span("cell", session="s-1") as span:
        span.ended("ok", well=True)
        assert not trace.get_current_span().get_span_context().is_valid


def test_a_span_has_its_facts_and_its_outcome(exporter: InMemorySpanExporter) -> None:
    with Span("launch", session="s-1") as span:
        span.note(kind="forked")
    (found,) = exporter.get_finished_spans()
    assert found.name == "launch"
    assert dict(found.attributes or {}) == {
        "kernel_mcp.session": "s-1",
        "kernel_mcp.kind": "forked",
    }
    assert found.status.status_code is StatusCode.UNSET


def test_an_error_sets_the_status_and_keeps_its_text(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="hunter2"), Span("install", session="s-1"):
        raise ValueError("hunter2")
    (found,) = exporter.get_finished_spans()
    assert found.status.status_code is StatusCode.ERROR
    assert found.status.description == "ValueError"
    assert "hunter2" not in found.to_json()
    assert found.events == ()


@pytest.mark.anyio
async def test_a_cancelled_span_is_no_error(exporter: InMemorySpanExporter) -> None:
    with anyio.CancelScope() as scope:
        with Span("hibernate", session="s-1"):
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    (found,) = exporter.get_finished_spans()
    assert (found.attributes or {})["kernel_mcp.outcome"] == "cancelled"
    assert found.status.status_code is StatusCode.UNSET


def test_work_in_another_task_nests_in_the_call_it_came_with(
    exporter: InMemorySpanExporter,
) -> None:
    with Span("first call", session="s-1"):
        own = of_session("s-1", "ada")
    with Span("call", session="s-1"):
        origin = caught("s-1", "ada")
    with OriginContext(own):
        with Span("save", session="s-1"):
            pass
        with OriginContext(origin), Span("cell", session="s-1"):
            pass
    found = {each.name: each for each in exporter.get_finished_spans()}
    call, cell = found["call"], found["cell"]
    assert cell.parent is not None
    assert cell.parent.span_id == call.get_span_context().span_id  # type: ignore[union-attr]
    assert found["save"].parent is None


def test_an_origin_without_spans_leaves_those_around_it(exporter: InMemorySpanExporter) -> None:
    with Span("call"), OriginContext(Origin("1")), Span("install"):
        pass
    install, _ = exporter.get_finished_spans()
    assert install.parent is not None
