"""What engines ask of a depot, and what it answers; the shapes of caches in both.

Every request gets exactly one reply with the same sequence number (`kvdepot.wire.frames`), and every reply names the
server's epoch. A peer adds fields only at the end, with a default, and ignores fields that it does not know.
`docs/wire.md` says what becomes of each message when either side dies.

No message carries KV bytes. Extents travel as packed `EXTENT` records, without an object for each block.
"""

import enum
import struct
from typing import Annotated, Final

from msgspec import Meta, Struct

from kvdepot.errors import ErrorCode
from kvdepot.layout import CacheLayout, GroupKind

PROTOCOL_VERSION: Final = 2
MINIMUM_PROTOCOL_VERSION: Final = 2  # before, the control socket spoke ZeroMQ
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
    be starting. `block_ids`, `first_covered` and `skip_blocks` are as in `kvdepot.backends.CopyBatch`, for each
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


def check_protocol_version(version: int) -> str | None:
    """Return why a peer of this version cannot be served, in one line for both logs, or None."""
    if MINIMUM_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        return None
    return (
        f"the client speaks protocol {version}, this server {MINIMUM_PROTOCOL_VERSION} to {PROTOCOL_VERSION}:"
        " install the same version of kvdepot on both sides"
    )
