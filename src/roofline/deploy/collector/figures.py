"""The collector's own figures: how many replicas there are, and how reading them goes."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from roofline.deploy.collector.collector import ReplicaRecord

UP = "1 while a replica's metrics can be read, 0: not."
FIGURES = {
    "roofline_fleet_replicas": "Replicas by state: up, down, or starting (not asked yet).",
    "roofline_fleet_replicas_wanted": "Replicas that the fleet is to have.",
    "roofline_fleet_scrape_seconds": "Time of a replica's last scrape, its parsing included.",
    "roofline_fleet_refused_families": "Families of a replica's last page that cannot be added to the fleet's.",
    "roofline_fleet_scrape_failures": "Scrapes of a replica that came to nothing.",
    "roofline_fleet_restarts": "Replica processes that began anew, as far as their metrics tell.",
}


def own_figures(replicas: Mapping[str, "ReplicaRecord"], wanted_count: int, restarts: int) -> Iterator[Metric]:
    """The figures of a collector of these replicas, of which there should be `wanted_count`."""
    up = GaugeMetricFamily("up", UP, labels=["replica"])
    seconds = _gauge("roofline_fleet_scrape_seconds", "replica")
    refused = _gauge("roofline_fleet_refused_families", "replica")
    failures = _counter("roofline_fleet_scrape_failures", "replica")
    for name, record in replicas.items():
        up.add_metric([name], float(record.state == "up"))
        seconds.add_metric([name], record.seconds)
        refused.add_metric([name], len(record.refused))
        failures.add_metric([name], record.failures)
    states = _gauge("roofline_fleet_replicas", "state")
    for state in ("starting", "up", "down"):
        states.add_metric([state], sum(record.state == state for record in replicas.values()))
    to_have = _gauge("roofline_fleet_replicas_wanted")
    to_have.add_metric([], wanted_count)
    processes = _counter("roofline_fleet_restarts")
    processes.add_metric([], restarts)
    yield from (up, states, to_have, seconds, refused, failures, processes)


def _gauge(name: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, FIGURES[name], labels=labels)


def _counter(name: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, FIGURES[name], labels=labels)
