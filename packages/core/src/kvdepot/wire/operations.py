"""What operators ask of a running depot, and its status. None of these requests needs a session."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvdepot.layout import GroupKind
from kvdepot.wire.messages import Digests, Hello, Identifier, Label, Name


class Warm(Struct, array_like=True, tag="warm", frozen=True):
    """Have a prefix brought up from tiers, and pinned for `pin_seconds` if that is not 0. Needs no session."""

    tenant: Name
    digests: Digests
    pin_seconds: Annotated[float, Meta(ge=0.0, le=30 * 86400.0)] = 0.0


class Unpin(Struct, array_like=True, tag="unpin", frozen=True):
    """End every pin that `Warm` made, of one tenant or of all. Needs no session."""

    tenant: Name | None = None


class Status(Struct, array_like=True, tag="status", frozen=True):
    """Ask for everything an operator wants to see. Needs no session."""


class Clear(Struct, array_like=True, tag="clear", frozen=True):
    """Forget what nobody uses, of one tenant and one model or of all, in the tiers too. Needs no session.

    With `digests`, of a prefix from chunk 0 on: what only this prefix needs, in the pool.
    """

    tenant: Name | None = None
    model: Label | None = None
    digests: Digests = b""


class Find(Struct, array_like=True, tag="find", frozen=True):
    """Ask what the pool has of a prefix, in every space that has some of it. Needs no session."""

    digests: Digests


class SetQuota(Struct, array_like=True, tag="set_quota", frozen=True):
    """Change what a tenant can keep against others (0: nothing), until the server ends. Needs no session."""

    tenant: Annotated[str, Meta(min_length=1, max_length=256)]
    quota_bytes: Identifier


class AddTier(Struct, array_like=True, tag="add_tier", frozen=True):
    """Open one more tier, below those that are there, until the server ends. Needs no session."""

    url: Annotated[str, Meta(min_length=1, max_length=4096)]


class RemoveTier(Struct, array_like=True, tag="remove_tier", frozen=True):
    """Stop using a tier, by its name in the status; what it holds stays there. Needs no session."""

    name: Annotated[str, Meta(min_length=1, max_length=4096)]


class Drain(Struct, array_like=True, tag="drain", frozen=True):
    """Take no more stores, or take them again. What is here is still found. Needs no session."""

    is_draining: bool = True


class SetLogLevel(Struct, array_like=True, tag="set_log_level", frozen=True):
    """Change what the server logs, until it ends. Needs no session."""

    level: Literal["debug", "info", "warning", "error"]


class Configuration(Struct, array_like=True, tag="configuration", frozen=True):
    """Ask for the server's settings. Needs no session."""


OperatorRequest = (
    Hello | Status | Clear | Warm | Unpin | Find | SetQuota | AddTier | RemoveTier | Drain | SetLogLevel | Configuration
)


class StatusReply(Struct, array_like=True, tag="status_reply", frozen=True):
    """The depot's state; the fields are in `DepotStatus`."""

    epoch: int
    status: "DepotStatus"


class FoundPrefix(Struct, frozen=True, kw_only=True):
    """What one space of the pool has of a prefix: `num_chunks` leading chunks can be used."""

    num_chunks: int
    num_tokens: int
    tenant: str
    model: str
    dtype: str
    format: str
    chunk_tokens: int
    idle_seconds: float  # since the last of them was stored or used
    is_held: bool  # by a lease, a pin or a write
    num_children: int  # chunks after the last of them, of longer prefixes


class Found(Struct, array_like=True, tag="found", frozen=True):
    """What `Find` found: nothing, or one item for each space, those with the most of it first, at most 1,024."""

    epoch: int
    prefixes: list[FoundPrefix]


class ConfigurationReply(Struct, array_like=True, tag="configuration_reply", frozen=True):
    """The server's settings under the names of its flags; secrets are in files, which it names."""

    epoch: int
    settings: dict[str, Any]


class GroupStatus(Struct, frozen=True, kw_only=True):
    """One layer group of a registered context: sizes in tokens and bytes as the worker has them."""

    kind: GroupKind
    block_tokens: int  # logical: what the engine's block table counts
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
    fallback: str = ""  # why it is this mode, if another was meant
    mover: str = ""  # "starting", "ready", "ending" or "unavailable"
    mover_pid: int = 0
    why_no_mover: str = ""  # what ended the last one
    pid: int = 0
    chunk_tokens: int = 0
    dtype: str = ""
    format: str = ""
    num_leases: int = 0
    num_tickets: int = 0
    bytes_per_token: float = 0.0
    groups: list[GroupStatus] = []


class TierStatus(Struct, frozen=True, kw_only=True):
    """One tier below the pool. Sizes are bytes, 0 where the storage does not tell."""

    name: str
    state: str  # of its breaker: "closed" is in use, "open" is left alone
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
    """Values by powers of two: bucket `i` has those below `base * 2**i` that no bucket before it has, the last all."""

    base: float
    counts: list[int]
    total: float  # sum of the values


class PoolEstimate(Struct, frozen=True, kw_only=True):
    """What a pool of another size would have found: chunks, of `DepotStatus.estimated_chunks`."""

    scale: float  # of the present size
    pool_bytes: int
    hit_chunks: int


class DepotStatus(Struct, frozen=True, kw_only=True):
    """What `kvdepot status` shows; in JSON under these names. Sizes are bytes."""

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
    num_pins: int = 0  # prefixes that operators keep
    num_tickets: int
    prefill_seconds_saved: float = 0.0  # of computing what was retrieved; what retrieving took is not taken off
    num_sessions: int
    recovering: bool
    draining: bool = False  # takes no stores, as an operator asked for
    log_level: str = ""
    verify: str = "off"
    endpoints: list[str] = []  # of control sockets, with the ports that were found
    event_endpoints: list[str] = []  # of KV events, and of their replay ("": none), with the ports that were found
    contexts: list[ContextStatus]
    tenants: dict[str, dict[str, int]]
    tiers: list["TierStatus"] = []
    loop_longest_seconds: float = 0.0  # the longest turn of the server's loop, waiting for a core included
    loop_longest_blocked_seconds: float = 0.0  # the same; earlier servers left out waiting for a core
    loop_slow_turns: int = 0  # turns of more than 20 ms
    counters: dict[str, int]
    devices: dict[str, dict[str, int]] = {}  # bytes stored and retrieved, by the device at the other end
    latencies: dict[str, HistogramStatus] = {}  # seconds from request to reply, by operation; and of stores and turns
    eviction_ages: HistogramStatus | None = None  # seconds since the last use of what left
    estimates: list[PoolEstimate] = []  # by pool size
    estimated_chunks: int = 0  # that were asked for, as far as the sample tells
    estimate_rate: float = 0.0  # share of the chunks that are sampled
    pool_regions: list[int] = []  # bytes used in equal parts of the pool, by where extents start
    events: list[tuple[float, str]] = []  # the last ones: how many seconds ago, and what
