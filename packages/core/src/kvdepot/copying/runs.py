"""Computes the runs of bytes that a batch moves, as columns of numbers: there is no Python object for each block.

For backends that copy by addresses. A **run** is `(address on the device, offset in the pool, bytes)`. Neighbours that
continue each other on both sides become one run, since drivers merge nothing and each run has a cost. No run crosses
the end of a device allocation: a driver may refuse that even if another allocation begins there. `split` also cuts runs
where a registered piece of the pool ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.kvcache import CopyBatch
from kvdepot.layout import CacheLayout, LayerGroup, PageLayout, Part, heads_of_both, layers_of_both
from kvdepot.wire.messages import EXTENT

Addresses = npt.NDArray[np.uint64]
EXTENT_DTYPE: Final = np.dtype(
    [
        ("chunk", "<u4"),
        ("group", "<u2"),
        ("heads", "<u2"),
        ("entry", "<u4"),
        ("layers", "<u4"),
        ("header", "<u8"),
        ("offset", "<u8"),
        ("num_bytes", "<u8"),
    ]
)
assert EXTENT_DTYPE.itemsize == EXTENT.size


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs as columns, `(num_runs,)` each."""

    blocks: Addresses  # addresses on the device
    offsets: Addresses  # in the pool
    sizes: Addresses  # bytes, none is 0

    def __len__(self) -> int:
        return len(self.sizes)

    def where(self, chosen: npt.NDArray[Any] | slice) -> "Runs":
        """Return some of the runs."""
        return Runs(self.blocks[chosen], self.offsets[chosen], self.sizes[chosen])


@dataclass(frozen=True, slots=True)
class Rows:
    """Pages whose rows are copied one by one, as columns, `(num_pages,)` each."""

    first: Runs  # the first row of each page
    num_rows: int
    block_steps: Addresses  # bytes on the device from one row to the next
    offset_steps: Addresses  # and in the pool

    def runs(self) -> Runs:
        """Return a run for every row."""
        rows = np.arange(self.num_rows, dtype=np.uint64)
        return Runs(
            (self.first.blocks[:, None] + rows * self.block_steps[:, None]).reshape(-1),
            (self.first.offsets[:, None] + rows * self.offset_steps[:, None]).reshape(-1),
            np.repeat(self.first.sizes, self.num_rows),
        )


class BatchRuns:
    """Turns batches of one cache into runs.

    `starts` are the addresses, in order, at which an allocation of the cache may begin: where a tensor begins outside
    every other tensor.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.starts = _starts_of([page for group in layout.groups for page in group.pages])
        self._layout = layout
        self._groups = [
            _GroupAddresses.of(group.pages, group.blocks_per_chunk(layout.chunk_tokens)) for group in layout.groups
        ]

    def of(self, batch: CopyBatch) -> Runs:
        """Return a run for every page of the batch, in the order of its extents.

        An extent of another part has runs for the layers that both parts have. If the parts have the same heads, a run
        is a whole page; otherwise it is the common heads in one row of a page.
        """
        pages, rows = self.in_rows(batch)
        return _joined([pages, *(each.runs() for each in rows)]) if rows else pages

    def in_rows(self, batch: CopyBatch) -> tuple[Runs, list[Rows]]:
        """Return the runs of whole pages, in the order of their extents, and the pages whose rows are copied."""
        records = np.frombuffer(batch.extents, EXTENT_DTYPE)
        pages: list[Runs] = []
        rows: list[Rows] = []
        for number in range(len(self._groups)):
            of_group = records if len(self._groups) == 1 else records[records["group"] == number]
            for group, mine in self._by_part(number, of_group):
                chunks = mine["chunk"].astype(np.int64)
                places = np.arange(group.blocks_per_chunk)
                blocks = (chunks - batch.first_covered[number])[:, None] * group.blocks_per_chunk
                ids = np.asarray(batch.block_ids[number], np.int64)[blocks + places]
                wanted = ids >= 0  # not NO_BLOCK
                if batch.skip_blocks[number]:
                    wanted &= (chunks > 0)[:, None] | (places >= batch.skip_blocks[number])
                found = group.rows(ids.astype(np.uint64), mine["offset"].astype(np.uint64), wanted)
                if found.num_rows == 1:
                    pages.append(found.first)
                else:
                    rows.append(found)
        return _joined(pages), rows

    def _by_part(self, number: int, records: npt.NDArray[Any]) -> "Iterator[tuple[_GroupAddresses, npt.NDArray[Any]]]":
        """Yield the records of a group part by part, each with the pages cut for that part."""
        group, own = self._layout.groups[number], self._groups[number]
        heads, layers = records["heads"], records["layers"]
        is_own = (heads == group.part.number & 0xFFFF) & (layers == group.part.number >> 16)
        if is_own.all():
            if len(records):
                yield own, records
            return
        numbers = layers.astype(np.uint64) << np.uint64(16) | heads
        for each in np.unique(numbers).tolist():
            part = Part.of(each)
            yield own if part == group.part else own.cut(group, part), records[numbers == each]


def _joined(parts: list[Runs]) -> Runs:
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, np.uint64)
    return Runs(
        np.concatenate([empty, *(part.blocks for part in parts)]),
        np.concatenate([empty, *(part.offsets for part in parts)]),
        np.concatenate([empty, *(part.sizes for part in parts)]),
    )


def order_of(records: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return the order in which the runs of a batch fill its extents, `(num_extents,)`."""
    return np.lexsort((records["heads"], records["layers"], records["group"]))


def merge(runs: Runs, starts: Addresses | None = None) -> Runs:
    """Join successive runs that continue each other on the device and in the pool.

    Args:
        runs: only successive ones are joined.
        starts: addresses on the device, in order, at which no run continues another; None for none.
    """
    if len(runs) < 2:
        return runs
    block_ends, offset_ends = runs.blocks + runs.sizes, runs.offsets + runs.sizes
    breaks = (runs.blocks[1:] != block_ends[:-1]) | (runs.offsets[1:] != offset_ends[:-1])
    if breaks.all():
        return runs
    if starts is not None and len(starts):
        continuing = np.flatnonzero(~breaks)
        blocks = runs.blocks[continuing + 1]
        breaks[continuing] = starts[np.maximum(np.searchsorted(starts, blocks, "right"), 1) - 1] == blocks
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Runs(runs.blocks[firsts], runs.offsets[firsts], np.add.reduceat(runs.sizes, firsts))


def split(runs: Runs, piece_bytes: int) -> Runs:
    """Cut runs where a piece of the pool ends: pieces begin at multiples of `piece_bytes`."""
    piece = np.uint64(piece_bytes)
    if int((runs.offsets % piece + runs.sizes).max(initial=0)) <= piece_bytes:
        return runs
    first = runs.offsets // piece
    repeats = ((runs.offsets + runs.sizes - np.uint64(1)) // piece - first).astype(np.int64) + 1
    whole = np.repeat(np.arange(len(runs)), repeats)
    nth = (np.arange(len(whole)) - np.repeat(np.cumsum(repeats) - repeats, repeats)).astype(np.uint64)
    piece_starts = (first[whole] + nth) * piece
    starts = np.maximum(runs.offsets[whole], piece_starts)
    ends = np.minimum((runs.offsets + runs.sizes)[whole], piece_starts + piece)
    return Runs(runs.blocks[whole] + (starts - runs.offsets[whole]), starts, ends - starts)


def _starts_of(pages: Sequence[PageLayout]) -> Addresses:
    """Return, in order, the addresses at which pages begin outside all others. One tensor lies in one allocation."""
    starts: list[int] = []
    end = 0
    for page in sorted(pages, key=lambda page: page.address):
        if not starts or page.address >= end:
            starts.append(page.address)
        end = max(end, page.address + (page.num_blocks - 1) * page.stride_bytes + page.page_size_bytes)
    return np.array(starts, np.uint64)


@dataclass(frozen=True, slots=True)
class _GroupAddresses:
    """The pages of one layer group, as columns of numbers."""

    blocks_per_chunk: int
    num_rows: int  # rows of each page that are copied one by one
    addresses: Addresses  # (num_pages,), of the first row of block 0
    strides: Addresses
    sizes: Addresses  # of a row
    run_offsets: Addresses  # of each page's first row within an extent
    steps: Addresses  # within an extent, from a page of one block to that of the next
    row_steps: tuple[Addresses, Addresses]  # on the device and within an extent, from one row to the next

    @classmethod
    def of(cls, pages: Sequence[PageLayout], blocks_per_chunk: int) -> "_GroupAddresses":
        sizes = np.array([page.page_size_bytes for page in pages], np.uint64)
        return cls(
            blocks_per_chunk,
            1,
            np.array([page.address for page in pages], np.uint64),
            np.array([page.stride_bytes for page in pages], np.uint64),
            sizes,
            (np.cumsum(sizes) - sizes) * np.uint64(blocks_per_chunk),
            sizes,
            (sizes, sizes),
        )

    def cut(self, group: LayerGroup, part: Part) -> "_GroupAddresses":
        """Return the pages of the layers that both parts have, with each row cut to the heads that both have.

        An extent of the other part has the same pages and rows for each of its layers, with its own heads.
        """
        mine, layers, both = group.part, layers_of_both(group.part, part), heads_of_both(group.part, part)
        rows = 1 if len(both) == mine.num_heads == part.num_heads else group.rows  # whole pages are one row
        of_layer = len(self.sizes) // mine.num_layers
        pages = slice((layers.start - mine.first_layer) * of_layer, (layers.stop - mine.first_layer) * of_layer)
        my_heads, their_heads = np.uint64(mine.num_heads), np.uint64(part.num_heads)
        of_head = self.sizes[pages] // (np.uint64(rows) * my_heads)
        layer_bytes = int(self.sizes[:of_layer].sum()) * self.blocks_per_chunk
        before_page = self.run_offsets[pages] + np.uint64(mine.first_layer * layer_bytes)
        before_page -= np.uint64(part.first_layer * layer_bytes)
        return _GroupAddresses(
            self.blocks_per_chunk,
            rows,
            self.addresses[pages] + np.uint64(both.start - mine.first_head) * of_head,
            self.strides[pages],
            of_head * np.uint64(len(both)),
            before_page // my_heads * their_heads + np.uint64(both.start - part.first_head) * of_head,
            of_head * np.uint64(rows) * their_heads,
            (of_head * my_heads, of_head * their_heads),
        )

    def rows(self, ids: Addresses, extents: Addresses, wanted: npt.NDArray[np.bool_]) -> Rows:
        """Return the rows of some blocks.

        Args:
            ids: block ids, `(num_chunks, blocks_per_chunk)`.
            extents: offsets in the pool, `(num_chunks,)`.
            wanted: which of `ids` to copy.
        """
        places = np.arange(self.blocks_per_chunk, dtype=np.uint64)
        blocks = self.addresses[:, None] + ids[:, None, :] * self.strides[:, None]
        offsets = extents[:, None, None] + self.run_offsets[:, None] + places * self.steps[:, None]
        shape: Any = blocks.shape
        # Applying a mask takes longer than all the rest.
        chosen = None if wanted.all() else np.broadcast_to(wanted[:, None, :], shape)

        def column(numbers: Addresses) -> Addresses:
            if numbers.shape != shape:
                whole = np.empty(shape, np.uint64)  # `broadcast_to` takes longer
                whole[...] = numbers
                numbers = whole
            # Compiled copies need contiguous numbers.
            return np.ascontiguousarray((numbers if chosen is None else numbers[chosen]).reshape(-1))

        first = Runs(column(blocks), column(offsets), column(self.sizes[:, None]))
        if self.num_rows == 1:
            return Rows(first, 1, first.sizes, first.sizes)
        return Rows(first, self.num_rows, *(column(each[:, None]) for each in self.row_steps))
