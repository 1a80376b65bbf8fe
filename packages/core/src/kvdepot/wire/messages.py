"""Requests of engines that every depot answers, their replies, and the shapes of caches in both.

Every request gets exactly one reply with the same sequence number (`kvdepot.wire.frames`), and every reply contains the
server's epoch. New fields are added only at the end and with a default. A peer ignores fields that it does not know.
`docs/wire.md` describes the fate of each message when either side dies.

A new request of a registered worker or scheduler needs a `ContextRequest` here and a handler in `kvdepot.server.depot`,
or both in a feature, which names its module of requests in the entry point group `kvdepot.messages`.

No message carries KV bytes. Extents travel as packed `EXTENT` records, without an object per block.
"""

import enum
import struct
from typing import Annotated, Final

from msgspec import Meta, Struct

from kvdepot.errors import ErrorCode
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import MAXIMUM_CELLS, MAXIMUM_HEADS, CacheLayout, GroupKind
from kvdepot.wire.operation import Operation, Reply

PROTOCOL_VERSION: Final = 1  # raised by changes that the release before cannot read; new fields and messages are none
OLDEST_PROTOCOL_VERSION: Final = 1  # of the release before, which both sides still speak
MAXIMUM_CHUNKS: Final = 65_536  # per lookup: 4 million tokens in chunks of 64
# Entries per request in all groups together; a single chunk may exceed them. A request at its bound takes the server
# about half a millisecond.
MAXIMUM_STORE_ENTRIES: Final = 32  # if each evicts another entry
MAXIMUM_RETRIEVE_ENTRIES: Final = 128
MAXIMUM_RETRIEVE_EXTENTS: Final = 4096  # per reply: a chunk may have one extent per head of another engine's workers
MAXIMUM_ALLOCATIONS: Final = 4096  # per worker

EXTENT: Final = struct.Struct("<IHHIIQQQ")
"""One extent, 40 bytes: chunk (counted from the run's first) u32, group u16, heads of the part u16, entry u32, layers
of the part u32, header u64 (the record's generation and state while the extent is valid), offset in the pool u64,
payload bytes u64. `kvdepot.layout.Part` has heads and layers in the lower 16 and upper 32 bits of its number."""

_U32 = (1 << 32) - 1
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=_U32)]
ChunkNumber = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # the index stores the last chunk of a run as u32
Identifier = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digests = Annotated[bytes, Meta(max_length=MAXIMUM_CHUNKS * DIGEST_BYTES)]
BatchDigests = Annotated[bytes, Meta(max_length=MAXIMUM_RETRIEVE_ENTRIES * DIGEST_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
BlockIdBytes = Annotated[bytes, Meta(max_length=1 << 20)]  # packed block ids: i32, little-endian


class Verify(enum.StrEnum):
    """Which entries of the pool have a checksum that is compared at each retrieve."""

    OFF = "off"  # no checksums
    SAMPLE = "sample"  # every entry has one; one chunk of `VERIFY_ONE_IN` is compared
    ALL = "all"


VERIFY_ONE_IN: Final = 16  # damage to a whole region is found at once, at a sixteenth of the cost of all
CHECKSUM_BYTES: Final = 16  # XXH3-128 of an extent's payload; zeros for none


class GroupShape(Struct, array_like=True, frozen=True):
    """The properties of a layer group that are equal for all ranks and the scheduler."""

    kind: GroupKind
    row_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]  # per row of a page; the number of rows differs between workers
    window_tokens: Count = 0
    layers: Annotated[int, Meta(ge=1, le=MAXIMUM_CELLS)] = 1  # in the plane (`kvdepot.layout.Plane`)
    heads: Annotated[int, Meta(ge=1, le=MAXIMUM_HEADS)] = 1


class CacheSpec(Struct, array_like=True, frozen=True):
    """The part of a cache's layout that determines sharing: equal specs share one space of entries."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    groups: Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=64)]
    dtype: Name
    format: Name = ""


def spec_of(layout: CacheLayout) -> CacheSpec:
    """Return the shared part of a worker's layout."""
    groups = tuple(GroupShape(g.kind, g.row_tokens, g.window_tokens, *g.plane) for g in layout.groups)
    return CacheSpec(layout.chunk_tokens, groups, layout.dtype, layout.format)


class GroupDetail(Struct, array_like=True, frozen=True):
    """One layer group of one worker. The server uses the sizes; the rest is for operators."""

    page_sizes_bytes: Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 40)], ...], Meta(min_length=1, max_length=4096)]
    num_blocks: Annotated[int, Meta(ge=1, le=_U32)]
    part: Annotated[int, Meta(ge=0, lt=1 << 48)] = 0  # number of a `kvdepot.layout.Part`
    physical_block_tokens: Count = 0  # 0: the same as the logical block
    compress_ratio: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    num_layers: Count = 0
    hidden_dims: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()  # per token in one layer
    dtype: Name = ""
    is_mla: bool = False
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()  # of the tensor of one layer
    attention_backend: Name = ""
    rows: Annotated[int, Meta(ge=1, le=_U32)] = 1  # per page, each with all heads of the part


class PagePlace(Struct, array_like=True, frozen=True):
    """The location of one page's blocks: block `i` starts `offset + i * stride_bytes` into an allocation."""

    allocation: Count  # index in the offer
    offset: Identifier
    stride_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]


class MoverOffer(Struct, array_like=True, frozen=True):
    """A worker's device memory, which a mover of the depot can open."""

    mover: Name  # an entry point of the group `kvdepot.movers`
    device: Name  # a name that identifies the device in every process
    allocations: Annotated[
        tuple[Annotated[bytes, Meta(min_length=1, max_length=256)], ...],
        Meta(min_length=1, max_length=MAXIMUM_ALLOCATIONS),
    ]  # handles, all different
    pages: Annotated[
        tuple[Annotated[tuple[PagePlace, ...], Meta(min_length=1, max_length=4096)], ...],
        Meta(min_length=1, max_length=64),
    ]  # by group, then by page


class HelloReply(Reply, tag="hello_reply", frozen=True):
    """The server's versions and process."""

    protocol_version: int
    server_version: str
    pid: int


class Hello(Operation[HelloReply], tag="hello", frozen=True):
    """Ask for the server's version and process. Needs no session."""

    protocol_version: Count
    client: Name = ""


class RegisterKVCache(Struct, array_like=True, tag="register_kv_cache", frozen=True):
    """Register a worker's KV cache: one struct for every device.

    A worker registers only after all copies of its earlier sessions have ended. The depot then frees the unfinished
    extents of earlier sessions of the same process, instance and rank.
    """

    protocol_version: Count
    instance: Name
    rank: Annotated[int, Meta(ge=0, le=65535)]
    world_size: Annotated[int, Meta(ge=1, le=65536)]
    device: Name
    transfer_mode: Name
    model: Text
    spec: CacheSpec
    details: Annotated[tuple[GroupDetail, ...], Meta(min_length=1, max_length=64)]
    offer: MoverOffer | None = None  # None: the worker copies by itself
    fallback: Text = ""  # the reason, if the worker asked for another mode


class RegisterScheduler(Struct, array_like=True, tag="register_scheduler", frozen=True):
    """Register a scheduler for lookups in caches of this spec.

    `remark` is a line for operators, which the status shows. `served_model` is the model's name in requests, "" if the
    engine can report no tokens of chunks. `weights` is the engine's `kvdepot.keys.Namespace.weights`, or "" if it has
    none.
    """

    protocol_version: Count
    instance: Name
    model: Text
    spec: CacheSpec
    remark: Text = ""
    served_model: Text = ""
    weights: Text = ""


class ContextRequest(Struct, array_like=True, frozen=True):
    """A request of a registered worker or scheduler: its `Registered.context` comes first."""

    context: Identifier


class ChangeWeights(ContextRequest, tag="change_weights", frozen=True):
    """Report that a scheduler's engine computes with these weights from now on, as in `RegisterScheduler`."""

    weights: Text


class Unregister(ContextRequest, tag="unregister", frozen=True):
    """End a context with its leases and unfinished stores. Sent only when no copy is running."""


class Lookup(ContextRequest, tag="lookup", frozen=True):
    """Lease the longest usable prefix of the given chunks, from chunk 0 on, for a request.

    If the pool has only part of it, the depot promotes the rest from the tiers, and the reply may come `wait_seconds`
    later. `token_seconds` is the engine's time to compute one prompt token, 0 for unknown. A tier is not read if that
    would be slower. Each retrieved token counts as this much time saved.

    `announces`: the engine is about to compute and store the missing chunks, after `ahead_tokens` other tokens.
    `joins`: wait up to `wait_seconds` for chunks that another lookup has announced (single flight).
    `awaits`: an engine, perhaps of another node, computes the first `awaits` chunks for this request. If the depot has
    tiers, wait up to `wait_seconds` until the chunks arrive through them.
    `hands_over`: another engine waits for the chunks that this request stores. Write them to the tiers first.
    `peer`: the depot that has the missing chunks, as its router says: a name of `--peer`, or HOST:PORT,
    which `--peer-hints` must allow.
    """

    request_id: Text
    digests: Digests
    tenant: Name = ""
    wait_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    token_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    announces: bool = False
    ahead_tokens: Count = 0
    joins: bool = False
    awaits: Count = 0
    hands_over: bool = False
    peer: Name = ""


class Release(ContextRequest, tag="release", frozen=True):
    """Release leases. Leases that no longer exist are ignored."""

    leases: Annotated[tuple[Identifier, ...], Meta(max_length=4096)]


class EndRequest(ContextRequest, tag="end_request", frozen=True):
    """Release all leases of a request of this context, and withdraw the announcement of its lookup."""

    request_id: Text


class PrepareStore(ContextRequest, tag="prepare_store", frozen=True):
    """Request space for the missing chunks of a run.

    `covered` has, for each group, the number of chunks at the end of the run that the worker can store: all of them for
    full attention, only the remaining ones for a window.
    """

    request_id: Text
    tenant: Name
    digests: BatchDigests
    first_chunk: ChunkNumber
    parent: Digest
    covered: Annotated[tuple[Count, ...], Meta(max_length=64)]


class CommitStore(ContextRequest, tag="commit_store", frozen=True):
    """Commit a ticket. All of its bytes are in place.

    `checksums` has `CHECKSUM_BYTES` for each extent of the plan, in order, or is empty.
    """

    ticket: Identifier
    checksums: Annotated[bytes, Meta(max_length=64 * CHECKSUM_BYTES)] = b""


class AbortStore(ContextRequest, tag="abort_store", frozen=True):
    """Abort a ticket after the last write. A ticket that no longer exists is ignored."""

    ticket: Identifier


class PrepareRetrieve(ContextRequest, tag="prepare_retrieve", frozen=True):
    """Lease the leading chunks of a run that are in the pool, and request their extents.

    `covered` has, for each group, the number of wanted chunks at the end of the run.
    """

    request_id: Text
    digests: BatchDigests
    first_chunk: ChunkNumber
    covered: Annotated[tuple[Count, ...], Meta(max_length=64)]


class Move(ContextRequest, tag="move", frozen=True):
    """Make the context's mover copy the extents of a ticket (a store) or of a lease (a retrieve).

    With `number` 0, nothing is copied, and the reply comes when the mover is ready. `wait_seconds` bounds the wait for
    a mover that is still starting. `block_ids`, `first_covered` and `skip_blocks` are as in
    `kvdepot.backends.CopyBatch`, for each group. A context has at most one move per direction under way.
    """

    number: Identifier
    is_store: bool = False
    block_ids: Annotated[tuple[BlockIdBytes, ...], Meta(max_length=64)] = ()
    first_covered: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    skip_blocks: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    wait_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class ReportCorrupt(ContextRequest, tag="report_corrupt", frozen=True):
    """Report entries with a checksum mismatch: the `(entry, header)` of each, as in its extent."""

    entries: Annotated[tuple[tuple[Count, int], ...], Meta(max_length=MAXIMUM_RETRIEVE_ENTRIES)]


class ErrorReply(Reply, tag="error", frozen=True):
    """The request was refused and changed nothing."""

    code: ErrorCode
    message: str


class Registered(Reply, tag="registered", frozen=True):
    """The id of a new context for its further requests, and the checksums that its worker must verify.

    The depot answers a `Move` within its `wait_seconds` plus `move_seconds`. `wants_tokens`: the depot
    wants to know the tokens of chunks.
    """

    context: int
    verify: Verify = Verify.OFF
    move_seconds: float = 0.0
    wants_tokens: bool = False


class Done(Reply, tag="done", frozen=True):
    """The request was carried out and affected `count` objects."""

    count: int = 0


class LookupReply(Reply, tag="lookup_reply", frozen=True):
    """The first `num_chunks` chunks are in the pool and leased as `lease` for `lease_seconds`. 0 chunks have lease 0.

    The depot waited `waited_seconds` for tiers and other engines. Another engine is still computing the next
    `num_pending` chunks: ask again to wait for them. Tiers brought `num_promoted` of the chunks meanwhile.
    `wants_tokens`: the depot does not know the tokens of some of the chunks.
    """

    num_chunks: int
    lease: int
    lease_seconds: float = 0.0
    waited_seconds: float = 0.0
    num_pending: int = 0
    num_promoted: int = 0
    wants_tokens: bool = False


class StorePlan(Reply, tag="store_plan", frozen=True):
    """The extents to write. Without missing chunks the ticket is 0.

    `extents` are packed `EXTENT` records. `num_present` entries are already in the pool or being stored by another
    worker. For `num_declined` entries there was no room.
    """

    ticket: int
    extents: bytes
    num_present: int
    num_declined: int


class RetrievePlan(Reply, tag="retrieve_plan", frozen=True):
    """The extents of the run's first `num_chunks` chunks to read, leased as `lease` until released."""

    lease: int
    num_chunks: int
    extents: bytes


class MoveOutcome(enum.StrEnum):
    """The outcome of a `Move`."""

    DONE = "done"
    FAILED = "failed"  # a miss: no copy for it is running any more
    UNAVAILABLE = "unavailable"  # a miss, and there will be no mover: the worker copies by itself, or not at all


class Moved(Reply, tag="moved", frozen=True):
    """The end of a copy, done or failed. No process accesses its extents and blocks any more."""

    outcome: MoveOutcome
    why: str = ""
    is_warm: bool = False  # whether the mover has warmed up, so that later copies will not be faster


def check_protocol_version(version: int) -> str | None:
    """Return the reason, in one line for both logs, to refuse a peer of this version. None if it is supported."""
    if OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION:
        return None
    spoken = " and ".join(map(str, range(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION + 1)))
    return (
        f"the client speaks protocol {version}, this depot {spoken}: install versions of kvdepot on both sides that are"
        " at most one release apart"
    )
