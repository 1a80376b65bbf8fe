"""The status of a depot, for `kvdepot status`, `kvdepot top` and the metrics, and the histograms that it reports.

A figure is declared once, as a field whose type has its description: `num_pins: Annotated[int, gauge("...")] = 0`. It
is then a metric, a line of `kvdepot status --verbose`, and a description in the OpenAPI document; the table of metrics
in `docs/reference/depot.md` repeats it. None is no value.

Histograms count by powers of two: cheap enough for every request, fine enough for quantiles on a dashboard.
"""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final, get_args

from msgspec import Meta, Struct
from msgspec.structs import fields

from kvdepot.layout import GroupKind

NUM_BUCKETS: Final = 24  # each twice as long as the one before: from 16 microseconds to two minutes
SHORTEST_SECONDS: Final = 0.000016  # bound of the first bucket for requests and for turns of the server's loop


def gauge(text: str, metric: str = "") -> Meta:
    """Declare that a field is exported as a gauge. `text` is its description, without a full stop.

    The metric is named `kvdepot_METRIC`, by default after the field, without `num_`.
    """
    return Meta(description=text, extra={"metric": metric, "is_total": False})


def total(text: str, metric: str) -> Meta:
    """Declare that a field is exported as a counter, `kvdepot_METRIC_total`: see `gauge`."""
    return Meta(description=text, extra={"metric": metric, "is_total": True})


@dataclass(frozen=True, slots=True)
class Figure:
    """A field that was declared by `gauge` or `total`."""

    field: str
    metric: str
    text: str
    is_total: bool


@cache
def figures_of(kind: type[Struct]) -> tuple[Figure, ...]:
    """Return the figures of a status, in the order of its fields."""
    found: list[Figure] = []
    for each in fields(kind):
        for meta in get_args(each.type):
            if isinstance(meta, Meta) and meta.extra is not None and meta.description is not None:
                metric = meta.extra["metric"] or each.name.removeprefix("num_")
                found.append(Figure(each.name, metric, meta.description, meta.extra["is_total"]))
    return tuple(found)


class GroupStatus(Struct, frozen=True, kw_only=True):
    """One layer group of a registered context, with the worker's sizes in tokens and bytes."""

    kind: GroupKind
    block_tokens: int  # logical: the unit of the engine's block table
    window_tokens: int
    num_parts: int = 1  # parts of this size in the whole model
    part: str = ""  # described in words; "" if it is the whole group
    num_layers: int = 0
    num_blocks: int = 0
    physical_block_tokens: int = 0
    compress_ratio: int = 1
    hidden_dims: tuple[int, ...] = ()
    dtype: str = ""
    is_mla: bool = False
    shape: tuple[int, ...] = ()
    attention_backend: str = ""
    block_size_bytes: int = 0
    bytes_per_token: float = 0.0


class ContextStatus(Struct, frozen=True, kw_only=True):
    """One registered context."""

    context: int
    role: str
    instance: str
    model: str
    rank: int = 0
    world_size: int = 0
    device: str = ""
    transfer_mode: str = ""
    fallback: str = ""  # the reason for this mode, if the worker asked for another
    remark: str = ""  # of a scheduler: the line that its engine has for operators
    weights: str = ""  # of a scheduler: the generation that its engine computes with, "" for the weights that it loaded
    mover: str = ""  # "starting", "ready", "ending" or "unavailable"
    mover_pid: int = 0
    why_no_mover: str = ""  # how the last mover ended
    pid: int = 0
    chunk_tokens: int = 0
    dtype: str = ""
    format: str = ""
    num_leases: int = 0
    num_tickets: int = 0
    bytes_per_token: float = 0.0
    groups: list[GroupStatus] = []


class TenantStatus(Struct, kw_only=True, omit_defaults=True):
    """One tenant. The fields that are None say nothing of it: it has no quota, or has looked up nothing."""

    used_bytes: Annotated[int, gauge("Bytes of the pool used by a tenant", "tenant_used_bytes")]
    quota_bytes: Annotated[int | None, gauge("Share of the pool reserved for a tenant", "tenant_quota_bytes")] = None
    retained_bytes: Annotated[
        int | None, gauge("Bytes that retained sessions of a tenant keep", "tenant_retained_bytes")
    ] = None
    lookup_tokens: Annotated[int | None, total("Tokens looked up", "lookup_tokens")] = None
    pool_hit_tokens: int = 0
    tier_hit_tokens: int = 0


class DeviceStatus(Struct, frozen=True, kw_only=True):
    """The bytes that moved between the pool and one kind of device."""

    stored_bytes: Annotated[int, total("Bytes of committed stores", "store_bytes")] = 0
    retrieved_bytes: Annotated[int, total("Bytes of prepared retrieves", "retrieve_bytes")] = 0


class TierStatus(Struct, frozen=True, kw_only=True):
    """One tier below the pool. Sizes are bytes, 0 if the storage does not report them."""

    name: str
    state: str  # of its breaker: "closed" (in use) or "open" (suspended)
    why_open: str = ""
    num_entries: Annotated[int, gauge("Entries in the tier, if its storage counts them", "tier_entries")] = 0
    used_bytes: Annotated[int, gauge("Bytes in use in the tier's storage", "tier_used_bytes")] = 0
    capacity_bytes: Annotated[int, gauge("Capacity of the tier's storage", "tier_capacity_bytes")] = 0
    queued_write_bytes: Annotated[int, gauge("Bytes waiting to be written", "tier_queued_write_bytes")] = 0
    num_waiting_reads: Annotated[int, gauge("Reads waiting for a thread", "tier_waiting_reads")] = 0
    num_waiting_writes: Annotated[int, gauge("Writes waiting for a thread", "tier_waiting_writes")] = 0
    num_hung_calls: Annotated[int, gauge("Calls past their deadline that have not returned", "tier_hung_calls")] = 0
    counters: dict[str, int] = {}


class HistogramStatus(Struct, frozen=True, kw_only=True):
    """Counts by powers of two: bucket `i` counts values below `base * 2**i` that no earlier bucket counts.

    The last bucket also counts all larger values.
    """

    base: float
    counts: list[int]
    total: float  # sum of the values


class PoolEstimate(Struct, frozen=True, kw_only=True):
    """The chunks that a pool of another size would have found, of `DepotStatus.estimated_chunks`."""

    scale: float  # relative to the present size
    pool_bytes: int
    hit_chunks: Annotated[
        int, total("Chunks of the sample that a pool of another size would have had", "estimated_hit_chunks")
    ]


class GenerationStatus(Struct, frozen=True, kw_only=True):
    """A generation of weights that engines compute with, or that the pool has KV of.

    Outdated ones are evicted first.
    """

    lineage: str  # digits; equal for generations of the same model and settings
    name: str  # of the generation: a version and a digest; "" for the weights that engines loaded
    models: list[str]
    num_schedulers: int  # attached schedulers whose engines compute with these weights
    used_bytes: Annotated[
        int, gauge("Bytes of the pool used by KV of a generation of weights", "generation_used_bytes")
    ]
    is_outdated: bool


class DepotStatus(Struct, kw_only=True):
    """The content of `kvdepot status`, in JSON under these names. Sizes are bytes.

    The server adds its own figures to the depot's, and each feature adds its own (`Feature.report`).
    """

    server_version: str = ""
    protocol_version: int = 0
    epoch: int = 0
    pid: int = 0
    uptime_seconds: Annotated[float, gauge("Time since the server started")] = 0.0
    policy: str = ""
    features: list[str] = []  # the features that run
    num_entries: Annotated[int, gauge("Sealed entries of the index")] = 0
    num_chunks: Annotated[int, gauge("Chunks in the index")] = 0
    max_entries: Annotated[int, gauge("Capacity of the index in entries", "entries_limit")] = 0
    pool_size_bytes: Annotated[int, gauge("Size of the pool")] = 0
    pool_ready_bytes: Annotated[int, gauge("Bytes of the pool allocated so far")] = 0
    pool_used_bytes: Annotated[int, gauge("Bytes of the pool in use")] = 0
    quarantined_bytes: Annotated[int, gauge("Bytes held until their writer returns or dies")] = 0
    num_leases: Annotated[int, gauge("Leases held by requests")] = 0
    num_pins: Annotated[int, gauge("Sessions of agents whose prefix is retained")] = 0
    num_agent_sessions: Annotated[int, gauge("Sessions of agents whose last prefix is known")] = 0
    num_tickets: Annotated[int, gauge("Stores prepared and not yet committed", "stores_under_way")] = 0
    num_unwritten: int = 0  # stored prefixes that are gathered, or that a tier is asked for, before they are written
    num_flights: Annotated[int, gauge("Prefixes announced as being computed", "flights_under_way")] = 0
    num_segments: Annotated[int, gauge("Names of segments that blends can find", "blend_index_segments")] = 0
    prefill_seconds_saved: Annotated[
        float, total("Prefill time saved by retrieves, from the engines' own time per token", "prefill_seconds_saved")
    ] = 0.0
    num_sessions: Annotated[int, gauge("Connected workers and schedulers")] = 0
    recovering: Annotated[bool, gauge("1 while the entries of an earlier server are being read")] = False
    draining: bool = False  # whether an operator stopped stores
    log_level: str = ""
    verify: str = "off"
    event_endpoints: list[str] = []  # of KV events and of their replay, with the actual ports; "" for none
    contexts: list[ContextStatus] = []
    tenants: dict[str, TenantStatus] = {}
    generations: list[GenerationStatus] = []  # the most recent last, at most 1,024
    tiers: list[TierStatus] = []
    loop_longest_seconds: Annotated[
        float, gauge("Longest turn of the request loop, with its waits for a core", "loop_longest_turn_seconds")
    ] = 0.0
    loop_slow_turns: Annotated[int, total("Turns of more than 20 ms", "loop_slow_turns")] = 0
    counters: dict[str, int] = {}
    counter_texts: dict[str, str] = {}  # descriptions of the counters
    tier_counter_texts: dict[str, str] = {}  # descriptions of `TierStatus.counters`
    devices: dict[str, DeviceStatus] = {}  # by kind
    # Seconds from request to reply, by operation; also of whole stores and of turns.
    latencies: dict[str, HistogramStatus] = {}
    eviction_ages: HistogramStatus | None = None  # seconds since the last use of chunks evicted to make room
    estimates: list[PoolEstimate] = []  # by pool size
    estimated_chunks: Annotated[
        int, total("Chunks looked up, in the sample used for estimates", "estimated_lookup_chunks")
    ] = 0
    estimate_rate: float = 0.0  # share of chunks in the sample
    pool_regions: list[int] = []  # bytes used in equal parts of the pool, by the start of extents
    events: list[tuple[float, str]] = []  # recent events: seconds ago, and text


class Histogram:
    """Bucket `i` counts values from `base * 2**(i-1)` to below `base * 2**i`; bucket 0 counts values below `base`.

    The last bucket also counts all larger values.
    """

    __slots__ = ("_per_base", "base", "counts", "total")

    def __init__(self, base: float) -> None:
        self.base = base
        self._per_base = 1 / base
        self.counts = [0] * NUM_BUCKETS
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, which must not be negative, once or several times."""
        self.total += value * count
        try:
            self.counts[int(value * self._per_base).bit_length()] += count
        except IndexError:
            self.counts[-1] += count

    def status(self) -> HistogramStatus:
        """Return the present counts."""
        return HistogramStatus(base=self.base, counts=list(self.counts), total=self.total)


class WatchedHistogram(Histogram):
    """A histogram that also keeps the largest value, and counts the values above a bound."""

    __slots__ = ("bound", "longest", "num_above")

    def __init__(self, base: float, bound: float) -> None:
        super().__init__(base)
        self.bound = bound
        self.longest = 0.0
        self.num_above = 0

    def add(self, value: float, count: int = 1) -> None:
        """See `Histogram`."""
        super().add(value, count)
        self.longest = max(self.longest, value)
        if value > self.bound:
            self.num_above += count
