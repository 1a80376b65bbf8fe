"""Adds up the reports of engines."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from kvdepot.config import format_size
from kvdepot.lab.engine_model import RequestReport

SOURCES = ("device", "own", "shared", "computed")
_SOURCE_NAMES = {
    "device": "engine's own cache",
    "own": "depot, its own",
    "shared": "depot, another's",
    "computed": "computed",
}


@dataclass(slots=True)
class Totals:
    """Sums over many requests."""

    num_requests: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    stored_bytes: int = 0
    retrieved_bytes: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0
    store_seconds: float = 0.0
    retrieve_seconds: float = 0.0
    lookups: list[float] = field(default_factory=list[float])
    retrieves: list[float] = field(default_factory=list[float])
    first_tokens: list[float] = field(default_factory=list[float])
    compute_seconds: float = 0.0

    def add(self, report: RequestReport) -> None:
        """Count one request."""
        self.num_requests += 1
        for source in SOURCES:
            self.tokens[source] += getattr(report, f"{source}_tokens")
        self.stored_bytes += report.stored_bytes
        self.retrieved_bytes += report.retrieved_bytes
        self.verified_bytes += report.verified_bytes
        self.wrong_bytes += report.wrong_bytes
        self.lookups.append(report.lookup_seconds)
        self.first_tokens.append(report.first_token_seconds)
        self.compute_seconds += report.compute_seconds
        if report.stored_bytes:
            self.store_seconds += report.store_seconds
        if report.retrieved_bytes:
            self.retrieve_seconds += report.retrieve_seconds
            self.retrieves.append(report.retrieve_seconds)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens."""
        return sum(self.tokens.values())

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return 1 - self.tokens["computed"] / self.num_tokens if self.num_tokens else 0.0

    @property
    def first_token_seconds(self) -> float:
        """Median time to the first token."""
        return _quantile(self.first_tokens, 0.5)

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as plain values, for JSON. Times are in milliseconds, rates in bytes per second."""
        return {
            "num_requests": self.num_requests,
            "prompt_tokens": self.num_tokens,
            "hit_rate": round(self.hit_rate, 4),
            "hit_rate_by_source": {
                source: round(self.tokens[source] / max(1, self.num_tokens), 4) for source in SOURCES[:3]
            },
            "verified_bytes": self.verified_bytes,
            "wrong_bytes": self.wrong_bytes,
            "stored_bytes": self.stored_bytes,
            "retrieved_bytes": self.retrieved_bytes,
            "store_bytes_per_second": round(self.stored_bytes / self.store_seconds) if self.store_seconds else 0,
            "retrieve_bytes_per_second": (
                round(self.retrieved_bytes / self.retrieve_seconds) if self.retrieve_seconds else 0
            ),
            "compute_seconds": round(self.compute_seconds, 3),
            "first_token_p50_ms": round(self.first_token_seconds * 1e3, 3),
            "lookup_p50_ms": round(_quantile(self.lookups, 0.5) * 1e3, 3),
            "lookup_p99_ms": round(_quantile(self.lookups, 0.99) * 1e3, 3),
            "retrieve_p50_ms": round(_quantile(self.retrieves, 0.5) * 1e3, 3),
        }

    def describe(self) -> str:
        """Return the sums as text."""
        total = max(1, self.num_tokens)
        numbers = self.as_dict()
        lines = [f"{self.num_requests} requests, {self.num_tokens:,} prompt tokens, {self.hit_rate:.1%} not computed:"]
        for source in SOURCES:
            share = self.tokens[source] / total
            lines.append(f"  {_SOURCE_NAMES[source]:20}{share:7.1%}  {'█' * round(share * 40)}")
        lines += [
            f"stored     {format_size(self.stored_bytes):>10} at {numbers['store_bytes_per_second'] / 1e9:.1f} GB/s",
            (
                f"retrieved  {format_size(self.retrieved_bytes):>10}"
                f" at {numbers['retrieve_bytes_per_second'] / 1e9:.1f} GB/s,"
                f" half of the retrieves within {numbers['retrieve_p50_ms']:.1f} ms"
            ),
            f"lookups    {numbers['lookup_p50_ms']:.2f} ms (p50), {numbers['lookup_p99_ms']:.2f} ms (p99)",
            f"verified   {format_size(self.verified_bytes):>10} against their keys: {self.wrong_bytes} bytes wrong",
        ]
        return "\n".join(lines)


def _quantile(values: list[float], share: float) -> float:
    if not values:
        return 0.0
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
