"""Meters for Prometheus: what is counted, and labels that nobody can make more of."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kernel_mcp.sessions.events import NO_START, START
from kernel_mcp.telemetry import Levels, Meters
from kernel_mcp.telemetry.metrics import CAUSES, KINDS, OUTCOMES, Metrics


def series(metrics: Metrics, levels: Levels | None = None) -> dict[str, float]:
    """The value of each series by its name and labels."""
    text, _ = metrics.text(levels or Levels())
    return {
        f"{each.name}{''.join(f' {value}' for value in each.labels.values())}": each.value
        for family in text_string_to_metric_families(text.decode())
        for each in family.samples
    }


def test_cells_are_counted_by_outcome_and_timed() -> None:
    metrics = Metrics()
    for outcome in OUTCOMES:
        metrics.note("cell", {"status": outcome, "duration_s": 0.3})
    metrics.note("cell", {"status": "ok", "duration_s": 0.3})
    found = series(metrics)
    assert found["kernel_mcp_cells_total ok"] == 2
    assert found["kernel_mcp_cells_total killed"] == 1
    assert found["kernel_mcp_cell_seconds_bucket 0.5 ok"] == 2
    assert found["kernel_mcp_cell_seconds_bucket 0.25 ok"] == 0


def test_what_has_not_happened_is_zero() -> None:
    found = series(Metrics())
    assert all(found[f"kernel_mcp_kills_total {cause}"] == 0 for cause in CAUSES)
    assert all(found[f"kernel_mcp_kernel_start_seconds_count {kind}"] == 0 for kind in KINDS)


def test_every_event_has_its_series() -> None:
    metrics = Metrics()
    metrics.note("kill", {"reason": "memory"})
    metrics.note(START, {"kind": "forked", "seconds": 0.01})
    metrics.note(NO_START, {})
    metrics.note("wake", {})
    metrics.note("install", {"done": False})
    metrics.note("refusal", {})
    metrics.note("connection", {"verdict": "refused"})
    metrics.note("connection", {"verdict": "open"})
    metrics.note("undo", {"cells": [1]})
    metrics.call("execute", 0.002)
    metrics.moved(10, 2000)
    found = series(metrics)
    assert found["kernel_mcp_kills_total memory"] == 1
    assert found["kernel_mcp_kernel_start_seconds_count forked"] == 1
    assert found["kernel_mcp_kernel_start_failures_total"] == 1
    assert found["kernel_mcp_hibernations_total woke"] == 1
    assert found["kernel_mcp_installs_total failed"] == 1
    assert found["kernel_mcp_tool_call_seconds_bucket 0.005 execute"] == 1
    assert found["kernel_mcp_refusals_total policy"] == 1
    assert found["kernel_mcp_refusals_total network"] == 1
    assert found["kernel_mcp_received_bytes_total"] == 10
    assert found["kernel_mcp_sent_bytes_total"] == 2000


def test_levels_are_those_of_the_moment() -> None:
    metrics = Metrics()
    series(metrics, Levels(sessions={"busy": 4}))
    levels = Levels({"idle": 3}, {"ready": 1}, spares=2, calls=5, server_bytes=6, kernels_bytes=7)
    found = series(metrics, levels)
    assert found["kernel_mcp_sessions busy"] == 0
    assert found["kernel_mcp_sessions idle"] == 3
    assert found["kernel_mcp_templates ready"] == 1
    assert found["kernel_mcp_spare_kernels"] == 2
    assert found["kernel_mcp_calls_in_flight"] == 5
    assert found["kernel_mcp_server_memory_bytes"] == 6
    assert found["kernel_mcp_kernels_memory_bytes"] == 7


def test_limits_and_disks_are_there_to_divide_by(tmp_path: Path) -> None:
    folders = {"state": tmp_path, "cache": tmp_path / "none"}
    found = series(Metrics("1.2", {"sessions_limit": 16}, folders))
    assert found["kernel_mcp_sessions_limit"] == 16
    assert 0 < found["kernel_mcp_disk_free_bytes state"] < found["kernel_mcp_disk_size_bytes state"]
    assert "kernel_mcp_disk_free_bytes cache" not in found
    assert [name for name in found if name.startswith("kernel_mcp_build_info ")]
    assert found["process_open_fds"] > 0
    assert found["process_cpu_seconds_total"] > 0


def test_no_series_is_a_date_of_creation() -> None:
    metrics = Metrics()
    metrics.call("execute", 1.0)
    assert not [name for name in series(metrics) if "_created" in name]


def test_two_servers_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.refusal("rate")
    assert "kernel_mcp_refusals_total rate" not in series(second)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"),
        ("application/openmetrics-text; version=1.0.0", "application/openmetrics"),
    ],
    ids=["text", "openmetrics"],
)
def test_the_format_is_the_one_that_is_accepted(accept: str, kind: str) -> None:
    _, found = Metrics().text(Levels(), accept)
    assert found.startswith(kind)


def test_meters_that_count_nothing_show_nothing() -> None:
    meters = Meters()
    meters.note("cell", {})
    assert meters.text(Levels()) is None
