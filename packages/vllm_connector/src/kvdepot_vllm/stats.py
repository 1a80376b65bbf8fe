# pyright: basic, reportMissingImports=false
"""The connector's figures in vLLM: its "KV Transfer metrics" log line and Prometheus counters."""

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Final = {
    "stores": "Store operations that ended",
    "store_bytes": "Bytes copied into the depot",
    "store_seconds": "Seconds spent on stores, beside the engine's steps",
    "loads": "Loads that ended",
    "load_bytes": "Bytes copied out of the depot",
    "load_seconds": "Seconds spent on loads, beside the engine's steps",
    "failed_loads": "Loads that did not bring everything: the rest was recomputed",
    "lookups": "Prefixes that were looked up",
    "hit_tokens": "Tokens that were loaded instead of computed",
    "blends": "Prompts that were blended",
    "blend_reused_tokens": "Tokens of blends whose KV was reused as it was",
    "blend_recomputed_tokens": "Tokens of blends that were reused and computed again",
    "blend_gap_tokens": "Tokens of blends between the reused ones, which were computed",
    "blends_failed": "Blends that did not bring everything: the prompt was computed from its exact prefix on",
    "blends_refused": "Requests that asked for a blend and cannot be blended",
    "blends_declined_short": "Blends that would have reused too few tokens",
    "blends_declined_slow": "Blends that would have taken longer than computing the prompt",
    "blends_declined_room": "Blends for which the engine had too few free blocks",
    "stores_put_off": "Stores that waited because too many blocks were held by others",
    "stores_without_blocks": "Stores whose blocks were gone",
}


class KVDepotStats(KVConnectorStats):
    """Counts since the last report. `data` is a plain dictionary of numbers."""

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's or another interval's counts."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the log line."""
        data: dict[str, Any] = self.data
        result: dict[str, int | float] = {}
        for kind, title in (("store", "Stored"), ("load", "Loaded")):
            seconds = data.get(f"{kind}_seconds", 0)
            if data.get(f"{kind}s"):
                result[f"{title} MB"] = round(data.get(f"{kind}_bytes", 0) / 1e6, 1)
                result[f"{title} GB/s"] = round(data.get(f"{kind}_bytes", 0) / 1e9 / seconds, 2) if seconds else 0.0
        for name, title in (("hit_tokens", "Tokens loaded"), ("lookups", "Lookups"), ("failed_loads", "Failed loads")):
            if data.get(name):
                result[title] = data[name]
        return result

    def is_empty(self) -> bool:
        """Return whether all counts are zero."""
        return not any(self.data.values())


class KVDepotPromMetrics(KVConnectorPromMetrics):
    """Exports the counts as `vllm:kvdepot_*`, by engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvdepot_{name}", documentation=f"{text} (kvdepot).", labelnames=self._labelnames
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount:
                self._counters[name].labels(*labels).inc(amount)
