"""A depot's status as Prometheus metrics: names, units and texts. Needs `prometheus_client`, of `kvdepot[http]`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdepot import messages as m

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(status: m.DepotStatus) -> bytes:
    """Return the metrics of a status in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """A depot's status as Prometheus metrics, each with its unit in its name."""

    def __init__(self, status: m.DepotStatus) -> None:
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
            "loop_longest_work_seconds": (status.loop_longest_work_seconds, "Most processor time of one turn"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"kvdepot_{name}", text, value)
        yield CounterMetricFamily("kvdepot_loop_slow_turns", "Turns of more than 5 ms of work", status.loop_slow_turns)
        for name, value in sorted(status.counters.items()):
            yield CounterMetricFamily(f"kvdepot_{name}", name.replace("_", " ").capitalize(), value)
        used = GaugeMetricFamily("kvdepot_tenant_used_bytes", "Of the pool", labels=["tenant"])
        quota = GaugeMetricFamily("kvdepot_tenant_quota_bytes", "Kept against others", labels=["tenant"])
        for tenant, usage in sorted(status.tenants.items()):
            used.add_metric([tenant], usage["used_bytes"])
            if "quota_bytes" in usage:
                quota.add_metric([tenant], usage["quota_bytes"])
        yield used
        yield quota
        yield from self._tiers()

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
        for name in sorted({name for tier in tiers for name in tier.counters}):
            counter = CounterMetricFamily(f"kvdepot_tier_{name}", name.replace("_", " ").capitalize(), labels=["tier"])
            for tier in tiers:
                counter.add_metric([tier.name], tier.counters.get(name, 0))
            yield counter
