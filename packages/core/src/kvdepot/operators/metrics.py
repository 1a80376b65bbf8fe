"""A depot's status as Prometheus metrics. Needs `prometheus_client`, from `kvdepot[http]`."""

import itertools
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot.wire import operations as o

COUNTERS: Final = {  # exposed from the start, at 0
    "lookups": "Lookups by schedulers",
    "lookup_chunks": "Chunks looked up",
    "lookup_chunks_hit": "Chunks found, in the pool or loaded from the tiers in time",
    "lookup_chunks_pool_hit": "Chunks found in the pool",
    "stores": "Stores prepared",
    "store_chunks": "Chunks in prepared stores",
    "store_entries_present": "Entries of stores that were already in the pool",
    "store_entries_declined": "Entries of stores declined for lack of space",
    "store_entries_over_share": "Entries declined because unfinished stores already fill their tenant's share",
    "stores_without_commit": "Stores declined because their worker already holds half of the pool in unfinished stores",
    "stores_late": "Stores that were ended before their worker committed them",
    "entries_stored": "Entries committed",
    "entries_aborted": "Entries abandoned before commit",
    "entries_corrupt": "Entries removed because their checksum did not match",
    "entries_promoted": "Entries loaded from the tiers",
    "retrieves": "Retrieves prepared",
    "retrieve_chunks": "Chunks requested by workers",
    "retrieve_chunks_hit": "Chunks delivered to workers",
    "chunks_evicted": "Chunks evicted to make room",
    "chunks_evicted_leased": "Evicted chunks that were leased by a tenant above its quota, for a tenant within its own",
    "leases_expired": "Leases not released in time",
    "promotions": "Lookups that asked the tiers",
    "promotions_late": "Lookups that the tiers did not answer in time",
    "promotions_failed": "Entries that a tier had but did not deliver",
    "demotions_dropped": "Entries not written to a tier because its queue was full",
    "demotions_failed": "Stores and lookups whose entries were not written to a tier because of a bug",
    "requests_refused": "Requests answered with an error",
    "requests_failed": "Requests that failed because of a bug",
    "chores_failed": "Background tasks that failed because of a bug",
    "policy_errors": "Failed calls of the eviction policy",
    "hints": "Hints from clients",
    "hints_cut": "Hints and uses of long prefixes applied only to the end, because too many were waiting",
    "blend_lookups": "Lookups of segments by engines that blend",
    "blend_segments_asked": "Segments looked up",
    "blend_segments_found": "Segments found in chunks of any prompt",
    "blend_runs": "Runs of neighbouring segments that were leased",
    "blend_tokens_found": "Tokens of these runs",
    "blend_notes_dropped": "Notes of many segments that were not kept because too many waited",
    "blends": "Prompts that were blended",
    "blend_reused_tokens": "Tokens of blends whose KV was reused as it was",
    "blend_recomputed_tokens": "Tokens of blends that were reused and computed again",
    "flights": "Prefixes that a lookup announced as being computed",
    "flights_joined": "Lookups that waited for chunks that another request was computing",
    "flights_failed": "Announced prefixes that did not arrive whole",
    "lookups_not_sampled": "Very long lookups left out of the estimates while another one was being counted",
    "moves": "Copies by movers, the processes that copy for workers",
    "moves_failed": "Copies that a mover did not finish",
    "moves_refused": "Copies that a mover refused because they left the worker's memory or the pool",
    "movers_started": "Movers started",
    "movers_lost": "Movers that died or hung",
    "movers_given_up": "Workers whose mover was given up",
    "workers_fallen_back": "Workers that fell back to copying by themselves",
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
    "deadline_misses": "Calls that took longer than their deadline",
    "breaker_opened": "Times the tier was suspended after failures",
    "errors": "Failed calls",
    "usage_failed": "Times the tier could not list its entries",
}
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(status: o.DepotStatus) -> bytes:
    """Return the metrics of a status in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Collects the metrics of a status. Each metric has its unit in its name."""

    def __init__(self, status: o.DepotStatus) -> None:
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
            "pins": (status.num_pins, "Prefixes pinned by operators"),
            "flights_under_way": (status.num_flights, "Prefixes announced as being computed"),
            "blend_index_segments": (status.num_segments, "Names of segments that blends can find"),
            "stores_under_way": (status.num_tickets, "Stores prepared and not yet committed"),
            "sessions": (status.num_sessions, "Connected workers and schedulers"),
            "recovering": (int(status.recovering), "1 while the entries of an earlier server are being read"),
            "uptime_seconds": (status.uptime_seconds, "Time since the server started"),
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
        saved = "Prefill time saved by retrieves, from the engines' own time per token"
        yield CounterMetricFamily("kvdepot_prefill_seconds_saved", saved, status.prefill_seconds_saved)
        for name, value in sorted({**dict.fromkeys(COUNTERS, 0), **status.counters}.items()):
            text = COUNTERS.get(name) or name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"kvdepot_{name}", text, value)
        used = GaugeMetricFamily("kvdepot_tenant_used_bytes", "Bytes of the pool used by a tenant", labels=["tenant"])
        quota = GaugeMetricFamily(
            "kvdepot_tenant_quota_bytes", "Share of the pool reserved for a tenant", labels=["tenant"]
        )
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
        asked = CounterMetricFamily("kvdepot_lookup_tokens", "Tokens looked up", labels=["tenant"])
        hit = CounterMetricFamily("kvdepot_lookup_hit_tokens", "Tokens found", labels=["tenant", "source"])
        for tenant, usage in sorted(self._status.tenants.items()):
            if "lookup_tokens" in usage:
                asked.add_metric([tenant], usage["lookup_tokens"])
                hit.add_metric([tenant, "pool"], usage["pool_hit_tokens"])
                hit.add_metric([tenant, "tier"], usage["tier_hit_tokens"])
        yield asked
        yield hit

    def _devices(self) -> Iterator[Metric]:
        for direction, name, text in (
            ("store", "stored_bytes", "Bytes of committed stores"),
            ("retrieve", "retrieved_bytes", "Bytes of prepared retrieves"),
        ):
            family = CounterMetricFamily(f"kvdepot_{direction}_bytes", text, labels=["device"])
            for device, moved in sorted(self._status.devices.items()):
                family.add_metric([device], moved[name])
            yield family

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
            text = "Time between a chunk's last use and its eviction"
            yield _histogram("kvdepot_eviction_age_seconds", text, status.eviction_ages)

    def _estimates(self) -> Iterator[Metric]:
        status = self._status
        yield CounterMetricFamily(
            "kvdepot_estimated_lookup_chunks",
            "Chunks looked up, in the sample used for estimates",
            status.estimated_chunks,
        )
        found = CounterMetricFamily(
            "kvdepot_estimated_hit_chunks",
            "Chunks of the sample that a pool of another size would have had",
            labels=["pool_scale"],
        )
        for estimate in status.estimates:
            found.add_metric([f"{estimate.scale:g}"], estimate.hit_chunks)
        yield found

    def _tiers(self) -> Iterator[Metric]:
        tiers = self._status.tiers
        for name, text in {
            "num_entries": "Entries in the tier, if its storage counts them",
            "used_bytes": "Bytes in use in the tier's storage",
            "capacity_bytes": "Capacity of the tier's storage",
            "queued_write_bytes": "Bytes waiting to be written",
            "num_waiting_reads": "Reads waiting for a thread",
            "num_waiting_writes": "Writes waiting for a thread",
            "num_hung_calls": "Calls past their deadline that have not returned",
        }.items():
            family = GaugeMetricFamily(f"kvdepot_tier_{name.removeprefix('num_')}", text, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], getattr(tier, name))
            yield family
        is_open = GaugeMetricFamily(
            "kvdepot_tier_breaker_open", "1 while the tier is suspended after failures", labels=["tier"]
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
    """Return each upper bound with the cumulative count below it."""
    below = list(itertools.accumulate(histogram.counts))
    bounds = [f"{histogram.base * 2**number:g}" for number in range(len(below) - 1)]
    return list(zip([*bounds, "+Inf"], map(float, below), strict=True))
