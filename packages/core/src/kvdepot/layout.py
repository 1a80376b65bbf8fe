"""Arithmetic on blocks, pages and chunks: pure, no I/O.

An engine keeps KV in **blocks** of tokens. Each layer has one **page** of opaque bytes per block. Layers that share a
block table form a **layer group**. A **chunk** has `chunk_tokens` tokens: whole blocks in each group, of which it keeps
the last `blocks_per_chunk`: all, unless a window or a state needs fewer. In the pool, the bytes of a chunk and group
are ordered by layer, then by block: `(num_pages, blocks_per_chunk, page_size_bytes)`.

The layers and heads of a group over the whole model are its **plane**. A worker holds a **part** of it, a rectangle.
Workers of engines with other ranks hold other parts; the cells that two parts share are the same bytes. If ranks divide
the tokens of a head among them, each share counts as a head.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from kvdepot.errors import LayoutError

MINIMUM_CHUNK_TOKENS = 64  # smaller chunks would cost more in messages and records than they gain in hits
MAXIMUM_HEADS = 256  # per plane: a part's number has 8 bits for its first head
MAXIMUM_CELLS = 65_536  # per plane
_MOST_COMPARED: Final = 16  # of that many parts, in any positions, `fewest` compares all choices in half a millisecond


class GroupKind(enum.StrEnum):
    """The kind of a group: the chunks of a cached prefix that the following tokens need."""

    FULL_ATTENTION = "full_attention"  # all chunks
    SLIDING_WINDOW = "sliding_window"  # the chunks that the window spans
    RECURRENT = "recurrent"  # the state at the end: one block per chunk


class Plane(NamedTuple):
    """The layers and heads of one group in the whole model.

    Pages that cannot be cut are **opaque**: their plane has one layer per rank, and one head.
    """

    layers: int = 1
    heads: int = 1


class Part(NamedTuple):
    """The rectangle of a plane that one worker holds. Messages, records and tier keys contain its number."""

    first_layer: int = 0
    num_layers: int = 1
    first_head: int = 0
    num_heads: int = 1

    @classmethod
    def of(cls, number: int) -> "Part":
        """Return the part with this number."""
        return cls(number >> 16 & 0xFFFF, (number >> 32) + 1, number & 0xFF, (number >> 8 & 0xFF) + 1)

    @property
    def number(self) -> int:
        """A number of 48 bits: first head, heads - 1, first layer, layers - 1."""
        return self.first_head | (self.num_heads - 1) << 8 | self.first_layer << 16 | (self.num_layers - 1) << 32

    @property
    def num_cells(self) -> int:
        """The number of cells: layers times heads."""
        return self.num_layers * self.num_heads

    def is_in(self, plane: Plane) -> bool:
        """Return whether a plane contains all cells of the part."""
        return (
            0 <= self.first_layer < self.first_layer + self.num_layers <= plane.layers
            and 0 <= self.first_head < self.first_head + self.num_heads <= plane.heads
        )


ONE_CELL: Final = Plane()
THAT_CELL: Final = Part()


@lru_cache(4096)
def mask_of(number: int, heads: int) -> int:
    """Return the mask of a part's cells in a plane of `heads`: bit `layer * heads + head` per cell."""
    part = Part.of(number)
    row = (1 << part.num_heads) - 1 << part.first_head
    return sum(row << layer * heads for layer in range(part.first_layer, part.first_layer + part.num_layers))


@lru_cache(1024)
def fewest(part: int, parts: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Return the fewest of `parts` that together have all cells of a part in a plane of `heads`. Empty if cells lack.

    All are numbers. If more than 16 could be useful, the widest are chosen first, which may be more than the fewest.
    """
    wanted, useful = mask_of(part, heads), dict[int, int]()  # parts by their wanted cells, unless a wider one has them
    cells = [(mask_of(other, heads) & wanted, other) for other in parts]
    for mask, other in sorted(cells, key=lambda each: each[0].bit_count(), reverse=True):
        if all(mask & ~wider for wider in useful):
            useful[mask] = other
    widest = max(map(int.bit_count, useful), default=0)

    def search(missing: int, most: int) -> list[int] | None:
        """Return the fewest parts for the missing cells, None if they are more than `most`."""
        if not missing or missing.bit_count() > most * widest:
            return None if missing else []
        found: list[int] | None = None
        for mask, other in useful.items():
            if mask & missing & -missing:  # try only parts that cover the first gap
                rest = search(missing & ~mask, most - 1)
                if rest is not None:
                    found, most = [other, *rest], len(rest)
        return found

    missing, found = wanted, list[int]()
    for mask, other in useful.items():
        if mask & missing:
            found.append(other)
            missing &= ~mask
    if missing:
        return ()
    fewer = search(wanted, len(found) - 1) if len(useful) <= _MOST_COMPARED else None
    return tuple(fewer or found)


def default_chunk_tokens(block_tokens: Iterable[int]) -> int:
    """Return the smallest common multiple of all groups' block sizes that is at least `MINIMUM_CHUNK_TOKENS`."""
    step = math.lcm(*block_tokens)
    return step * -(-MINIMUM_CHUNK_TOKENS // step)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Addresses of one layer's blocks: block `i` starts at `address + i * stride_bytes`.

    Blocks of a constructed layout never overlap.
    """

    address: int
    num_blocks: int
    page_size_bytes: int  # bytes of one block in one layer
    stride_bytes: int  # distance to the next block; larger than the page if layers share a buffer

    def __post_init__(self) -> None:
        if self.num_blocks <= 0 or self.page_size_bytes <= 0 or self.address < 0:
            raise LayoutError(f"{self.num_blocks} blocks of {self.page_size_bytes} bytes at {self.address}: impossible")
        if self.stride_bytes < self.page_size_bytes:
            raise LayoutError(f"stride {self.stride_bytes} < page {self.page_size_bytes}: blocks overlap")


def strided_pages(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> PageLayout:
    """Return the page layout of a tensor `(num_blocks, ...)`. `strides` and `itemsize` are in bytes.

    The dimensions within a block may be in any order in memory, as long as the block's bytes are contiguous: vLLM's
    views have another order than the memory.

    Raises:
        LayoutError: the tensor has no blocks, or the bytes of a block are not contiguous.
    """
    if not shape or shape[0] < 1:
        raise LayoutError(f"a cache of shape {shape}: the first dimension counts the blocks")
    expected = itemsize
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size != 1 and stride != expected:
            raise LayoutError(
                f"shape {shape} with strides of {strides} bytes: the bytes of one block are not contiguous"
            )
        expected *= size
    page_size_bytes = itemsize * math.prod(shape[1:])
    return PageLayout(address, shape[0], page_size_bytes, strides[0] if shape[0] > 1 else page_size_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one worker that share a block table.

    `pages` has one layout per layer, in the order of a chunk, or two for a layer with separate keys and values. This
    worker holds `part` of the `plane`. Ranks with the same bytes (MLA, replicas) have the same part.

    A page is `(rows, heads of the part, bytes)`: one row if heads are outermost, one row per token if tokens are.
    """

    kind: GroupKind
    block_tokens: int
    pages: tuple[PageLayout, ...]
    window_tokens: int = 0  # sliding window only
    part: Part = THAT_CELL
    plane: Plane = ONE_CELL
    rows: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise LayoutError(f"blocks of {self.block_tokens} tokens: at least 1")
        if self.block_tokens % self.rows:
            raise LayoutError(f"blocks of {self.block_tokens} tokens in {self.rows} rows")
        if not self.pages:
            raise LayoutError("a layer group without layers")
        if len({page.num_blocks for page in self.pages}) != 1:
            raise LayoutError(f"layers of one group have {sorted({page.num_blocks for page in self.pages})} blocks")
        if not self.part.is_in(self.plane):
            raise LayoutError(f"{self.part} of {self.plane}")
        if len(self.pages) % self.part.num_layers or any(
            page.page_size_bytes % (self.rows * self.part.num_heads) for page in self.pages
        ):
            raise LayoutError(
                f"{len(self.pages)} pages of {sorted({page.page_size_bytes for page in self.pages})} bytes are not"
                f" {self.rows} rows of each cell of {self.part}"
            )
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.window_tokens > 0):
            raise LayoutError(f"a {self.kind} group with a window of {self.window_tokens} tokens")

    @property
    def row_tokens(self) -> int:
        """The tokens per row. A chunk has the same bytes in blocks of any number of rows."""
        return self.block_tokens // self.rows

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the worker."""
        return self.pages[0].num_blocks

    @property
    def block_size_bytes(self) -> int:
        """The bytes of one block in all layers of the group."""
        return sum(page.page_size_bytes for page in self.pages)

    def blocks_per_chunk(self, chunk_tokens: int) -> int:
        """Return the number of blocks that a chunk keeps: see the function of this name."""
        return blocks_per_chunk(self.kind, self.block_tokens, self.window_tokens, chunk_tokens)

    def chunk_size_bytes(self, chunk_tokens: int) -> int:
        """Return the bytes of one chunk of this group on this worker."""
        return self.block_size_bytes * self.blocks_per_chunk(chunk_tokens)

    def readable_bytes(self, part: Part, chunk_tokens: int) -> int:
        """Return the bytes of a chunk in entries of another part, 0 if this worker cannot use them."""
        mine = self.part
        if not part.is_in(self.plane) or not layers_of_both(mine, part) or not heads_of_both(mine, part):
            return 0
        return self.chunk_size_bytes(chunk_tokens) // mine.num_cells * part.num_cells


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The whole KV cache of one worker.

    `format` names the arrangement of bytes in a page (for example "NHD"). Caches of different formats never share.
    """

    groups: tuple[LayerGroup, ...]
    chunk_tokens: int
    dtype: str
    format: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("a cache without layer groups")
        for number, group in enumerate(self.groups):
            if group.kind is not GroupKind.RECURRENT and self.chunk_tokens % group.block_tokens:
                raise LayoutError(
                    f"group {number}: chunks of {self.chunk_tokens} tokens are not whole blocks of"
                    f" {group.block_tokens}: use a multiple of {math.lcm(*(g.block_tokens for g in self.groups))}"
                )
        if self.chunk_tokens <= 0:
            raise LayoutError(f"chunks of {self.chunk_tokens} tokens")

    @property
    def chunk_sizes_bytes(self) -> tuple[int, ...]:
        """The bytes of one chunk, by group."""
        return tuple(group.chunk_size_bytes(self.chunk_tokens) for group in self.groups)


def heads_of_both(mine: Part, other: Part) -> range:
    """Return the heads that two parts have in common."""
    first = max(mine.first_head, other.first_head)
    return range(first, min(mine.first_head + mine.num_heads, other.first_head + other.num_heads))


def layers_of_both(mine: Part, other: Part) -> range:
    """Return the layers that two parts have in common."""
    first = max(mine.first_layer, other.first_layer)
    return range(first, min(mine.first_layer + mine.num_layers, other.first_layer + other.num_layers))


def window_chunks(window_tokens: int, chunk_tokens: int) -> int:
    """Return how many chunks a window spans before a boundary: the next token sees `window_tokens - 1` tokens."""
    return max(1, -(-(window_tokens - 1) // chunk_tokens))


def blocks_per_chunk(kind: GroupKind, block_tokens: int, window_tokens: int, chunk_tokens: int) -> int:
    """Return how many blocks of a group a chunk keeps, its last ones: one state, or the blocks that a window spans."""
    if kind is GroupKind.RECURRENT:
        return 1
    spanned = chunk_tokens // block_tokens
    return min(spanned, window_chunks(window_tokens, block_tokens)) if kind is GroupKind.SLIDING_WINDOW else spanned


def check_block_ids(
    group: LayerGroup, block_ids: Sequence[int], chunk_tokens: int, num_chunks: int, *, may_skip: bool = False
) -> int:
    """Return the number of chunks at the end of a run that `block_ids` covers (see `BlockIds`).

    `may_skip` allows -1 for unwanted blocks.

    Raises:
        LayoutError: the ids are not whole chunks, exceed the run, or refer to a block that the worker lacks.
    """
    per_chunk = group.blocks_per_chunk(chunk_tokens)
    covered, rest = divmod(len(block_ids), per_chunk)
    if rest or covered > num_chunks:
        raise LayoutError(f"{len(block_ids)} block ids for {num_chunks} chunks of {per_chunk} blocks")
    if covered and not (min(block_ids) >= (-1 if may_skip else 0) and max(block_ids) < group.num_blocks):
        raise LayoutError(
            f"block ids from {min(block_ids)} to {max(block_ids)}, the cache has {group.num_blocks} blocks"
        )
    return covered
