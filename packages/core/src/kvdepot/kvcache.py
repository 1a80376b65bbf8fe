"""One worker's KV cache, as an engine passes it to a backend, and the batches to copy."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvdepot.layout import (
    ONE_CELL,
    THAT_CELL,
    CacheLayout,
    GroupKind,
    LayerGroup,
    PageLayout,
    Part,
    Plane,
    default_chunk_tokens,
)
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import PROTOCOL_VERSION, GroupDetail, RegisterKVCache, spec_of

WORKER_DRIVEN: Final = "worker-driven"

BlockIds = Sequence[Sequence[int]]
"""Block ids of a run of chunks, one sequence for each layer group, in token order.

A sequence may cover fewer chunks than the run. Then it covers the *last* chunks: a sliding window keeps only the end of
a prefix, a recurrent group one state for its last chunks. It always covers whole chunks, each by the last
`blocks_per_chunk` of its blocks. In a retrieve, `NO_BLOCK` stands for a block that is not wanted: one before the
window, in the first chunk that the window reaches."""

NO_BLOCK: Final = -1


class Direction(enum.IntEnum):
    """The direction of a copy. The numbers index pairs: one stream per direction, for example."""

    STORE = 0  # from the device to the pool
    RETRIEVE = 1


class TokenLayout(NamedTuple):
    """The places of K and V of a token in the pages of a layer.

    K lies in rows of neighbouring tokens; each row interleaves `k_lanes` neighbouring dims. A row is as long as a tile,
    which may be the block. V lies in rows of `v_group_dims` neighbouring dims; each row interleaves `v_lanes`
    neighbouring tokens, and the row of the next tokens follows. Offsets are from the start of a block. Offsets and
    strides are in elements. `move_tokens.c` reads the same fields.
    """

    item_bytes: int
    is_bfloat16: bool
    block_stride: int
    heads: int
    k_offset: int
    k_head_stride: int
    k_row_stride: int
    k_dims: int
    k_lanes: int  # 1, or 2 of bfloat16
    k_tile_tokens: int
    k_tile_stride: int
    v_offset: int
    v_head_stride: int
    v_dims: int
    v_lanes: int  # 1, or 2 of two bytes each
    v_group_dims: int
    v_group_stride: int
    pairs: int  # of dims to turn: the first `2 * pairs` dims of K
    pair_row_stride: int  # from the row of a pair's first dim to that of the next `k_lanes` pairs
    member_stride: int  # from the first dim of a pair to the second


MoveTokens = Callable[[Sequence[int], Any, TokenLayout, Any, bool], None]
"""Moves slices of tokens in several layers.

Args: the address of each layer's pages; the slices, `(n, 5)`: from block, from offset, to block, to offset, length in
tokens, each within one block; the layout; the cosines and sines of the turn, `(2, layout.pairs)`; whether the slices
all stay in place and only turn. Otherwise some slices may stay in place, and a slot of the others is not both source
and target.
"""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One layer group of an engine's KV cache.

    `tensors` has one tensor for each layer, or two: keys and values. Each is `(num_blocks, ...)`, on the backend's
    device: anything with `data_ptr`, `stride`, `element_size` and `shape`, and in host memory also anything with
    `__array_interface__`. Blocks may be padded or interleaved with those of other layers, but the bytes of one block of
    one tensor are contiguous. If they are not in the order of the tensor's dimensions, `KVCache.format` names the
    order. The other fields describe the group to the depot and its operator.

    A tensor's block is `(rows, heads of the part, bytes)`. Workers whose parts share heads read each other's entries.
    Give a plane of several heads only if a head's bytes in a row are the same whatever other heads lie beside it.
    """

    tensors: Sequence[Any]
    block_tokens: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    part: Part = THAT_CELL  # the part of the plane that this worker holds
    plane: Plane = ONE_CELL
    rows: int = 1
    num_layers: int = 0  # 0: one per tensor
    physical_block_tokens: int = 0  # 0: the same as the logical block
    compress_ratio: int = 1
    hidden_dims: tuple[int, ...] = ()
    is_mla: bool = False
    attention_backend: str = ""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The KV cache of one worker: its tensors, and the facts that the depot needs about them.

    All workers of an engine and its scheduler use the same `dtype`, `format` and `chunk_tokens`.
    """

    groups: Sequence[CacheGroup]  # the context keeps the tensors alive until `close`
    instance: str  # the engine's name
    dtype: str  # for example "bfloat16"
    rank: int = 0
    world_size: int = 1  # number of workers of the engine
    model: str = ""  # shown to operators
    format: str = ""  # the arrangement of bytes in a block: caches of different formats never share
    chunk_tokens: int | None = None  # None: `default_chunk_tokens`

    def layout(self, pages_of: Callable[[Any], PageLayout]) -> CacheLayout:
        """Return the layout of the blocks.

        Args:
            pages_of: returns the page layout of one tensor.

        Raises:
            LayoutError: the tensors do not fit their description.
        """
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None:
            sizes = (group.block_tokens for group in self.groups if group.kind is not GroupKind.RECURRENT)
            chunk_tokens = default_chunk_tokens(sizes)
        groups = tuple(
            LayerGroup(
                group.kind,
                group.block_tokens,
                tuple(map(pages_of, group.tensors)),
                group.window_tokens,
                group.part,
                group.plane,
                group.rows,
            )
            for group in self.groups
        )
        return CacheLayout(groups, chunk_tokens, self.dtype, self.format)

    def registration(self, layout: CacheLayout, device: str, mode: str = WORKER_DRIVEN) -> RegisterKVCache:
        """Return the message that registers this cache with a depot.

        Args:
            layout: from `layout`.
            device: shown to operators, for example "cuda:0".
            mode: the copying process; shown to operators.
        """
        details = tuple(self._detail(*each) for each in zip(self.groups, layout.groups, strict=True))
        return RegisterKVCache(
            PROTOCOL_VERSION,
            self.instance,
            self.rank,
            self.world_size,
            device,
            mode,
            self.model,
            spec_of(layout),
            details,
        )

    def _detail(self, group: CacheGroup, layer_group: LayerGroup) -> GroupDetail:
        shape: Sequence[int] = getattr(group.tensors[0], "shape", ())
        return GroupDetail(
            page_sizes_bytes=tuple(page.page_size_bytes for page in layer_group.pages),
            num_blocks=layer_group.num_blocks,
            part=group.part.number,
            rows=group.rows,
            physical_block_tokens=group.physical_block_tokens,
            compress_ratio=group.compress_ratio,
            num_layers=group.num_layers or len(group.tensors),
            hidden_dims=group.hidden_dims,
            dtype=self.dtype,
            is_mla=group.is_mla,
            shape=tuple(int(size) for size in shape)[:8],
            attention_backend=group.attention_backend,
        )


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Extents of the pool, and the engine's blocks that belong to them.

    `extents` are packed `EXTENT` records. Chunk `c` of group `g` is in the blocks
    `block_ids[g][(c - first_covered[g]) * blocks_per_chunk:]`. Do not copy the first `skip_blocks[g]` blocks of chunk
    0, nor blocks named `NO_BLOCK` (only retrieves have these).
    """

    mapping: PoolMemory
    extents: bytes
    block_ids: BlockIds
    first_covered: tuple[int, ...]
    skip_blocks: tuple[int, ...]
    grant_id: int = 0  # id of the ticket or lease
    with_checksums: bool = False  # whether a copier that can compute checksums on the way should return them
