# pyright: basic, reportMissingImports=false
"""The connector's figures in vLLM: its "KV Transfer metrics" log line and Prometheus counters."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvdepot.counting import engine_counter


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
            for name, text in engine_counter.texts.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount:
                self._counters[name].labels(*labels).inc(amount)
