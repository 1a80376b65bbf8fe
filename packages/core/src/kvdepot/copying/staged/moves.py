"""Cuts a batch of copies into moves: as many blocks as fit the staging memory, or one of a few fixed sizes.

Fixed sizes (buckets) are for devices that compile a graph for each new shape. Pure: numbers in, numbers out.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import EXTENT_DTYPE
from kvdepot.errors import LayoutError
from kvdepot.kvcache import CopyBatch
from kvdepot.layout import LayerGroup

Ids = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def bucket_sizes(block_size_bytes: int, staging_bytes: int, max_blocks: int) -> tuple[int, ...]:
    """Return the numbers of blocks that are moved at once: 1, 2, 4, ... as far as they fit the staging memory."""
    sizes = [1]
    while sizes[-1] * 2 <= max_blocks and sizes[-1] * 2 * block_size_bytes <= staging_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def cut(num_blocks: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield `(blocks, bucket)` until `num_blocks` are moved; buckets are powers of two up to `largest`, one too.

    A bucket is filled up with padding only if that is at most a quarter of it; else the rest is split.
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
    """Neighbouring pages of one size: `num_pages` of them, `start` bytes behind the first page of a block."""

    start: int
    num_pages: int
    page_size_bytes: int

    def of(self, memory: Bytes, num_blocks: int) -> npt.NDArray[np.uint8]:
        """Return these pages as `(num_pages, num_blocks, page_size_bytes)`, if `memory` has pages of as many blocks."""
        first = self.start * num_blocks
        size = self.num_pages * num_blocks * self.page_size_bytes
        return memory[first : first + size].reshape(self.num_pages, num_blocks, self.page_size_bytes)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The facts about a layer group that a move needs."""

    heads: int  # of the worker's part, as in extents
    page_sizes_bytes: tuple[int, ...]
    page_runs: tuple[PageRun, ...]
    blocks_per_chunk: int
    largest: int  # blocks that are moved at once, at most
    buckets: tuple[int, ...]  # all sizes of moves, empty if any size will do

    @classmethod
    def of(
        cls, group: LayerGroup, chunk_tokens: int, staging_bytes: int, max_blocks: int, *, in_buckets: bool
    ) -> "GroupShape":
        """Take it from the layout."""
        sizes = tuple(page.page_size_bytes for page in group.pages)
        runs: list[PageRun] = []
        start = 0
        for size in sizes:
            if runs and runs[-1].page_size_bytes == size:
                runs[-1] = PageRun(runs[-1].start, runs[-1].num_pages + 1, size)
            else:
                runs.append(PageRun(start, 1, size))
            start += size
        buckets = bucket_sizes(start, staging_bytes, max_blocks) if in_buckets else ()
        largest = buckets[-1] if buckets else max(1, min(max_blocks, staging_bytes // start))
        return cls(
            group.part.number & 0xFFFF, sizes, tuple(runs), group.blocks_per_chunk(chunk_tokens), largest, buckets
        )

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all pages."""
        return sum(self.page_sizes_bytes)

    def cut(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Yield `(blocks, size of the move)` until `num_blocks` are moved."""
        return cut(num_blocks, self.largest) if self.buckets else cut_exactly(num_blocks, self.largest)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a move that belong to one chunk."""

    offset: int  # of its extent in the pool
    places: Any  # within the chunk: a slice, or an array of indices
    rows: slice  # within the move


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks of one group that go together, in a buffer for `bucket` blocks, page after page like an extent."""

    group: int
    bucket: int
    block_ids: Ids  # (at most bucket,)
    pieces: tuple[Piece, ...]

    def to_pool(self, shape: GroupShape, staged: Bytes, pool: Bytes) -> None:
        """Copy a filled buffer to the extents: one numpy copy for each chunk and run of pages, the GIL released."""
        for piece in self.pieces:
            for run in shape.page_runs:
                chunk = run.of(pool[piece.offset :], shape.blocks_per_chunk)
                chunk[:, piece.places] = run.of(staged, self.bucket)[:, piece.rows]

    def from_pool(self, shape: GroupShape, staged: Bytes, pool: Bytes) -> None:
        """Copy extents to a buffer, the other way round."""
        for piece in self.pieces:
            for run in shape.page_runs:
                chunk = run.of(pool[piece.offset :], shape.blocks_per_chunk)
                run.of(staged, self.bucket)[:, piece.rows] = chunk[:, piece.places]

    def pad(self, shape: GroupShape, staged: Bytes) -> None:
        """Repeat the last block up to the bucket: a scatter that names a block twice must write the same bytes."""
        count = len(self.block_ids)
        for run in shape.page_runs if count < self.bucket else ():
            rows = run.of(staged, self.bucket)
            rows[:, count:] = rows[:, count - 1 : count]


def moves(batch: CopyBatch, shapes: Sequence[GroupShape]) -> Iterator[Move]:
    """Yield the blocks to move, group by group, each once; skip unwanted ones.

    Raises:
        LayoutError: an extent of another part, which staged copies cannot cut.
    """
    records = np.frombuffer(batch.extents, EXTENT_DTYPE)
    for number, shape in enumerate(shapes):
        mine = records[records["group"] == number]
        if not len(mine):
            continue
        if (mine["heads"] != shape.heads).any():
            raise LayoutError(f"extents of group {number} that have other heads than this worker")
        per_chunk = shape.blocks_per_chunk
        chunks = mine["chunk"].astype(np.int64)
        rows = (chunks - batch.first_covered[number])[:, None] * per_chunk
        ids = np.asarray(batch.block_ids[number], np.int64)[rows + np.arange(per_chunk)]
        wanted = (chunks > 0)[:, None] | (np.arange(per_chunk) >= batch.skip_blocks[number])
        wanted &= ids >= 0  # not NO_BLOCK
        extents, places = np.nonzero(wanted)
        block_ids = ids[wanted]
        start = 0
        for count, bucket in shape.cut(len(block_ids)):
            stop = start + count
            yield Move(
                number,
                bucket,
                block_ids[start:stop],
                tuple(_pieces(mine["offset"], extents[start:stop], places[start:stop])),
            )
            start = stop


def _pieces(offsets: npt.NDArray[Any], extents: npt.NDArray[Any], places: npt.NDArray[Any]) -> Iterator[Piece]:
    bounds = [0, *(np.flatnonzero(np.diff(extents)) + 1).tolist(), len(extents)]
    for start, stop in itertools.pairwise(bounds):
        first, last = int(places[start]), int(places[stop - 1])
        is_run = last - first == stop - 1 - start
        yield Piece(
            int(offsets[extents[start]]), slice(first, last + 1) if is_run else places[start:stop], slice(start, stop)
        )
