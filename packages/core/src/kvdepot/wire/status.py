"""The status of a depot, for `kvdepot status`, `kvdepot top` and the metrics, and the histograms that it reports.

Histograms count by powers of two: cheap enough for every request, fine enough for quantiles on a dashboard.
"""

from typing import Final

from msgspec import Struct

from kvdepot.layout import GroupKind

NUM_BUCKETS: Final = 24  # each twice as long as the one before: from 16 microseconds to two minutes
SHORTEST_SECONDS: Final = 0.000016  # bound of the first bucket for requests and for turns of the server's loop


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
    blend: str = ""  # of a scheduler: whether its engine blends
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


class TierStatus(Struct, frozen=True, kw_only=True):
    """One tier below the pool. Sizes are bytes, 0 if the storage does not report them."""

    name: str
    state: str  # of its breaker: "closed" (in use) or "open" (suspended)
    why_open: str = ""
    num_entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    queued_write_bytes: int = 0
    num_waiting_reads: int = 0
    num_waiting_writes: int = 0
    num_hung_calls: int = 0
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
    hit_chunks: int


class GenerationStatus(Struct, frozen=True, kw_only=True):
    """A generation of weights that engines compute with, or that the pool has KV of.

    Outdated ones are evicted first.
    """

    lineage: str  # digits; equal for generations of the same model and settings
    name: str  # of the generation: a version and a digest; "" for the weights that engines loaded
    models: list[str]
    num_schedulers: int  # attached schedulers whose engines compute with these weights
    used_bytes: int  # of the pool
    is_outdated: bool


class DepotStatus(Struct, frozen=True, kw_only=True):
    """The content of `kvdepot status`, in JSON under these names. Sizes are bytes."""

    server_version: str
    protocol_version: int
    epoch: int
    pid: int
    uptime_seconds: float
    policy: str
    features: list[str] = []  # the features that run
    num_entries: int
    num_chunks: int
    max_entries: int
    pool_size_bytes: int
    pool_ready_bytes: int
    pool_used_bytes: int
    quarantined_bytes: int
    num_leases: int
    num_pins: int = 0  # agent sessions whose prefix is pinned
    num_agent_sessions: int = 0  # agent sessions whose last prefix is known
    num_tickets: int
    num_unwritten: int = 0  # stored prefixes that are gathered, or that a tier is asked for, before they are written
    num_flights: int = 0  # prefixes that a lookup announced as being computed
    num_segments: int = 0  # names in the index of contents, for blends
    prefill_seconds_saved: float = 0.0  # time to compute the retrieved tokens, without subtracting the retrieves
    num_sessions: int
    recovering: bool
    draining: bool = False  # whether an operator stopped stores
    log_level: str = ""
    verify: str = "off"
    event_endpoints: list[str] = []  # of KV events and of their replay, with the actual ports; "" for none
    contexts: list[ContextStatus]
    tenants: dict[str, dict[str, int]]
    generations: list[GenerationStatus] = []  # the most recent last, at most 1,024
    tiers: list[TierStatus] = []
    loop_longest_seconds: float = 0.0  # longest turn of the server's loop, including waits for a core
    loop_slow_turns: int = 0  # turns of more than 20 ms
    counters: dict[str, int]
    counter_texts: dict[str, str] = {}  # descriptions of the counters
    tier_counter_texts: dict[str, str] = {}  # descriptions of `TierStatus.counters`
    devices: dict[str, dict[str, int]] = {}  # bytes stored and retrieved, by kind of device
    # Seconds from request to reply, by operation; also of whole stores and of turns.
    latencies: dict[str, HistogramStatus] = {}
    eviction_ages: HistogramStatus | None = None  # seconds since the last use of chunks evicted to make room
    estimates: list[PoolEstimate] = []  # by pool size
    estimated_chunks: int = 0  # chunks looked up, extrapolated from the sample
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
