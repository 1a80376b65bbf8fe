"""Cuts a batch of copies into moves: of as many blocks as fit the staging memory, or of one of a few fixed sizes.

Fixed sizes (buckets) are for devices that compile a graph for each new shape. Pure: numbers in, numbers out.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import EXTENT_DTYPE
from kvdepot.kvcache import CopyBatch
from kvdepot.layout import LayerGroup, Part, heads_of_both, layers_of_both

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def bucket_sizes(block_size_bytes: int, staging_bytes: int, max_blocks: int) -> tuple[int, ...]:
    """Return the sizes of moves in blocks: 1, 2, 4, ... up to `max_blocks` and the staging memory."""
    sizes = [1]
    while sizes[-1] * 2 <= max_blocks and sizes[-1] * 2 * block_size_bytes <= staging_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def cut(num_blocks: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield `(blocks, bucket)` until `num_blocks` are moved; buckets are powers of two up to `largest`, also one.

    A bucket is padded by at most a quarter of its size. If more is missing, the next smaller bucket comes first.
    """
    while num_blocks:
        bucket = min(largest, 1 << (num_blocks - 1).bit_length())
        if num_blocks < bucket and num_blocks * 4 < bucket * 3:
            bucket //= 2
        blocks = min(num_blocks, bucket)
        yield blocks, bucket
        num_blocks -= blocks


def cut_exactly(num_blocks: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield `(blocks, blocks)` until `num_blocks` are moved."""
    for start in range(0, num_blocks, largest):
        blocks = min(largest, num_blocks - start)
        yield blocks, blocks


@dataclass(frozen=True, slots=True)
class PageRun:
    """`num_pages` neighbouring pages of one size, `(rows, num_heads, head_bytes)` each, of a worker with `num_heads`.

    They begin `start` bytes after the beginning of a block's first page.
    """

    start: int
    num_pages: int
    rows: int
    num_heads: int
    head_bytes: int

    def of(self, memory: Bytes, num_blocks: int) -> Bytes:
        """Return a view of these pages in `memory`, which holds all pages of `num_blocks` blocks, page after page.

        The shape is `(num_pages, num_blocks, rows, num_heads, head_bytes)`.
        """
        first = self.start * num_blocks
        shape = self.num_pages, num_blocks, self.rows, self.num_heads, self.head_bytes
        return memory[first : first + math.prod(shape)].reshape(shape)

    def cut(self, pages: range, layer_bytes: int, mine: Part, theirs: Part) -> "PageRun":
        """Return some of these pages as they lie in blocks of another part, with the heads of that part.

        Args:
            pages: the pages of this run to return.
            layer_bytes: this worker's bytes of one block in one layer.
            mine: this worker's part.
            theirs: the other part, which has the layers of these pages.
        """
        page_bytes = self.rows * self.num_heads * self.head_bytes
        # Between pipeline stages, the same layer begins elsewhere in a block: else another layer's bytes were read.
        start = self.start + pages.start * page_bytes + (mine.first_layer - theirs.first_layer) * layer_bytes
        start = start // self.num_heads * theirs.num_heads
        return PageRun(start, len(pages), self.rows, theirs.num_heads, self.head_bytes)


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """The facts about a layer group that a move needs."""

    part: Part
    page_sizes_bytes: tuple[int, ...]
    page_runs: tuple[PageRun, ...]
    blocks_per_chunk: int
    largest: int  # blocks that are moved at once, at most
    buckets: tuple[int, ...]  # all sizes of moves, empty if any size will do

    @classmethod
    def of(
        cls, group: LayerGroup, chunk_tokens: int, staging_bytes: int, max_blocks: int, *, in_buckets: bool
    ) -> "StagedGroup":
        """Return the shape of a layer group."""
        sizes = tuple(page.page_size_bytes for page in group.pages)
        runs: list[PageRun] = []
        start = 0
        for size, pages in itertools.groupby(sizes):
            num_pages = sum(1 for _ in pages)
            heads = group.part.num_heads
            runs.append(PageRun(start, num_pages, group.rows, heads, size // (group.rows * heads)))
            start += num_pages * size
        buckets = bucket_sizes(start, staging_bytes, max_blocks) if in_buckets else ()
        largest = buckets[-1] if buckets else max(1, min(max_blocks, staging_bytes // start))
        return cls(group.part, sizes, tuple(runs), group.blocks_per_chunk(chunk_tokens), largest, buckets)

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all pages."""
        return sum(self.page_sizes_bytes)

    def cut(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Yield `(blocks, size of the move)` until `num_blocks` are moved."""
        return cut(num_blocks, self.largest) if self.buckets else cut_exactly(num_blocks, self.largest)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a move that belong to one extent."""

    offset: int  # of the extent in the pool
    part: Part  # of the extent
    places: Any  # within the chunk: a slice, or an array of indices
    blocks: slice  # within the move


@dataclass(frozen=True, slots=True)
class StagedMove:
    """Blocks of one group that move together, in a buffer for `bucket` blocks, page after page like an extent."""

    group: int
    bucket: int
    block_ids: Ids  # (at most bucket,)
    pieces: tuple[Piece, ...]

    def to_pool(self, shape: StagedGroup, staged: Bytes, pool: Bytes) -> None:
        """Copy a filled buffer to the extents: one numpy copy for each chunk and run of pages, without the GIL."""
        for piece in self.pieces:
            for run in shape.page_runs:
                chunk = run.of(pool[piece.offset :], shape.blocks_per_chunk)
                chunk[:, piece.places] = run.of(staged, self.bucket)[:, piece.blocks]

    def from_pool(self, shape: StagedGroup, staged: Bytes, pool: Bytes) -> None:
        """Copy the extents to a buffer; from extents of other parts, only the layers and heads that this worker has."""
        mine, of_layer = shape.part, len(shape.page_sizes_bytes) // shape.part.num_layers
        layer_bytes = sum(shape.page_sizes_bytes[:of_layer])
        for piece in self.pieces:
            theirs, both = piece.part, heads_of_both(mine, piece.part)
            here, there = (slice(both.start - each, both.stop - each) for each in (mine.first_head, theirs.first_head))
            layers, first = layers_of_both(mine, theirs), 0
            begin, end = ((each - mine.first_layer) * of_layer for each in (layers.start, layers.stop))
            for run in shape.page_runs:
                pages = range(max(begin - first, 0), min(end - first, run.num_pages))
                first += run.num_pages
                if pages:
                    part = run.cut(pages, layer_bytes, mine, theirs).of(pool[piece.offset :], shape.blocks_per_chunk)
                    buffer = run.of(staged, self.bucket)[pages.start : pages.stop]
                    buffer[:, piece.blocks, :, here] = part[:, piece.places, :, there]

    def pad(self, shape: StagedGroup, staged: Bytes) -> None:
        """Repeat the last block up to the bucket: a scatter that names a block twice must write the same bytes."""
        count = len(self.block_ids)
        for run in shape.page_runs if count < self.bucket else ():
            blocks = run.of(staged, self.bucket)
            blocks[:, count:] = blocks[:, count - 1 : count]


def moves(batch: CopyBatch, shapes: Sequence[StagedGroup]) -> Iterator[StagedMove]:
    """Yield the blocks to move, group by group, each once; skip unwanted ones."""
    records = np.frombuffer(batch.extents, EXTENT_DTYPE)
    for number, shape in enumerate(shapes):
        mine = records[records["group"] == number]
        if not len(mine):
            continue
        # A chunk has several extents if other workers stored parts of it. Its blocks are moved with all of them.
        mine = mine[np.argsort(mine["chunk"], kind="stable")]
        chunks, firsts = np.unique(mine["chunk"].astype(np.int64), return_index=True)
        extents = np.split(mine, firsts[1:])
        per_chunk = shape.blocks_per_chunk
        rows = (chunks - batch.first_covered[number])[:, None] * per_chunk
        ids = np.asarray(batch.block_ids[number], np.int64)[rows + np.arange(per_chunk)]
        wanted = (chunks > 0)[:, None] | (np.arange(per_chunk) >= batch.skip_blocks[number])
        wanted &= ids >= 0  # not NO_BLOCK
        owners, places = np.nonzero(wanted)
        block_ids = ids[wanted]
        start = 0
        for count, bucket in shape.cut(len(block_ids)):
            stop = start + count
            pieces = tuple(_pieces(extents, owners[start:stop], places[start:stop]))
            yield StagedMove(number, bucket, block_ids[start:stop], pieces)
            start = stop


def _pieces(extents: Sequence[Any], owners: npt.NDArray[Any], places: npt.NDArray[Any]) -> Iterator[Piece]:
    """Yield the pieces of the blocks at `places` of the chunks `owners`; `extents` has each chunk's extents."""
    bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    for start, stop in itertools.pairwise(bounds):
        first, last = int(places[start]), int(places[stop - 1])
        is_run = last - first == stop - 1 - start
        of_chunk = slice(first, last + 1) if is_run else places[start:stop]
        for extent in extents[owners[start]]:
            part = Part.of(int(extent["layers"]) << 16 | int(extent["heads"]))
            yield Piece(int(extent["offset"]), part, of_chunk, slice(start, stop))
