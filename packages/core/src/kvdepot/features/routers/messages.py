"""Requests of engines whose routers follow the depot, and their replies. `docs/wire.md` describes the fate of each."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from kvdepot.keys import DIGEST_BYTES
from kvdepot.wire.messages import ChunkNumber, ContextRequest, Count, Digest, Identifier, Name
from kvdepot.wire.operation import Reply

MAXIMUM_DESCRIBED_CHUNKS: Final = 256  # per request
MAXIMUM_DESCRIBED_TOKENS: Final = 1 << 16  # per request, unless one chunk has more


class DescribedGroup(Struct, array_like=True, frozen=True):
    """A KV cache group as routers know it: the engine's number for it, its kind, and its window in tokens."""

    number: Count
    kind: Name = ""
    window_tokens: Count = 0  # 0: none


ExtraKey = str | int | tuple[str | int, ...]
"""One further input to a block's id, as the engine publishes it: an adapter, an item with its offset, a salt."""


class DescribeChunks(ContextRequest, tag="describe_chunks", frozen=True):
    """Report the tokens that consecutive chunks hold, and the ids by which routers know their blocks.

    Only a depot that publishes events asks for this (`Registered.wants_tokens`). Chunks that are not in the pool are
    ignored.

    `namespace`: equal for engines that share chunks. `tokens`: u32, little-endian, of whole chunks. `block_ids`: u64,
    little-endian, one per block. `parent_id`: the id of the block before, empty before the first. `extra_keys`: one
    item per block, or empty if no block has any.
    """

    namespace: Digest
    digests: Annotated[bytes, Meta(max_length=MAXIMUM_DESCRIBED_CHUNKS * DIGEST_BYTES)]
    first_chunk: ChunkNumber
    tokens: Annotated[bytes, Meta(max_length=1 << 22)]
    block_ids: Annotated[bytes, Meta(max_length=1 << 20)]
    parent_id: Annotated[bytes, Meta(max_length=8)] = b""
    groups: Annotated[tuple[DescribedGroup, ...], Meta(max_length=64)] = ()
    lora_name: Name = ""
    extra_keys: Annotated[
        tuple[Annotated[tuple[ExtraKey, ...], Meta(max_length=64)] | None, ...], Meta(max_length=1 << 16)
    ] = ()


class AwaitNews(ContextRequest, tag="await_news", frozen=True):
    """Wait for news of a namespace: described chunks that appeared or left.

    `position` is the position of the last reply, or 0 to list everything. The reply comes with the first news, or after
    `wait_seconds`.
    """

    namespace: Digest
    position: Identifier = 0
    wait_seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0


class News(Reply, tag="news", frozen=True):
    """Events in the published form (msgpack of a list). The next request passes `position`.

    `is_start`: the events begin to list everything, so discard earlier news. `has_more`: ask again now.
    """

    position: int
    events: bytes
    is_start: bool = False
    has_more: bool = False
