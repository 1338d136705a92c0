"""Metrics at a front: its own, and those that nodes report."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from kernel_mcp.fleet.members import Member
from kernel_mcp.fleet.metrics import FrontMetrics
from kernel_mcp.telemetry import Levels
from kernel_mcp.telemetry.metrics import Metrics


def node(busy: int) -> str:
    metrics = Metrics()
    metrics.note("cell", {"status": "ok", "duration_s": 0.1})
    metrics.refusal("quota")
    return metrics.text(Levels(sessions={"busy": busy}))[0].decode()


def test_series_of_nodes_have_their_names_and_a_front_leaves_out_what_it_has_not() -> None:
    front = FrontMetrics("1")
    front.refusal("rate")
    alone = front.text(Levels(calls=3))[0].decode()
    assert "kernel_mcp_calls_in_flight 3.0" in alone
    assert "kernel_mcp_sessions" not in alone
    assert "kernel_mcp_cells" not in alone
    there = Member("one", "1", "10.0.0.5")
    front.members = [there, replace(there, name="two"), replace(there, name="old", lost=True)]
    front.nodes = {"one": node(1), "two": node(2)}
    families = {
        each.name: each for each in text_string_to_metric_families(front.text(Levels())[0].decode())
    }
    found = {
        (each.name, *sorted(each.labels.items())): each.value
        for family in families.values()
        for each in family.samples
    }
    for name, busy in (("one", 1), ("two", 2)):
        assert found["kernel_mcp_sessions", ("node", name), ("state", "busy")] == busy
        assert found["kernel_mcp_cells_total", ("node", name), ("outcome", "ok")] == 1
        assert found["kernel_mcp_refusals_total", ("node", name), ("reason", "quota")] == 1
    assert found["kernel_mcp_refusals_total", ("reason", "rate")] == 1
    assert found["kernel_mcp_nodes", ("state", "ready")] == 2
    assert found["kernel_mcp_nodes", ("state", "lost")] == 1
    assert families["kernel_mcp_cells"].type == "counter"
    assert families["kernel_mcp_cell_seconds"].type == "histogram"
    assert front.text(Levels(), "application/openmetrics-text; version=1.0.0")[0].endswith(
        b"# EOF\n"
    )
