"""A depot's status as Prometheus metrics: names, units and texts. Needs `prometheus_client`, of `kvdepot[http]`."""

import itertools
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot.wire import operations as o

COUNTERS: Final = {  # those that are exposed from the start, at 0
    "lookups": "Lookups by schedulers",
    "lookup_chunks": "Chunks that lookups asked for",
    "lookup_chunks_hit": "Chunks that lookups found, in the pool or promoted from tiers in time",
    "lookup_chunks_pool_hit": "Chunks that lookups found without asking a tier",
    "stores": "Stores prepared",
    "store_chunks": "Chunks of prepared stores",
    "store_entries_present": "Entries of stores that were already in the pool",
    "store_entries_declined": "Entries of stores that found no room",
    "store_entries_over_share": "Entries declined because their tenant's share has enough unfinished ones",
    "stores_without_commit": "Stores declined because their worker has half of the pool in unfinished stores",
    "stores_late": "Stores that ended by time before their worker ended them",
    "entries_stored": "Entries committed",
    "entries_aborted": "Entries given up before their commit",
    "entries_corrupt": "Entries removed because their checksum did not match",
    "entries_promoted": "Entries promoted from tiers",
    "retrieves": "Retrieves prepared",
    "retrieve_chunks": "Chunks that retrieves asked for",
    "retrieve_chunks_hit": "Chunks that retrieves found",
    "chunks_evicted": "Chunks evicted to make room",
    "chunks_evicted_leased": "Evicted chunks that tenants above their quota had leased",
    "leases_expired": "Leases that expired before their release",
    "promotions": "Lookups that asked tiers",
    "promotions_late": "Lookups whose tiers did not answer in time",
    "promotions_failed": "Entries that a tier had but did not deliver",
    "demotions_dropped": "Entries not written to a tier because too many bytes waited",
    "requests_refused": "Requests answered with an error",
    "requests_failed": "Requests that failed because of a bug",
    "chores_failed": "Background tasks that failed because of a bug",
    "policy_errors": "Failed calls of eviction policies",
    "hints": "Hints from clients",
    "hints_cut": "Hints and uses of long prefixes of which only the end was ordered, because too many waited",
    "lookups_not_sampled": "Very long lookups left out of the estimates because another was being counted",
    "moves": "Copies by movers",
    "moves_failed": "Copies that a mover did not finish",
    "moves_refused": "Copies that a mover refused because they left its memory",
    "movers_started": "Movers started",
    "movers_lost": "Movers that died or hung",
    "movers_given_up": "Workers whose mover was given up",
    "workers_fallen_back": "Workers that copy by themselves because no mover could",
    "promotions_not_worth_it": "Promotions skipped because the engine computes faster than the tier reads",
}
TIER_COUNTERS: Final = {
    "read_bytes": "Bytes read into the pool",
    "read_entries": "Entries read",
    "failed_reads": "Entries that were missing or unreadable",
    "written_bytes": "Bytes written from the pool",
    "written_entries": "Entries written",
    "failed_writes": "Entries that could not be written",
    "corrupt": "Entries whose checksum did not match",
    "deadline_misses": "Calls that overran their deadline",
    "breaker_opened": "Times that the breaker opened",
    "errors": "Calls that failed",
}
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(status: o.DepotStatus) -> bytes:
    """Return the metrics of a status in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """A depot's status as Prometheus metrics, each with its unit in its name."""

    def __init__(self, status: o.DepotStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        status = self._status
        gauges = {
            "pool_size_bytes": (status.pool_size_bytes, "Size of the pool"),
            "pool_ready_bytes": (status.pool_ready_bytes, "Bytes of the pool that are allocated so far"),
            "pool_used_bytes": (status.pool_used_bytes, "Bytes of the pool in use"),
            "quarantined_bytes": (status.quarantined_bytes, "Bytes held until their writer registers again or is dead"),
            "entries": (status.num_entries, "Sealed entries in the index"),
            "entries_limit": (status.max_entries, "Entries that the index can hold"),
            "chunks": (status.num_chunks, "Chunks in the index"),
            "leases": (status.num_leases, "Leases held by requests"),
            "pins": (status.num_pins, "Prefixes pinned by operators"),
            "stores_under_way": (status.num_tickets, "Stores prepared and not committed"),
            "sessions": (status.num_sessions, "Connected workers and schedulers"),
            "recovering": (int(status.recovering), "Whether the depot is reading back an earlier server's entries"),
            "uptime_seconds": (status.uptime_seconds, "Time since the server started"),
            "loop_longest_turn_seconds": (status.loop_longest_seconds, "Longest turn of the request loop"),
            "loop_longest_blocked_seconds": (
                status.loop_longest_blocked_seconds,
                "Longest turn of the request loop, without waits for a core",
            ),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"kvdepot_{name}", text, value)
        slow = "Turns of more than 5 ms, without waits for a core"
        yield CounterMetricFamily("kvdepot_loop_slow_turns", slow, status.loop_slow_turns)
        saved = "Time that computing the retrieved tokens would have taken, at the engines' own cost per token"
        yield CounterMetricFamily("kvdepot_prefill_seconds_saved", saved, status.prefill_seconds_saved)
        for name, value in sorted({**dict.fromkeys(COUNTERS, 0), **status.counters}.items()):
            text = COUNTERS.get(name) or name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"kvdepot_{name}", text, value)
        used = GaugeMetricFamily(
            "kvdepot_tenant_used_bytes", "Bytes of the pool in use by the tenant", labels=["tenant"]
        )
        quota = GaugeMetricFamily("kvdepot_tenant_quota_bytes", "Quota of the tenant", labels=["tenant"])
        for tenant, usage in sorted(status.tenants.items()):
            used.add_metric([tenant], usage["used_bytes"])
            if "quota_bytes" in usage:
                quota.add_metric([tenant], usage["quota_bytes"])
        yield used
        yield quota
        yield from self._tokens()
        yield from self._devices()
        yield from self._histograms()
        yield from self._estimates()
        yield from self._tiers()

    def _tokens(self) -> Iterator[Metric]:
        asked = CounterMetricFamily("kvdepot_lookup_tokens", "Tokens that lookups asked for", labels=["tenant"])
        hit = CounterMetricFamily("kvdepot_lookup_hit_tokens", "Tokens that lookups found", labels=["tenant", "source"])
        for tenant, usage in sorted(self._status.tenants.items()):
            if "lookup_tokens" in usage:
                asked.add_metric([tenant], usage["lookup_tokens"])
                hit.add_metric([tenant, "pool"], usage["pool_hit_tokens"])
                hit.add_metric([tenant, "tier"], usage["tier_hit_tokens"])
        yield asked
        yield hit

    def _devices(self) -> Iterator[Metric]:
        for direction, name in (("store", "stored_bytes"), ("retrieve", "retrieved_bytes")):
            family = CounterMetricFamily(
                f"kvdepot_{direction}_bytes",
                f"Bytes of each {direction}: retrieves as planned, stores as committed",
                labels=["device"],
            )
            for device, moved in sorted(self._status.devices.items()):
                family.add_metric([device], moved[name])
            yield family

    def _histograms(self) -> Iterator[Metric]:
        status = self._status
        texts = {"store": "Time from a store's plan to its commit: the worker's copy", "loop_turn": "Turns of the loop"}
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
            text = "Time since the last use of evicted chunks"
            yield _histogram("kvdepot_eviction_age_seconds", text, status.eviction_ages)

    def _estimates(self) -> Iterator[Metric]:
        status = self._status
        yield CounterMetricFamily(
            "kvdepot_estimated_lookup_chunks",
            "Chunks that lookups asked for, extrapolated from the sample",
            status.estimated_chunks,
        )
        found = CounterMetricFamily(
            "kvdepot_estimated_hit_chunks", "Chunks that a pool of another size would have found", labels=["pool_scale"]
        )
        for estimate in status.estimates:
            found.add_metric([f"{estimate.scale:g}"], estimate.hit_chunks)
        yield found

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status.tiers
        for name, text in {
            "num_entries": "Entries, if the storage reports them",
            "used_bytes": "Bytes of the storage in use",
            "capacity_bytes": "Capacity of the storage",
            "queued_write_bytes": "Bytes that wait to be written",
            "num_waiting_reads": "Reads that wait",
            "num_waiting_writes": "Writes that wait",
            "num_hung_calls": "Calls that overran their deadline and have not returned",
        }.items():
            family = GaugeMetricFamily(f"kvdepot_tier_{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        is_open = GaugeMetricFamily(
            "kvdepot_tier_breaker_open", "Whether the breaker leaves the tier alone", labels=["tier"]
        )
        for tier in tiers:
            is_open.add_metric([tier.name], tier.state != "closed")
        yield is_open
        for name in sorted({*TIER_COUNTERS, *(name for tier in tiers for name in tier.counters)}):
            text = TIER_COUNTERS.get(name) or name.replace("_", " ").capitalize()
            counter = CounterMetricFamily(f"kvdepot_tier_{name}", text, labels=["tier"])
            for tier in tiers:
                counter.add_metric([tier.name], tier.counters.get(name, 0))
            yield counter


def _histogram(name: str, text: str, histogram: o.HistogramStatus) -> Metric:
    family = HistogramMetricFamily(name, text)
    family.add_metric([], _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: o.HistogramStatus) -> list[tuple[str, float]]:
    """Return each upper bound with the number of values below it."""
    below = list(itertools.accumulate(histogram.counts))
    bounds = [f"{histogram.base * 2**number:g}" for number in range(len(below) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, below), strict=True))
