"""`metrics_page`: values (`Measure`) as text for Prometheus, read whenever it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from silotune.distributed.processes.loopback_server import Page
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


def metrics_page(measures: Callable[[], Iterable[Measure]]) -> Callable[[], Page]:
    """Return the function that makes the page `/metrics`.

    Args:
        measures: returns the present values.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST
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
    return lambda: Page(generate_latest(registry), CONTENT_TYPE_LATEST)


def _metric(measure: Measure) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = GaugeMetricFamily if measure.kind == "gauge" else CounterMetricFamily
    metric = family(f"silotune_{measure.name}", measure.description, labels=measure.labels)
    for labels, value in measure.values:
        if value is not None:
            metric.add_metric(list(labels), value)
    return metric
