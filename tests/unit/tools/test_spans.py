"""The spans of a call: those of cells and launches nest in the one that the SDK makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.unit.tools.served import served

pytestmark = [pytest.mark.anyio]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    provider, found = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield found
    provider.shutdown()  # the SDK keeps its tracer


def parents(span: ReadableSpan, spans: dict[int, ReadableSpan]) -> list[str]:
    """The names of the spans around one, innermost first."""
    found = []
    parent = span.parent
    while parent is not None and parent.span_id in spans:
        span = spans[parent.span_id]
        found.append(span.name)
        parent = span.parent
    return found


async def test_spans_of_cells_and_launches_nest_in_those_of_their_calls(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with served(tmp_path) as server:
        await server.agent.call("execute", code="secret = 1")
        await server.agent.call("execute", code="raise hunter2")
    ended = exporter.get_finished_spans()
    spans = {each.context.span_id: each for each in ended if each.context is not None}
    cells = [each for each in ended if each.name == "cell"]
    (launch,) = [each for each in ended if each.name == "launch"]
    assert parents(launch, spans)[0] == "cell"
    calls = [parents(each, spans) for each in cells]
    assert all(call and "execute" in call[0] for call in calls)
    first, second = cells
    assert first.parent != second.parent
    assert (first.attributes or {})["kernel_mcp.outcome"] == "ok"
    assert second.status.status_code is StatusCode.ERROR
    ours = "".join(each.to_json() for each in (*cells, launch))
    assert "secret" not in ours
    assert "hunter2" not in ours
