"""Copies of entries from workers with other layers and heads, compared with a transposition of the model."""

import itertools
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.copying.moves import StagedGroup, moves
from kvdepot.copying.runs import BatchRuns
from kvdepot.kvcache import NO_BLOCK, CopyBatch
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, Part, Plane, heads_of_both, layers_of_both
from kvdepot.wire.messages import EXTENT

Bytes = npt.NDArray[np.uint8]

BLOCK_TOKENS: Final = 4
NUM_CHUNKS: Final = 3


def split(plane: Plane, num_stages: int, num_ranks: int) -> list[Part]:
    """Return the parts of an engine's ranks, stage by stage. More ranks than heads have replicas."""
    layers = [stage * plane.layers // num_stages for stage in range(num_stages + 1)]
    heads = [rank * plane.heads // num_ranks for rank in range(num_ranks + 1)]
    return [
        Part(first_layer, end_layer - first_layer, first, max(1, end - first))
        for first_layer, end_layer in itertools.pairwise(layers)
        for first, end in itertools.pairwise(heads)
    ]


class Model:
    """Bytes of every layer, token, head and tensor. K and V may have different sizes."""

    def __init__(self, plane: Plane, sizes: tuple[int, ...], blocks_per_chunk: int, *, heads_first: bool) -> None:
        rng = np.random.default_rng(plane.heads)
        self.plane, self.sizes, self.per_chunk = plane, sizes, blocks_per_chunk
        self.rows = 1 if heads_first else BLOCK_TOKENS
        shape = NUM_CHUNKS, blocks_per_chunk, BLOCK_TOKENS, plane.heads
        self._bytes: list[list[Bytes]] = [
            [rng.integers(0, 256, (*shape, size), np.uint8) for size in sizes] for _ in range(plane.layers)
        ]

    def pages(self, part: Part) -> list[Bytes]:
        """Return the pages of a worker with this part, `(chunks, blocks, bytes of a page)` per layer and tensor."""
        layers = self._bytes[part.first_layer : part.first_layer + part.num_layers]
        stop = part.first_head + part.num_heads
        cut = [each[:, :, :, part.first_head : stop] for layer in layers for each in layer]
        ordered = [each.transpose(0, 1, 3, 2, 4) if self.rows == 1 else each for each in cut]
        return [each.reshape(NUM_CHUNKS, self.per_chunk, -1) for each in ordered]

    def entry(self, part: Part, chunk: int) -> Bytes:
        """Return the bytes that a worker with this part stores."""
        return np.concatenate([page[chunk].ravel() for page in self.pages(part)])


class Reader:
    """The memory of a worker with this part, and copies into it: run by run, or staged."""

    def __init__(self, model: Model, part: Part, *, is_staged: bool) -> None:
        num_blocks = NUM_CHUNKS * model.per_chunk + 2
        sizes = [BLOCK_TOKENS * part.num_heads * size for size in model.sizes] * part.num_layers
        self.memory = [np.zeros((num_blocks, size + 8), np.uint8) for size in sizes]  # blocks are padded
        pages = tuple(
            PageLayout(each.ctypes.data, num_blocks, size, size + 8)
            for each, size in zip(self.memory, sizes, strict=True)
        )
        group = LayerGroup(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, pages, 0, part, model.plane, model.rows)
        layout = CacheLayout((group,), BLOCK_TOKENS * model.per_chunk, "bytes")
        self._runs = BatchRuns(layout)
        self._shape = StagedGroup.of(group, layout.chunk_tokens, 1 << 20, 4, in_buckets=True)
        self._model, self._is_staged = model, is_staged

    def retrieve(self, entries: list[tuple[int, Part]], blocks: list[int], skip: int) -> None:
        """Copy entries of chunks and parts as a backend does."""
        pool: Bytes = np.empty(0, np.uint8)
        extents = b""
        for chunk, part in entries:
            entry = self._model.entry(part, chunk)
            heads, layers = part.number & 0xFFFF, part.number >> 16
            extents += EXTENT.pack(chunk, 0, heads, 0, layers, 0, len(pool), len(entry))
            pool = np.concatenate([pool, entry])
        mapping: Any = SimpleNamespace(address=0)
        batch = CopyBatch(mapping, extents, [blocks], (0,), (skip,))
        if self._is_staged:
            self._retrieve_in_moves(batch, pool)
            return
        runs = self._runs.of(batch)
        for address, offset, size in zip(runs.blocks.tolist(), runs.offsets.tolist(), runs.sizes.tolist(), strict=True):
            inside = [each for each in self.memory if 0 <= address - each.ctypes.data < each.nbytes]
            start = address - inside[0].ctypes.data
            inside[0].reshape(-1)[start : start + size] = pool[offset : offset + size]

    def _retrieve_in_moves(self, batch: CopyBatch, pool: Bytes) -> None:
        for move in moves(batch, [self._shape]):
            staged = np.full(move.bucket * self._shape.block_size_bytes, 0xEE, np.uint8)
            move.from_pool(self._shape, staged, pool)
            start = 0
            for memory, size in zip(self.memory, self._shape.page_sizes_bytes, strict=True):
                pages = staged[start : start + move.bucket * size].reshape(move.bucket, size)
                memory[move.block_ids, :size] = pages[: len(move.block_ids)]
                start += move.bucket * size


@given(
    st.data(),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([(16,), (16, 16), (24, 8), (5, 16, 5, 16)]),
    st.booleans(),
    st.booleans(),
)
def test_a_reader_finds_its_layers_and_heads_in_the_entries_of_any_other_split(
    data: st.DataObject, layers: int, heads: int, sizes: tuple[int, ...], heads_first: bool, is_staged: bool
) -> None:
    model = Model(Plane(layers, heads), sizes, data.draw(st.sampled_from([1, 2])), heads_first=heads_first)
    stages, ranks = st.integers(1, layers), st.sampled_from([1, 2, 4, 8, 16])
    writers = split(model.plane, data.draw(stages), data.draw(ranks))
    mine = data.draw(st.sampled_from(split(model.plane, data.draw(stages), data.draw(ranks))))
    reader = Reader(model, mine, is_staged=is_staged)
    order = data.draw(st.permutations(range(NUM_CHUNKS * model.per_chunk + 2)))[: NUM_CHUNKS * model.per_chunk]
    skip = data.draw(st.integers(0, model.per_chunk))
    left_out = data.draw(st.sets(st.integers(0, len(order) - 1), max_size=2))
    blocks = [NO_BLOCK if place in left_out else block for place, block in enumerate(order)]
    needed = [part for part in dict.fromkeys(writers) if heads_of_both(mine, part) and layers_of_both(mine, part)]
    entries = [(chunk, part) for chunk in range(NUM_CHUNKS) for part in needed]
    reader.retrieve(entries, blocks, skip)
    for expected, memory in zip(model.pages(mine), reader.memory, strict=True):
        rest = np.ones(len(memory), bool)
        for place, block in enumerate(blocks):
            if block != NO_BLOCK and place >= skip:
                assert np.array_equal(memory[block, :-8], expected.reshape(len(blocks), -1)[place])
                assert not memory[block, -8:].any()
                rest[block] = False
        assert not memory[rest].any(), "blocks that nobody named were written"


def test_numbers_of_runs_lie_in_a_row_for_code_that_takes_their_address() -> None:
    """Whole chunks of one page: all sizes are the same number."""
    pages = (PageLayout(1 << 20, 8, 4096, 4096),)
    layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, pages),), 2 * BLOCK_TOKENS, "uint8")
    extents = b"".join(EXTENT.pack(chunk, 0, 0, 0, 0, 0, chunk * 8192, 8192) for chunk in range(2))
    mapping: Any = SimpleNamespace(address=0, size_bytes=1 << 20)
    batch = CopyBatch(mapping, extents, [[0, 1, 2, 3]], (0,), (0,))
    runs = BatchRuns(layout).of(batch)
    assert runs.sizes.tolist() == [4096] * 4
    for each in (runs.blocks, runs.offsets, runs.sizes):
        assert each.flags.c_contiguous
