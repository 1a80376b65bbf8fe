"""Requests of operators to a running depot, and its status. None of these requests needs a session."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvdepot.layout import GroupKind
from kvdepot.wire.messages import Digests, Hello, Identifier, Label, Name


class Warm(Struct, array_like=True, tag="warm", frozen=True):
    """Promote a prefix from tiers, and pin it for `pin_seconds` unless that is 0."""

    tenant: Name
    digests: Digests
    pin_seconds: Annotated[float, Meta(ge=0.0, le=30 * 86400.0)] = 0.0


class Unpin(Struct, array_like=True, tag="unpin", frozen=True):
    """End the pins made by `Warm`, of one tenant or of all."""

    tenant: Name | None = None


class Status(Struct, array_like=True, tag="status", frozen=True):
    """Ask for the status."""


class Clear(Struct, array_like=True, tag="clear", frozen=True):
    """Delete unused chunks of one tenant and model, or of all, in the tiers too.

    With `digests`, delete only the chunks that no prefix but this one (from chunk 0 on) needs, and only in the pool.
    """

    tenant: Name | None = None
    model: Label | None = None
    digests: Digests = b""


class Find(Struct, array_like=True, tag="find", frozen=True):
    """Ask which part of a prefix the pool has, in every space."""

    digests: Digests


class SetQuota(Struct, array_like=True, tag="set_quota", frozen=True):
    """Set a tenant's quota until the server ends; 0 removes it."""

    tenant: Annotated[str, Meta(min_length=1, max_length=256)]
    quota_bytes: Identifier


class AddTier(Struct, array_like=True, tag="add_tier", frozen=True):
    """Add a tier below the others until the server ends."""

    url: Annotated[str, Meta(min_length=1, max_length=4096)]


class RemoveTier(Struct, array_like=True, tag="remove_tier", frozen=True):
    """Stop using a tier, by its name in the status. It keeps its entries."""

    name: Annotated[str, Meta(min_length=1, max_length=4096)]


class Drain(Struct, array_like=True, tag="drain", frozen=True):
    """Stop or resume taking stores. Entries that are here can still be found."""

    is_draining: bool = True


class SetLogLevel(Struct, array_like=True, tag="set_log_level", frozen=True):
    """Change the log level until the server ends."""

    level: Literal["debug", "info", "warning", "error"]


class Configuration(Struct, array_like=True, tag="configuration", frozen=True):
    """Ask for the server's settings."""


OperatorRequest = (
    Hello | Status | Clear | Warm | Unpin | Find | SetQuota | AddTier | RemoveTier | Drain | SetLogLevel | Configuration
)


class StatusReply(Struct, array_like=True, tag="status_reply", frozen=True):
    """The depot's state; the fields are in `DepotStatus`."""

    epoch: int
    status: "DepotStatus"


class FoundPrefix(Struct, frozen=True, kw_only=True):
    """The part of a prefix that one space of the pool has: `num_chunks` leading chunks can be used."""

    num_chunks: int
    num_tokens: int
    tenant: str
    model: str
    dtype: str
    format: str
    chunk_tokens: int
    idle_seconds: float  # since the last chunk was stored or used
    is_held: bool  # by a lease, a pin or a write
    num_children: int  # chunks of longer prefixes directly after the last chunk


class Found(Struct, array_like=True, tag="found", frozen=True):
    """The result of `Find`: one item per space that has a part, longest first, at most 1,024."""

    epoch: int
    prefixes: list[FoundPrefix]


class ConfigurationReply(Struct, array_like=True, tag="configuration_reply", frozen=True):
    """The server's settings by flag. Secrets stay in the files that settings name."""

    epoch: int
    settings: dict[str, Any]


class GroupStatus(Struct, frozen=True, kw_only=True):
    """One layer group of a registered context, with the worker's sizes in tokens and bytes."""

    kind: GroupKind
    block_tokens: int  # logical: the unit of the engine's block table
    window_tokens: int
    num_shards: int
    shard: int = 0
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
    fallback: str = ""  # the reason for this mode, if another was intended
    blend: str = ""  # of a scheduler: whether its engine blends
    mover: str = ""  # "starting", "ready", "ending" or "unavailable"
    mover_pid: int = 0
    why_no_mover: str = ""  # how the last one ended
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
    state: str  # of its breaker: "closed" is in use, "open" is suspended
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
    """Counts by powers of two: bucket `i` has the values below `base * 2**i` that no earlier one has; the last, all."""

    base: float
    counts: list[int]
    total: float  # sum of the values


class PoolEstimate(Struct, frozen=True, kw_only=True):
    """Chunks that a pool of another size would have found, out of `DepotStatus.estimated_chunks`."""

    scale: float  # of the present size
    pool_bytes: int
    hit_chunks: int


class DepotStatus(Struct, frozen=True, kw_only=True):
    """The content of `kvdepot status`, in JSON under these names. Sizes are bytes."""

    server_version: str
    protocol_version: int
    epoch: int
    pid: int
    uptime_seconds: float
    policy: str
    num_entries: int
    num_chunks: int
    max_entries: int
    pool_size_bytes: int
    pool_ready_bytes: int
    pool_used_bytes: int
    quarantined_bytes: int
    num_leases: int
    num_pins: int = 0  # prefixes pinned by operators
    num_tickets: int
    num_flights: int = 0  # prefixes that a lookup announced as being computed
    num_segments: int = 0  # names in the index of contents, which blends ask
    prefill_seconds_saved: float = 0.0  # time to compute the retrieved tokens, without subtracting the retrieves
    num_sessions: int
    recovering: bool
    draining: bool = False  # an operator stopped stores
    log_level: str = ""
    verify: str = "off"
    event_endpoints: list[str] = []  # of KV events and of their replay ("": none), with the actual ports
    contexts: list[ContextStatus]
    tenants: dict[str, dict[str, int]]
    tiers: list["TierStatus"] = []
    loop_longest_seconds: float = 0.0  # longest turn of the server's loop, including waits for a core
    loop_slow_turns: int = 0  # turns of more than 20 ms
    counters: dict[str, int]
    counter_texts: dict[str, str] = {}  # what each counts
    tier_counter_texts: dict[str, str] = {}  # the same of `TierStatus.counters`
    devices: dict[str, dict[str, int]] = {}  # bytes stored and retrieved, by the device at the other end
    latencies: dict[str, HistogramStatus] = {}  # seconds from request to reply by operation; also of stores and turns
    eviction_ages: HistogramStatus | None = None  # seconds since the last use of evicted chunks
    estimates: list[PoolEstimate] = []  # by pool size
    estimated_chunks: int = 0  # asked for, extrapolated from the sample
    estimate_rate: float = 0.0  # share of chunks in the sample
    pool_regions: list[int] = []  # bytes used in equal parts of the pool, by the start of extents
    events: list[tuple[float, str]] = []  # recent ones: seconds ago, and text
