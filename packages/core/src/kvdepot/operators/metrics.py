"""A depot's status as Prometheus metrics. Needs `prometheus_client` from `kvdepot[http]`."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot.wire.status import DepotStatus, HistogramStatus

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
        gauges = {
            "pool_size_bytes": (status.pool_size_bytes, "Size of the pool"),
            "pool_ready_bytes": (status.pool_ready_bytes, "Bytes of the pool allocated so far"),
            "pool_used_bytes": (status.pool_used_bytes, "Bytes of the pool in use"),
            "quarantined_bytes": (status.quarantined_bytes, "Bytes held until their writer returns or dies"),
            "entries": (status.num_entries, "Sealed entries of the index"),
            "entries_limit": (status.max_entries, "Capacity of the index in entries"),
            "chunks": (status.num_chunks, "Chunks in the index"),
            "leases": (status.num_leases, "Leases held by requests"),
            "pins": (status.num_pins, "Sessions of agents whose prefix is retained"),
            "agent_sessions": (status.num_agent_sessions, "Sessions of agents whose last prefix is known"),
            "flights_under_way": (status.num_flights, "Prefixes announced as being computed"),
            "blend_index_segments": (status.num_segments, "Names of segments that blends can find"),
            "stores_under_way": (status.num_tickets, "Stores prepared and not yet committed"),
            "sessions": (status.num_sessions, "Connected workers and schedulers"),
            "recovering": (int(status.recovering), "1 while the entries of an earlier server are being read"),
            "uptime_seconds": (status.uptime_seconds, "Time since the server started"),
            "loop_longest_turn_seconds": (status.loop_longest_seconds, "Longest turn of the request loop"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"kvdepot_{name}", text, value)
        formats = (each.format for each in status.contexts if each.role == "worker")
        kinds = Counter(text.partition(" ")[0] or "other" for text in formats)
        text = "Attached workers by their engine's kind"
        yield _gauge("workers", text, ("engine",), [((kind,), count) for kind, count in sorted(kinds.items())])
        slow = "Turns of more than 20 ms"
        yield CounterMetricFamily("kvdepot_loop_slow_turns", slow, status.loop_slow_turns)
        saved = "Prefill time saved by retrieves, from the engines' own time per token"
        yield CounterMetricFamily("kvdepot_prefill_seconds_saved", saved, status.prefill_seconds_saved)
        for name, value in sorted(status.counters.items()):
            yield CounterMetricFamily(f"kvdepot_{name}", status.counter_texts.get(name, name), value)
        yield from self._tenants()
        generations = [((each.lineage, each.name), each.used_bytes) for each in status.generations]
        text = "Bytes of the pool used by KV of a generation of weights"
        yield _gauge("generation_used_bytes", text, ("lineage", "generation"), generations)
        moved = sorted(status.devices.items())
        for name, field, text in (
            ("store_bytes", "stored_bytes", "Bytes of committed stores"),
            ("retrieve_bytes", "retrieved_bytes", "Bytes of prepared retrieves"),
        ):
            yield _counter(name, text, ("device",), [((device,), counts[field]) for device, counts in moved])
        yield from self._histograms()
        yield from self._estimates()
        yield from self._tiers()

    def _tenants(self) -> Iterator[Metric]:
        tenants = sorted(self._status.tenants.items())
        for name, text in (
            ("used_bytes", "Bytes of the pool used by a tenant"),
            ("quota_bytes", "Share of the pool reserved for a tenant"),
            ("retained_bytes", "Bytes that retained sessions of a tenant keep"),
        ):
            has_value = [each for each in tenants if name == "used_bytes" or "quota_bytes" in each[1]]
            yield _gauge(f"tenant_{name}", text, ("tenant",), [((tenant,), usage[name]) for tenant, usage in has_value])
        asked = [((tenant,), usage["lookup_tokens"]) for tenant, usage in tenants if "lookup_tokens" in usage]
        yield _counter("lookup_tokens", "Tokens looked up", ("tenant",), asked)
        found = [
            ((tenant, source), usage[f"{source}_hit_tokens"])
            for tenant, usage in tenants
            if "lookup_tokens" in usage
            for source in ("pool", "tier")
        ]
        yield _counter("lookup_hit_tokens", "Tokens found", ("tenant", "source"), found)

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

    def _estimates(self) -> Iterator[Metric]:
        text = "Chunks looked up, in the sample used for estimates"
        yield CounterMetricFamily("kvdepot_estimated_lookup_chunks", text, self._status.estimated_chunks)
        text = "Chunks of the sample that a pool of another size would have had"
        found = [((f"{each.scale:g}",), each.hit_chunks) for each in self._status.estimates]
        yield _counter("estimated_hit_chunks", text, ("pool_scale",), found)

    def _tiers(self) -> Iterator[Metric]:
        tiers, label = self._status.tiers, ("tier",)
        for name, text in {
            "num_entries": "Entries in the tier, if its storage counts them",
            "used_bytes": "Bytes in use in the tier's storage",
            "capacity_bytes": "Capacity of the tier's storage",
            "queued_write_bytes": "Bytes waiting to be written",
            "num_waiting_reads": "Reads waiting for a thread",
            "num_waiting_writes": "Writes waiting for a thread",
            "num_hung_calls": "Calls past their deadline that have not returned",
        }.items():
            values = [((tier.name,), getattr(tier, name)) for tier in tiers]
            yield _gauge(f"tier_{name.removeprefix('num_')}", text, label, values)
        are_open = [((tier.name,), tier.state != "closed") for tier in tiers]
        yield _gauge("tier_breaker_open", "1 while the tier is suspended after failures", label, are_open)
        texts = self._status.tier_counter_texts
        for name in sorted({*texts, *(name for tier in tiers for name in tier.counters)}):
            text = texts.get(name, name)  # third-party tiers need not declare their counters
            yield _counter(f"tier_{name}", text, label, [((tier.name,), tier.counters.get(name, 0)) for tier in tiers])


Values = Iterable[tuple[Sequence[str], float]]
"""Pairs of label values and a value."""


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
