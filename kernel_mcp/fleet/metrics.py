"""Metrics at a front of a fleet: its own, and those of all nodes, which have the label `node`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from kernel_mcp.fleet.members import STATES, Member
from kernel_mcp.telemetry import Levels
from kernel_mcp.telemetry.metrics import PREFIX, Metrics

OWN = ("build", "calls_in_flight", "received_bytes", "refusals", "sent_bytes", "server_memory")
"""Beginnings of the names of series that a front has itself, as it has no sessions."""


class FrontMetrics(Metrics):
    """Meters of a front. `nodes` are texts of nodes by name; `members` are all nodes."""

    nodes: Mapping[str, str] = {}
    members: Collection[Member] = ()

    def text(self, levels: Levels, accept: str = "") -> tuple[bytes, str]:
        """See `Metrics`."""
        encode, kind = choose_encoder(accept)
        return encode(_Merged(super().text(levels)[0].decode(), self.nodes, self.members)), kind


class _Merged(CollectorRegistry):
    """All metrics, from texts in the format of Prometheus."""

    def __init__(self, own: str, nodes: Mapping[str, str], members: Collection[Member]) -> None:
        super().__init__()
        self._own = own
        self._nodes = nodes
        self._members = members

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, with the samples of the front and of the nodes."""
        names = tuple(f"{PREFIX}_{name}" for name in OWN)
        families = text_string_to_metric_families(self._own)
        found = {each.name: each for each in families if each.name.startswith(("process", *names))}
        for node, text in sorted(self._nodes.items()):
            for family in text_string_to_metric_families(text):
                new = Metric(family.name, family.documentation, family.type)
                found.setdefault(family.name, new).samples.extend(
                    each._replace(labels={**each.labels, "node": node}) for each in family.samples
                )
        states = GaugeMetricFamily(f"{PREFIX}_nodes", "Nodes of the fleet", labels=["state"])
        for state in STATES:
            states.add_metric([state], sum(each.state == state for each in self._members))
        yield from (*found.values(), states)
