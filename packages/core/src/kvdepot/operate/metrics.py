"""A depot's status as Prometheus metrics. Needs `prometheus_client` from `kvdepot[http]`."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot.wire.status import (
    DepotStatus,
    DeviceStatus,
    GenerationStatus,
    HistogramStatus,
    PoolEstimate,
    TenantStatus,
    TierStatus,
    figures_of,
)

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(status: DepotStatus) -> bytes:
    """Return the metrics of a status in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Collects the metrics of a status. Each metric has its unit in its name."""

    def __init__(self, status: DepotStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        status = self._status
        yield from _figures(DepotStatus, (), [((), status)])
        formats = (each.format for each in status.contexts if each.role == "worker")
        kinds = Counter(text.partition(" ")[0] or "other" for text in formats)
        text = "Attached workers by their engine's kind"
        yield _gauge("workers", text, ("engine",), [((kind,), count) for kind, count in sorted(kinds.items())])
        for name, value in sorted(status.counters.items()):
            yield CounterMetricFamily(f"kvdepot_{name}", status.counter_texts.get(name, name), value)
        tenants = sorted(status.tenants.items())
        yield from _figures(TenantStatus, ("tenant",), [((name,), tenant) for name, tenant in tenants])
        found: list[tuple[tuple[str, str], int]] = []
        for name, tenant in tenants:
            if tenant.lookup_tokens is not None:
                found += [((name, "pool"), tenant.pool_hit_tokens), ((name, "tier"), tenant.tier_hit_tokens)]
        yield _counter("lookup_hit_tokens", "Tokens found", ("tenant", "source"), found)
        of_weights = [((each.lineage, each.name), each) for each in status.generations]
        yield from _figures(GenerationStatus, ("lineage", "generation"), of_weights)
        moved = [((device,), each) for device, each in sorted(status.devices.items())]
        yield from _figures(DeviceStatus, ("device",), moved)
        yield from self._histograms()
        of_sizes = [((f"{each.scale:g}",), each) for each in status.estimates]
        yield from _figures(PoolEstimate, ("pool_scale",), of_sizes)
        yield from self._tiers()

    def _histograms(self) -> Iterator[Metric]:
        status = self._status
        texts = {
            "store": "Time from a store's plan to its commit, which includes the worker's copy",
            "loop_turn": "Duration of the request loop's turns",
        }
        requests = HistogramMetricFamily(
            "kvdepot_request_seconds", "Time from a request to its reply, in the server", labels=["operation"]
        )
        for name, histogram in sorted(status.latencies.items()):
            if name in texts:
                yield _histogram(f"kvdepot_{name}_seconds", texts[name], histogram)
            else:
                requests.add_metric([name], _buckets(histogram), histogram.total)
        yield requests
        if status.eviction_ages is not None:
            text = "Time between a chunk's last use and its eviction to make room"
            yield _histogram("kvdepot_eviction_age_seconds", text, status.eviction_ages)

    def _tiers(self) -> Iterator[Metric]:
        tiers, label = self._status.tiers, ("tier",)
        yield from _figures(TierStatus, label, [((tier.name,), tier) for tier in tiers])
        are_open = [((tier.name,), tier.state != "closed") for tier in tiers]
        yield _gauge("tier_breaker_open", "1 while the tier is suspended after failures", label, are_open)
        texts = self._status.tier_counter_texts
        for name in sorted({*texts, *(name for tier in tiers for name in tier.counters)}):
            text = texts.get(name, name)  # third-party tiers need not declare their counters
            yield _counter(f"tier_{name}", text, label, [((tier.name,), tier.counters.get(name, 0)) for tier in tiers])


Values = Iterable[tuple[Sequence[str], float]]
"""Pairs of label values and a value."""


def _figures(
    kind: type[Struct], labels: Sequence[str], rows: Sequence[tuple[Sequence[str], Struct]]
) -> Iterator[Metric]:
    """Yield a metric of each declared figure, with a value of each row that has one."""
    for each in figures_of(kind):
        values = [(of_labels, getattr(row, each.field)) for of_labels, row in rows]
        make = _counter if each.is_total else _gauge
        yield make(each.metric, each.text, labels, [value for value in values if value[1] is not None])


def _gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(f"kvdepot_{name}", text, labels=labels), values)


def _counter(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(CounterMetricFamily(f"kvdepot_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def _histogram(name: str, text: str, histogram: HistogramStatus) -> Metric:
    family = HistogramMetricFamily(name, text)
    family.add_metric([], _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: HistogramStatus) -> list[tuple[str, float]]:
    """Return the upper bounds with the cumulative counts below them."""
    below = list(itertools.accumulate(histogram.counts))
    bounds = [f"{histogram.base * 2**number:g}" for number in range(len(below) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, below), strict=True))
