"""Metrics for Prometheus, in a registry of their own. No label contains text of a caller."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from platform import python_version
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from kernel_mcp.telemetry import Levels, Meters

PREFIX = "kernel_mcp"

MOMENTS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
"""Bounds of the buckets for calls, starts and cells."""

STATES = ("new", "idle", "busy", "hibernated")
TEMPLATES = ("ready", "loading", "failed")
OUTCOMES = ("ok", "error", "interrupted", "timeout", "killed")
CAUSES = ("memory", "time", "cpu", "disk", "asked", "lost")
KINDS = ("pooled", "forked", "cold")


LIMITS = {
    "sessions_limit": "Sessions with a kernel that the server may have",
    "session_memory_limit_bytes": "Memory that one session may have; 0: no limit",
    "session_disk_limit_bytes": "Disk that one session may have; 0: no limit",
    "machine_memory_bytes": "Memory of the machine, which the server and all kernels share",
}


class Metrics(Meters):
    """Meters for Prometheus. Use them on the event loop's thread only.

    Series with known labels exist from the start, so that their first event is a rise from 0.
    """

    def __init__(
        self,
        version: str = "",
        limits: Mapping[str, float] | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        """`limits` are values of LIMITS. The disks of `folders` are measured at each request."""
        self._registry = registry = CollectorRegistry()
        self._folders = folders or {}
        disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types
        ProcessCollector(registry=registry)

        def counter(name: str, about: str, label: str = "") -> Counter:
            labels = [label] if label else []
            return Counter(name, about, labels, namespace=PREFIX, registry=registry)

        def histogram(name: str, about: str, label: str) -> Histogram:
            return Histogram(
                name, about, [label], namespace=PREFIX, registry=registry, buckets=MOMENTS_S
            )

        def gauge(name: str, about: str, label: str = "") -> Gauge:
            labels = [label] if label else []
            return Gauge(name, about, labels, namespace=PREFIX, registry=registry)

        self._cells = counter("cells", "Cells that have ended, by their outcome", "outcome")
        self._running = histogram("cell_seconds", "Run time of ended cells", "outcome")
        self._kills = counter("kills", "Lost kernels; asked: by interrupt, reset or close", "cause")
        self._starts = histogram("kernel_start_seconds", "Time until a session had one", "kind")
        self._failed = counter("kernel_start_failures", "Failed starts; the log has the reason")
        self._sleeps = counter("hibernations", "Sessions saved without a kernel, and back", "way")
        self._installs = counter("installs", "Installations of packages", "outcome")
        self._calls = histogram("tool_call_seconds", "Time until a call had its answer", "tool")
        self._refusals = counter("refusals", "Refused requests and actions, by reason", "reason")
        self._received = counter("received_bytes", "Bytes of the bodies of requests")
        self._sent = counter("sent_bytes", "Bytes of the bodies of responses")
        self._sessions = gauge("sessions", "Open sessions; idle and busy: with a kernel", "state")
        self._templates = gauge("templates", "Processes that kernels are forked from", "state")
        self._spares = gauge("spare_kernels", "Kernels started ahead of need")
        self._in_flight = gauge("calls_in_flight", "Calls in progress")
        self._server = gauge("server_memory_bytes", "Resident memory of the server alone")
        self._kernels = gauge("kernels_memory_bytes", "Memory of all kernels with their children")
        self._free = gauge("disk_free_bytes", "Free bytes on the disk of a folder", "folder")
        self._size = gauge("disk_size_bytes", "Size of the disk of a folder", "folder")
        for name, value in (limits or {}).items():
            gauge(name, LIMITS[name]).set(value)
        if version:
            about = "Version of the server and of its Python"
            build = Info("build", about, namespace=PREFIX, registry=registry)
            build.info({"version": version, "python": python_version()})
        self._cell_of = {
            each: (self._cells.labels(each), self._running.labels(each)) for each in OUTCOMES
        }
        self._call_of: dict[str, Histogram] = {}
        for cause in CAUSES:
            self._kills.labels(cause)
        for kind in KINDS:
            self._starts.labels(kind)

    def note(self, event: str, facts: Mapping[str, Any]) -> None:
        """Count an event, see `events`; those without a series are ignored."""
        match event:
            case "cell":
                count, running = self._cell_of[facts["status"]]
                count.inc()
                running.observe(facts["duration_s"])
            case "kill":
                self._kills.labels(facts["reason"]).inc()
            case "kernel_start":
                self._starts.labels(facts["kind"]).observe(facts["seconds"])
            case "kernel_start_failure":
                self._failed.inc()
            case "hibernate":
                self._sleeps.labels("hibernated").inc()
            case "wake":
                self._sleeps.labels("woke").inc()
            case "install":
                self._installs.labels("ok" if facts["done"] else "failed").inc()
            case "refusal":
                self.refusal("policy")
            case "connection" if facts.get("verdict") == "refused":
                self.refusal("network")

    def call(self, tool: str, seconds: float) -> None:
        """Count a tool call that took `seconds`."""
        series = self._call_of.get(tool)
        if series is None:
            series = self._call_of[tool] = self._calls.labels(tool)
        series.observe(seconds)

    def refusal(self, reason: str) -> None:
        """Count a refused request or action, by reason."""
        self._refusals.labels(reason).inc()

    def moved(self, received: int, sent: int) -> None:
        """Count the bytes of a request's and a response's body."""
        self._received.inc(received)
        self._sent.inc(sent)

    def text(self, levels: Levels, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics in the format that `accept` prefers, and its MIME type."""
        for state in STATES:
            self._sessions.labels(state).set(levels.sessions.get(state, 0))
        for state in TEMPLATES:
            self._templates.labels(state).set(levels.templates.get(state, 0))
        self._spares.set(levels.spares)
        self._in_flight.set(levels.calls)
        self._server.set(levels.server_bytes)
        self._kernels.set(levels.kernels_bytes)
        for each in (self._free, self._size):
            each.clear()
        for name, folder in self._folders.items():
            with suppress(OSError):  # as long as it does not exist, or its disk does not answer
                disk = os.statvfs(folder)
                self._free.labels(name).set(disk.f_bavail * disk.f_frsize)
                self._size.labels(name).set(disk.f_blocks * disk.f_frsize)
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind
