"""Serves a party's numbers to Prometheus, on 127.0.0.1 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from silotune.core.files import read_json
from silotune.errors import file_errors, needs

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labeled = Sequence[tuple[tuple[str, ...], float | None]]
"""Pairs of label values and a value."""


LINK_FILE = "link.json"
"""In a node's folder: its link to the coordinator."""


@dataclass(frozen=True)
class LinkState:
    """The state of a node's connection to the coordinator.

    Args:
        reason: why the connection is down; empty while it is up.
        losses: how often the connection went down.
        days: for how many days the certificates `coordinator` and `authority` are still valid.
    """

    since: str
    reason: str
    losses: int
    days: dict[str, int]


def read_link(folder: Path) -> LinkState | None:
    """Return the connection of the node with this folder; None if the node has not tried to connect."""
    try:
        return LinkState(**read_json(folder / LINK_FILE))
    except (OSError, ValueError, TypeError):
        return None


def link_measures(folder: Path) -> Iterator[Metric]:
    """Yield the metrics of a node's connection; none if the node has not tried to connect."""
    link = read_link(folder)
    if link is not None:
        yield measure("link_up", "Whether the coordinator can be reached.", float(not link.reason))
        yield measure("link_losses", "How often the link went down.", link.losses, kind="counter")
        yield certificate_measure(link.days)


def certificate_measure(days: Mapping[str, float]) -> Metric:
    """Return the metric that tells for how many days certificates are valid."""
    values = [((name,), float(number)) for name, number in days.items()]
    return measure("certificate_days_left", "Days until a certificate expires.", values, ["certificate"])


def measure(
    name: str,
    description: str,
    values: Labeled | float | None,
    labels: Sequence[str] = (),
    kind: Literal["gauge", "counter"] = "gauge",
) -> Metric:
    """Return the metric `silotune_<name>` for Prometheus; values that are None are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
    metric = family(f"silotune_{name}", description, labels=labels)
    for named, value in values if isinstance(values, Sequence) else [((), values)]:
        if value is not None:
            metric.add_metric(list(named), value)
    return metric


def serve_metrics(port: int | None, measures: Callable[[], Iterable[Metric]]) -> None:
    """Serve `/metrics` on 127.0.0.1 from a thread until this process ends; do nothing if `port` is None."""
    if port is None:
        return
    with needs("metrics_port: needs prometheus-client", "federation"):
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector

    class Measures(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from measures()

        def describe(self) -> list[Metric]:  # so that registering reads no values
            return []

    registry = CollectorRegistry()
    registry.register(Measures())
    with file_errors(f"metrics_port: {port} cannot be used"):
        start_http_server(port, "127.0.0.1", registry)
