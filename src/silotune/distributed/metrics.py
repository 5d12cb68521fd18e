"""Serves a party's numbers to Prometheus, on 127.0.0.1 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from silotune.errors import InputError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class Measure:
    """One metric: its name without the prefix `silotune_`, kind, description, labels, and (label values, value) pairs.

    Values that are None are left out.
    """

    name: str
    kind: Literal["gauge", "counter"]
    description: str
    labels: tuple[str, ...] = ()
    values: Sequence[tuple[tuple[str, ...], float | None]] = ()


def serve_metrics(port: int | None, measures: Callable[[], Iterable[Measure]]) -> None:
    """Serve `/metrics` from a thread until this process ends.

    Args:
        port: the port on 127.0.0.1; None serves nothing.
        measures: returns the present values, whenever Prometheus asks.
    """
    if port is None:
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise InputError("metrics_port: needs prometheus-client; install silotune[federation]") from error

    class Measured(Collector):
        def collect(self) -> Iterator[Metric]:
            yield from map(_metric, measures())

        def describe(self) -> list[Metric]:  # so that registering reads no values
            return []

    registry = CollectorRegistry()
    registry.register(Measured())
    try:
        start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise InputError(f"metrics_port: {port} cannot be used ({error.strerror or error})") from error


def _metric(measure: Measure) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = GaugeMetricFamily if measure.kind == "gauge" else CounterMetricFamily
    metric = family(f"silotune_{measure.name}", measure.description, labels=measure.labels)
    for labels, value in measure.values:
        if value is not None:
            metric.add_metric(list(labels), value)
    return metric
