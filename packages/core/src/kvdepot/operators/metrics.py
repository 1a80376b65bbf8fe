"""A depot's status as Prometheus metrics: names, units and texts. Needs `prometheus_client`, of `kvdepot[http]`."""

import itertools
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot.wire import operations as o

COUNTERS: Final = {  # those that are exposed from the start, at 0
    "lookups": "Requests of schedulers",
    "lookup_chunks": "Chunks asked for",
    "lookup_chunks_hit": "Chunks found, in the pool or brought up from tiers in time",
    "lookup_chunks_pool_hit": "Chunks found without asking a tier",
    "stores": "Stores prepared",
    "store_chunks": "Chunks of stores",
    "store_entries_present": "Entries of stores that were here already",
    "store_entries_declined": "Entries of stores that found no room",
    "store_entries_over_share": "Entries declined as their tenant's share has enough unfinished ones",
    "stores_without_commit": "Stores declined as their worker has half of the pool in stores that it has not ended",
    "stores_late": "Stores that ended before their worker ended them",
    "entries_stored": "Entries committed",
    "entries_aborted": "Entries given up before they were committed",
    "entries_corrupt": "Entries removed as their bytes lacked their checksum",
    "entries_promoted": "Entries brought up from tiers",
    "retrieves": "Retrieves prepared",
    "retrieve_chunks": "Chunks that workers asked for",
    "retrieve_chunks_hit": "Chunks that workers got",
    "chunks_evicted": "Chunks that left to make room",
    "chunks_evicted_leased": "Of these, leased by tenants above their quota, for one within its own",
    "leases_expired": "Leases that nobody gave back in time",
    "promotions": "Lookups that asked tiers",
    "promotions_late": "Lookups whose tiers did not answer in time",
    "promotions_failed": "Entries that tiers had and did not deliver",
    "demotions_dropped": "Entries not written to a tier, as too much waited",
    "requests_refused": "Requests that were answered with an error",
    "requests_failed": "Requests that failed by a bug",
    "chores_failed": "What was to be done between messages and failed by a bug",
    "policy_errors": "Calls of eviction policies that failed",
    "hints": "Hints of clients",
    "hints_cut": "Hints and uses of long prefixes of which only the end was ranked, as too many waited",
    "lookups_not_sampled": "Very long lookups left out of the estimates, as another was being counted",
    "moves": "Copies by processes of the depot",
    "moves_failed": "Copies that such a process did not finish",
    "moves_refused": "Copies that such a process refused, as they left the memory that it was given",
    "movers_started": "Processes started that copy for a worker",
    "movers_lost": "Such processes that died or hung",
    "movers_given_up": "Workers for which none is started any more",
    "workers_fallen_back": "Workers that copy by themselves as no such process could",
    "promotions_not_worth_it": "Promotions left out, as the engine computes faster than the tier reads",
}
TIER_COUNTERS: Final = {
    "read_bytes": "Read into the pool",
    "read_entries": "Entries read",
    "failed_reads": "Entries that were not there or not readable",
    "written_bytes": "Written from the pool",
    "written_entries": "Entries written",
    "failed_writes": "Entries that were not written",
    "corrupt": "Entries without their checksum",
    "deadline_misses": "Calls that took longer than their deadline",
    "breaker_opened": "Times that it was left alone",
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
            "pool_size_bytes": (status.pool_size_bytes, "The pool"),
            "pool_ready_bytes": (status.pool_ready_bytes, "Of it, allocated so far"),
            "pool_used_bytes": (status.pool_used_bytes, "Of it, in use"),
            "quarantined_bytes": (status.quarantined_bytes, "Held until their writer is back or dead"),
            "entries": (status.num_entries, "Sealed entries of the index"),
            "entries_limit": (status.max_entries, "Entries that the index can hold"),
            "chunks": (status.num_chunks, "Chunks in the index"),
            "leases": (status.num_leases, "Leases of requests"),
            "pins": (status.num_pins, "Prefixes that operators keep"),
            "stores_under_way": (status.num_tickets, "Prepared and not committed"),
            "sessions": (status.num_sessions, "Connected workers and schedulers"),
            "recovering": (int(status.recovering), "Whether an earlier server's entries are being read"),
            "uptime_seconds": (status.uptime_seconds, "Since the server started"),
            "loop_longest_turn_seconds": (status.loop_longest_seconds, "Longest turn of the request loop"),
            "loop_longest_blocked_seconds": (
                status.loop_longest_blocked_seconds,
                "The same as kvdepot_loop_longest_turn_seconds",
            ),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"kvdepot_{name}", text, value)
        slow = "Turns of more than 20 ms"
        yield CounterMetricFamily("kvdepot_loop_slow_turns", slow, status.loop_slow_turns)
        saved = "Seconds of computing what was retrieved, as engines say how long a token takes them"
        yield CounterMetricFamily("kvdepot_prefill_seconds_saved", saved, status.prefill_seconds_saved)
        for name, value in sorted({**dict.fromkeys(COUNTERS, 0), **status.counters}.items()):
            text = COUNTERS.get(name) or name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"kvdepot_{name}", text, value)
        used = GaugeMetricFamily("kvdepot_tenant_used_bytes", "Of the pool", labels=["tenant"])
        quota = GaugeMetricFamily("kvdepot_tenant_quota_bytes", "Kept against others", labels=["tenant"])
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
        asked = CounterMetricFamily("kvdepot_lookup_tokens", "Tokens asked for", labels=["tenant"])
        hit = CounterMetricFamily("kvdepot_lookup_hit_tokens", "Tokens found", labels=["tenant", "source"])
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
                f"kvdepot_{direction}_bytes", f"Planned and, if stores, committed: {direction}", labels=["device"]
            )
            for device, moved in sorted(self._status.devices.items()):
                family.add_metric([device], moved[name])
            yield family

    def _histograms(self) -> Iterator[Metric]:
        status = self._status
        texts = {"store": "From a store's plan to its commit: the worker's copy", "loop_turn": "Turns of the loop"}
        requests = HistogramMetricFamily(
            "kvdepot_request_seconds", "From a request to its reply, in the server", labels=["operation"]
        )
        for name, histogram in sorted(status.latencies.items()):
            if name in texts:
                yield _histogram(f"kvdepot_{name}_seconds", texts[name], histogram)
            else:
                requests.add_metric([name], _buckets(histogram), histogram.total)
        yield requests
        if status.eviction_ages is not None:
            text = "Since the last use of chunks that were evicted"
            yield _histogram("kvdepot_eviction_age_seconds", text, status.eviction_ages)

    def _estimates(self) -> Iterator[Metric]:
        status = self._status
        yield CounterMetricFamily(
            "kvdepot_estimated_lookup_chunks", "Asked for, as far as the sample tells", status.estimated_chunks
        )
        found = CounterMetricFamily(
            "kvdepot_estimated_hit_chunks", "Of them, found in a pool of another size", labels=["pool_scale"]
        )
        for estimate in status.estimates:
            found.add_metric([f"{estimate.scale:g}"], estimate.hit_chunks)
        yield found

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status.tiers
        for name, text in {
            "num_entries": "Entries, as far as the storage tells",
            "used_bytes": "Of the storage",
            "capacity_bytes": "Of the storage",
            "queued_write_bytes": "Waiting to be written",
            "num_waiting_reads": "Calls that wait",
            "num_waiting_writes": "Calls that wait",
            "num_hung_calls": "Calls that have overrun their deadline and not come back",
        }.items():
            family = GaugeMetricFamily(f"kvdepot_tier_{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        is_open = GaugeMetricFamily("kvdepot_tier_breaker_open", "Whether it is left alone", labels=["tier"])
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
    """Return the upper bounds and what is below each of them."""
    below = list(itertools.accumulate(histogram.counts))
    bounds = [f"{histogram.base * 2**number:g}" for number in range(len(below) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, below), strict=True))
