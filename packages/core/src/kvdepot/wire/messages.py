"""Messages between processes, and how they lie in a frame.

A frame is 8 bytes of sequence number (little-endian, chosen by the client, echoed in the reply) and one msgpack array
whose first item is the message's tag. Every request gets exactly one reply with the same number; every reply names the
server's epoch. On the control socket a frame has its length before it, and before the first comes a greeting, which
says whose connection it is. Fields are only ever added at the end, with a default: an older peer ignores what it does
not know. What becomes of each message when either side dies is in `docs/wire.md`.

KV bytes never travel here. Extents do, as packed `EXTENT` records, no object for each block.
"""

import enum
import struct
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvdepot.errors import ErrorCode
from kvdepot.layout import CacheLayout, GroupKind

PROTOCOL_VERSION: Final = 2
MINIMUM_PROTOCOL_VERSION: Final = 2  # before, the control socket spoke ZeroMQ
MAXIMUM_FRAME_BYTES: Final = 4 << 20
MAXIMUM_CHUNKS: Final = 65_536  # of one lookup: 4 million tokens in chunks of 64
# Entries, of all groups together, of one request (one chunk may have more), which take the server about as long as:
MAXIMUM_STORE_ENTRIES: Final = 32  # half a millisecond, if each evicts another
MAXIMUM_RETRIEVE_ENTRIES: Final = 128  # and that, too
MAXIMUM_ALLOCATIONS: Final = 4096  # of a worker's device memory
MAXIMUM_MOVER_OPTIONS: Final = 16

EXTENT: Final = struct.Struct("<IHHIIQQQ")
"""One extent, 40 bytes: chunk (counted from the run's first) u32, group u16, 0 u16, record u32, 0 u32, header u64 (the
record's generation and state while the extent is valid), offset in the pool u64, payload bytes u64."""

_U32 = (1 << 32) - 1
Name = Annotated[str, Meta(max_length=256)]
Label = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=_U32)]
ChunkNumber = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # the last of a run is a u32 in the index too
Identifier = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digests = Annotated[bytes, Meta(max_length=MAXIMUM_CHUNKS * 32)]
BatchDigests = Annotated[bytes, Meta(max_length=MAXIMUM_RETRIEVE_ENTRIES * 32)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
BlockIdBytes = Annotated[bytes, Meta(max_length=1 << 20)]  # packed block ids: i32, little-endian


class Verify(enum.StrEnum):
    """Which entries of the pool carry a checksum that is compared when they are retrieved."""

    OFF = "off"  # none are made
    SAMPLE = "sample"  # all are made, one chunk of `VERIFY_ONE_IN` is compared
    ALL = "all"


VERIFY_ONE_IN: Final = 16
MAXIMUM_PRIORITY: Final = 3
MAXIMUM_TTL_SECONDS: Final = 1e9
CHECKSUM_BYTES: Final = 16  # XXH3-128 of an extent's payload; zeros stand for none


class GroupShape(Struct, array_like=True, frozen=True):
    """What every rank and the scheduler agree on about one layer group."""

    kind: GroupKind
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    window_tokens: Count = 0
    num_shards: Annotated[int, Meta(ge=1, le=4096)] = 1


class CacheSpec(Struct, array_like=True, frozen=True):
    """The part of a cache's layout that decides who can share: equal specs, one space of entries."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    groups: Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=64)]
    dtype: Name
    format: Name = ""


def spec_of(layout: CacheLayout) -> CacheSpec:
    """Return the shared part of a worker's layout."""
    groups = tuple(GroupShape(g.kind, g.block_tokens, g.window_tokens, g.num_shards) for g in layout.groups)
    return CacheSpec(layout.chunk_tokens, groups, layout.dtype, layout.format)


class GroupDetail(Struct, array_like=True, frozen=True):
    """One layer group as one worker has it: its sizes for the server, the rest for the operator."""

    page_sizes_bytes: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 40)], ...], Meta(min_length=1, max_length=4096)]
    num_blocks: Annotated[int, Meta(ge=1, le=_U32)]
    shard: Annotated[int, Meta(ge=0, le=4095)] = 0
    physical_block_tokens: Count = 0  # 0: the same as the logical block
    compress_ratio: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    num_layers: Count = 0
    hidden_dims: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()  # of one token in one layer
    dtype: Name = ""
    is_mla: bool = False
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()  # of one layer's tensor
    attention_backend: Name = ""


class PagePlace(Struct, array_like=True, frozen=True):
    """Where the blocks of one page lie: block `i` starts `offset + i * stride_bytes` into an allocation."""

    allocation: Count  # counted as in the offer
    offset: Identifier
    stride_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class MoverOffer(Struct, array_like=True, frozen=True):
    """A worker's device memory, as a mover of the depot can open it."""

    mover: Name  # an entry point of the group `kvdepot.movers`
    device: Name  # in words that mean the same in every process
    allocations: Annotated[
        tuple[Annotated[bytes, Meta(min_length=1, max_length=256)], ...],
        Meta(min_length=1, max_length=MAXIMUM_ALLOCATIONS),
    ]  # a handle each, no two alike
    pages: Annotated[
        tuple[Annotated[tuple[PagePlace, ...], Meta(min_length=1, max_length=4096)], ...],
        Meta(min_length=1, max_length=64),
    ]  # for each group one for each of its pages
    options: Annotated[dict[Name, Identifier], Meta(max_length=MAXIMUM_MOVER_OPTIONS)] = {}  # the mover's own affair


# --- requests -------------------------------------------------------------------------------------------------------


class Hello(Struct, array_like=True, tag="hello", frozen=True):
    """Ask who is there. Needs no session."""

    protocol_version: Count
    client: Name = ""


class RegisterKVCache(Struct, array_like=True, tag="register_kv_cache", frozen=True):
    """A worker offers its KV cache: one struct, whatever the device.

    A worker registers only when no copy that it started under an earlier session is still running: extents that such a
    session of the same process, instance and rank had left are free from then on.
    """

    protocol_version: Count
    instance: Name
    rank: Annotated[int, Meta(ge=0, le=65535)]
    world_size: Annotated[int, Meta(ge=1, le=65536)]
    device: Name
    transfer_mode: Name
    model: Label
    spec: CacheSpec
    details: Annotated[tuple[GroupDetail, ...], Meta(min_length=1, max_length=64)]
    offer: MoverOffer | None = None  # None: the worker copies by itself
    fallback: Label = ""  # why it does, if it was meant to be otherwise


class RegisterScheduler(Struct, array_like=True, tag="register_scheduler", frozen=True):
    """A scheduler says for which caches it will look up."""

    protocol_version: Count
    instance: Name
    model: Label
    spec: CacheSpec


class Unregister(Struct, array_like=True, tag="unregister", frozen=True):
    """End a context: its leases and unfinished stores end with it. Sent when no copy is running."""

    context: Identifier


class Lookup(Struct, array_like=True, tag="lookup", frozen=True):
    """Pin the longest usable prefix of the chunks named, from chunk 0 on, for a request.

    If the pool has less than all of it, tiers are asked for the rest, and the reply may come `wait_seconds` later.
    `token_seconds` is what computing one token of prompt takes the engine, 0 for unknown: what a tier would bring later
    than that is not read, and what is retrieved counts as so much time saved.
    """

    context: Identifier
    request_id: Label
    digests: Digests
    tenant: Name = ""
    wait_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    token_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class Release(Struct, array_like=True, tag="release", frozen=True):
    """Give leases back; those that are gone already do not matter."""

    context: Identifier
    leases: Annotated[tuple[Identifier, ...], Meta(max_length=4096)]


class EndRequest(Struct, array_like=True, tag="end_request", frozen=True):
    """Give back every lease of a request of this context."""

    context: Identifier
    request_id: Label


class PrepareStore(Struct, array_like=True, tag="prepare_store", frozen=True):
    """Ask for space for the chunks of a run that are missing.

    `covered` says for each group how many of the run's last chunks the worker can store (all of them for full
    attention, what is left of them for a window).
    """

    context: Identifier
    request_id: Label
    tenant: Name
    digests: BatchDigests
    first_chunk: ChunkNumber
    parent: Digest
    covered: Annotated[tuple[Count, ...], Meta(max_length=64)]


class CommitStore(Struct, array_like=True, tag="commit_store", frozen=True):
    """Say that the bytes of a ticket are all in place.

    `checksums` has `CHECKSUM_BYTES` for each of the plan's extents in their order, or nothing.
    """

    context: Identifier
    ticket: Identifier
    checksums: Annotated[bytes, Meta(max_length=64 * CHECKSUM_BYTES)] = b""


class AbortStore(Struct, array_like=True, tag="abort_store", frozen=True):
    """Give up a ticket, nothing being written any more. A ticket that is gone already does not matter."""

    context: Identifier
    ticket: Identifier


class PrepareRetrieve(Struct, array_like=True, tag="prepare_retrieve", frozen=True):
    """Pin the leading chunks of a run that are here and say where their bytes are.

    `covered` says for each group how many of the run's last chunks are wanted.
    """

    context: Identifier
    request_id: Label
    digests: BatchDigests
    first_chunk: ChunkNumber
    covered: Annotated[tuple[Count, ...], Meta(max_length=64)]


class Move(Struct, array_like=True, tag="move", frozen=True):
    """Have the context's mover copy the extents of a ticket (a store) or of a lease (a retrieve).

    `number` 0 copies nothing: its reply says when the mover can be used. `wait_seconds` is how long the mover may still
    be starting. `block_ids`, `first_covered` and `skip_blocks` are as in `kvdepot.client.transfers.CopyBatch`, for each
    group. At most one a direction is under way for a context.
    """

    context: Identifier
    number: Identifier
    is_store: bool = False
    block_ids: Annotated[tuple[BlockIdBytes, ...], Meta(max_length=64)] = ()
    first_covered: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    skip_blocks: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    wait_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class Hint(Struct, array_like=True, tag="hint", frozen=True):
    """Say how long a prefix is worth keeping: of the chunks named, from chunk 0 on, those that no other prefix needs.

    `session_ended`: nobody will ask for it again, it leaves before everything else of its quota share. `ttl_seconds`
    above 0: the same, that much later, unless the prefix is used before. `priority`: within its share it leaves after
    what has a lower one. A new hint replaces the one before; a use takes back all but the priority.
    """

    context: Identifier
    tenant: Name
    digests: Digests
    session_ended: bool = False
    priority: Annotated[int, Meta(ge=0, le=MAXIMUM_PRIORITY)] = 0
    ttl_seconds: Annotated[float, Meta(ge=0, le=MAXIMUM_TTL_SECONDS)] = 0.0


class ReportCorrupt(Struct, array_like=True, tag="report_corrupt", frozen=True):
    """Say that entries do not have their checksum: `(record, header)` of each, as its extent named them."""

    context: Identifier
    entries: Annotated[tuple[tuple[Count, int], ...], Meta(max_length=MAXIMUM_RETRIEVE_ENTRIES)]


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


Request = (
    Hello
    | RegisterKVCache
    | RegisterScheduler
    | Unregister
    | Lookup
    | Release
    | EndRequest
    | PrepareStore
    | CommitStore
    | AbortStore
    | PrepareRetrieve
    | Move
    | ReportCorrupt
    | Hint
    | Status
    | Clear
    | Warm
    | Unpin
    | Find
    | SetQuota
    | AddTier
    | RemoveTier
    | Drain
    | SetLogLevel
    | Configuration
)

OperatorRequest = (
    Hello | Status | Clear | Warm | Unpin | Find | SetQuota | AddTier | RemoveTier | Drain | SetLogLevel | Configuration
)


# --- replies --------------------------------------------------------------------------------------------------------


class ErrorReply(Struct, array_like=True, tag="error", frozen=True):
    """The request was refused and changed nothing."""

    epoch: int
    code: ErrorCode
    message: str


class HelloReply(Struct, array_like=True, tag="hello_reply", frozen=True):
    """Who is there."""

    epoch: int
    protocol_version: int
    minimum_protocol_version: int
    server_version: str
    pid: int


class Registered(Struct, array_like=True, tag="registered", frozen=True):
    """The number under which a context's requests go from now on, and what its worker has to verify.

    A `Move` is answered at the latest `move_seconds` after its `wait_seconds`.
    """

    epoch: int
    context: int
    verify: Verify = Verify.OFF
    move_seconds: float = 0.0


class Done(Struct, array_like=True, tag="done", frozen=True):
    """It is done; `count` of what the request was about were affected."""

    epoch: int
    count: int = 0


class LookupReply(Struct, array_like=True, tag="lookup_reply", frozen=True):
    """`num_chunks` leading chunks are here and pinned under `lease` for `lease_seconds`; 0 chunks have lease 0.

    The depot waited `waited_seconds` for tiers.
    """

    epoch: int
    num_chunks: int
    lease: int
    lease_seconds: float = 0.0
    waited_seconds: float = 0.0


class StorePlan(Struct, array_like=True, tag="store_plan", frozen=True):
    """Where to write. Without missing chunks there is no ticket (0) and nothing to do.

    `extents` are packed `EXTENT` records; `num_present` entries are here or being stored by somebody else already,
    `num_declined` found no room.
    """

    epoch: int
    ticket: int
    extents: bytes
    num_present: int
    num_declined: int


class RetrievePlan(Struct, array_like=True, tag="retrieve_plan", frozen=True):
    """Where to read: `extents` of the run's first `num_chunks` chunks, pinned under `lease` until released."""

    epoch: int
    lease: int
    num_chunks: int
    extents: bytes


class MoveOutcome(enum.StrEnum):
    """What became of a `Move`."""

    DONE = "done"
    FAILED = "failed"  # a miss: nothing of it is being copied any more
    UNAVAILABLE = "unavailable"  # and no mover will come: the worker copies by itself, or not at all


class Moved(Struct, array_like=True, tag="moved", frozen=True):
    """The end of a copy. Whatever the outcome, nobody touches the extents and blocks for it any more."""

    epoch: int
    outcome: MoveOutcome
    why: str = ""
    is_settled: bool = False  # the mover makes nothing ready any more: later copies will be no faster


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
    loop_longest_blocked_seconds: float = 0.0  # the most that one turn took without that waiting
    loop_slow_turns: int = 0  # turns that took more than 5 ms without it
    counters: dict[str, int]
    devices: dict[str, dict[str, int]] = {}  # bytes stored and retrieved, by the device at the other end
    latencies: dict[str, HistogramStatus] = {}  # seconds from request to reply, by operation; and of stores and turns
    eviction_ages: HistogramStatus | None = None  # seconds since the last use of what left
    estimates: list[PoolEstimate] = []  # by pool size
    estimated_chunks: int = 0  # that were asked for, as far as the sample tells
    estimate_rate: float = 0.0  # share of the chunks that are sampled
    pool_regions: list[int] = []  # bytes used in equal parts of the pool, by where extents start
    events: list[tuple[float, str]] = []  # the last ones: how many seconds ago, and what


Reply = (
    ErrorReply
    | HelloReply
    | Registered
    | Done
    | LookupReply
    | StorePlan
    | RetrievePlan
    | Moved
    | StatusReply
    | Found
    | ConfigurationReply
)


# --- session socket -------------------------------------------------------------------------------------------------


class OpenSession(Struct, array_like=True, tag="open_session", frozen=True):
    """First and only message of a client on the session socket; afterwards it sends single bytes as pings."""

    protocol_version: Count
    client: Name = ""


class SessionOpened(Struct, array_like=True, tag="session_opened", frozen=True):
    """Comes with the descriptors of the pool and of the index table (read only).

    `token` greets the depot on every connection of this session to the control socket.
    """

    epoch: int
    token: bytes
    pool_size_bytes: int
    table_size_bytes: int
    server_version: str


SessionReply = SessionOpened | ErrorReply

MOVER_NOTE: Final = b"m"
"""A byte from the server with a descriptor: the pidfd of a mover that was started for a context of this session."""

# --- frames ---------------------------------------------------------------------------------------------------------

LENGTH: Final = struct.Struct("<I")
"""Stands before a greeting and before each frame on the control socket."""

TOKEN_BYTES: Final = 16

_SEQUENCE = struct.Struct("<Q")
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_session_request_decoder = msgspec.msgpack.Decoder(OpenSession)
_session_reply_decoder: msgspec.msgpack.Decoder[SessionReply] = msgspec.msgpack.Decoder(SessionReply)

OPERATIONS: Final = frozenset(struct_type.__struct_config__.tag for struct_type in Request.__args__)


def operation_of(kind: type[Any]) -> str:
    """Return the tag of a request or a reply."""
    return kind.__struct_config__.tag


class FrameError(Exception):
    """A frame that is not a request; `code` and the text go into the error reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode_greeting(token: bytes) -> bytes:
    """Return what begins a connection to the control socket: the token of a session, or nothing for an operator."""
    return LENGTH.pack(len(token)) + token


def encode_frame(sequence: int, message: Request | Reply) -> bytearray:
    """Return the frame of a request or a reply."""
    frame = bytearray(_SEQUENCE.size)
    _SEQUENCE.pack_into(frame, 0, sequence)
    _encoder.encode_into(message, frame, _SEQUENCE.size)
    return frame


def sequence_of(frame: bytes | memoryview) -> int:
    """Return the sequence number of a frame, 0 when it has none."""
    return _SEQUENCE.unpack_from(frame)[0] if len(frame) >= _SEQUENCE.size else 0


def decode_request(frame: bytes | memoryview) -> Request:
    """Return the request in a frame.

    Raises:
        FrameError: it is none, its operation is unknown, or a field is out of range.
    """
    if len(frame) < _SEQUENCE.size:
        raise FrameError(ErrorCode.MALFORMED, f"a frame of {len(frame)} bytes has no sequence number")
    body = memoryview(frame)[_SEQUENCE.size :]
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        tag = _tag_of(body)
        if tag is not None and tag not in OPERATIONS:
            message = f"operation {tag[:64]!r} is not known to this server (protocol {PROTOCOL_VERSION})"
            raise FrameError(ErrorCode.UNKNOWN_OPERATION, message) from error
        raise FrameError(ErrorCode.MALFORMED, f"{tag or 'message'}: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a message: {error}") from error


def _tag_of(body: memoryview) -> str | None:
    try:
        fields = msgspec.msgpack.decode(body, type=list[msgspec.Raw])  # not objects: a map may have keys that cannot be
        return msgspec.msgpack.decode(fields[0], type=str) if fields else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Return the reply in a frame that a server sent.

    Raises:
        FrameError: it is none.
    """
    try:
        return _reply_decoder.decode(memoryview(frame)[_SEQUENCE.size :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a reply: {error}") from error


def encode_session(message: OpenSession | SessionReply) -> bytes:
    """Return a message of the session socket, with its length (u32, little-endian) before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def decode_open_session(body: bytes) -> OpenSession:
    """Return the first message of a client on the session socket.

    Raises:
        FrameError: it is none.
    """
    try:
        return _session_request_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a session request: {error}") from error


def decode_session_reply(body: bytes) -> SessionReply:
    """Return the server's answer on the session socket.

    Raises:
        FrameError: it is none.
    """
    try:
        return _session_reply_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FrameError(ErrorCode.MALFORMED, f"not a session reply: {error}") from error


def check_protocol_version(version: int) -> str | None:
    """Return why a peer of this version cannot be served, in one line for both logs, or None."""
    if MINIMUM_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        return None
    return (
        f"the client speaks protocol {version}, this server {MINIMUM_PROTOCOL_VERSION} to {PROTOCOL_VERSION}:"
        " install the same version of kvdepot on both sides"
    )
