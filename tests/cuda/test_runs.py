"""Runs that are merged, cut and turned into addresses move the same bytes as a plain loop."""

import itertools
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.backends import NO_BLOCK, CopyBatch
from kvdepot.copying.runs import BatchRuns, Runs, merge, split
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, Part, Plane
from kvdepot.movers.protocol import CopyRefused
from kvdepot.pool.files import PoolMapping
from kvdepot.wire.messages import EXTENT
from kvdepot_cuda import backend
from kvdepot_cuda.mover import CheckedRuns

PAGE = 8
NUM_BLOCKS = 12


def batch(extents: bytes, block_ids: list[list[int]], first: tuple[int, ...], skip: tuple[int, ...]) -> CopyBatch:
    return CopyBatch(cast("PoolMapping", None), extents, block_ids, first, skip)  # the pool's address is added later


def columns(*runs: tuple[int, int, int]) -> Runs:
    blocks, offsets, sizes = (np.array(column, np.uint64) for column in zip(*runs, strict=True))
    return Runs(blocks, offsets, sizes)


def rows(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.blocks.tolist(), runs.offsets.tolist(), runs.sizes.tolist(), strict=True))


def bytes_moved(runs: Runs) -> list[tuple[int, int]]:
    """Return the source and the target of every byte."""
    return sorted((block + i, offset + i) for block, offset, size in rows(runs) for i in range(size))


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    """Return runs that continue the previous run on one side, on the other side, on both or on none."""
    made: list[tuple[int, int, int]] = []
    block, offset = draw(st.integers(0, 100)), draw(st.integers(0, 100))
    for _ in range(draw(st.integers(1, 12))):
        size = draw(st.integers(1, 40))
        made.append((block, offset, size))
        block += size + draw(st.sampled_from((0, 0, 0, 5)))
        offset += size + draw(st.sampled_from((0, 0, 0, 7)))
    return columns(*made)


@pytest.mark.promise(51)
@given(some_runs())
def test_merged_runs_move_the_same_bytes_and_no_two_continue_each_other(runs: Runs) -> None:
    merged = merge(runs)
    assert bytes_moved(merged) == bytes_moved(runs)
    found = rows(merged)
    assert not any(one[0] + one[2] == two[0] and one[1] + one[2] == two[1] for one, two in itertools.pairwise(found))


@given(some_runs(), st.integers(1, 50))
def test_cut_runs_move_the_same_bytes_and_none_crosses_a_piece(runs: Runs, piece_bytes: int) -> None:
    pieces = split(merge(runs), piece_bytes)
    assert bytes_moved(pieces) == bytes_moved(runs)
    assert all(offset // piece_bytes == (offset + size - 1) // piece_bytes for _, offset, size in rows(pieces))


def test_runs_that_continue_on_one_side_only_stay_two() -> None:
    on_device, in_pool, on_both = ((0, 0, 8), (8, 16, 8)), ((0, 0, 8), (16, 8, 8)), ((0, 0, 8), (8, 8, 8))
    assert len(merge(columns(*on_device))) == 2
    assert len(merge(columns(*in_pool))) == 2
    assert rows(merge(columns(*on_both))) == [(0, 0, 16)]


@given(some_runs(), st.sets(st.integers(0, 300), max_size=8))
def test_no_merged_run_crosses_a_start_and_nothing_else_is_kept_apart(runs: Runs, starts: set[int]) -> None:
    merged = merge(runs, np.array(sorted(starts), np.uint64))
    assert bytes_moved(merged) == bytes_moved(runs)
    begins = {block for block, _, _ in rows(runs)}  # no start lies within a run, as a run belongs to one tensor
    assert not any(block < start < block + size for block, _, size in rows(merged) for start in starts & begins)
    for one, two in itertools.pairwise(rows(merged)):
        continues = one[0] + one[2] == two[0] and one[1] + one[2] == two[1]
        assert not continues or two[0] in starts


@pytest.mark.parametrize("is_mover", [False, True])
def test_no_run_goes_on_from_one_allocation_into_the_next(is_mover: bool) -> None:
    """Two layers, each in its own allocation, the second right after the first."""
    starts = [1024, 1024 + 4 * PAGE]
    layers = tuple(PageLayout(start, 4, PAGE, PAGE) for start in starts)
    layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, 32, layers),), 64, "bytes", "")
    made = CheckedRuns(layout, [(start, 4 * PAGE) for start in starts], 4096) if is_mover else BatchRuns(layout)
    runs = made.of(batch(EXTENT.pack(0, 0, 0, 0, 0, 0, 0, 4 * PAGE), [[0, 3]], (0,), (0,)))
    assert rows(merge(runs, made.starts)) == [
        (1024, 0, PAGE),
        (1024 + 3 * PAGE, PAGE, PAGE),
        (1024 + 4 * PAGE, 2 * PAGE, PAGE),
        (1024 + 7 * PAGE, 3 * PAGE, PAGE),
    ]


def test_layers_that_lie_in_one_another_begin_once() -> None:
    """Blocks are outermost. Two groups have the same addresses, and a separate tensor follows them."""
    within = [PageLayout(1000 + PAGE * layer, NUM_BLOCKS, PAGE, PAGE * 4) for layer in (2, 0, 1, 3)]
    end = 1000 + PAGE * 4 * NUM_BLOCKS
    groups = (
        LayerGroup(GroupKind.FULL_ATTENTION, 64, tuple(within)),
        LayerGroup(GroupKind.SLIDING_WINDOW, 64, (within[1], PageLayout(end, NUM_BLOCKS, PAGE, PAGE)), 64),
    )
    assert BatchRuns(CacheLayout(groups, 64, "bytes", "")).starts.tolist() == [1000, end]


@pytest.mark.promise(51)
def test_a_block_with_all_its_layers_in_one_place_is_one_run() -> None:
    """Blocks are outermost, with one block a chunk: layers have the same order on the device as in the pool."""
    layers = tuple(PageLayout(1000 + PAGE * layer, NUM_BLOCKS, PAGE, PAGE * 4) for layer in range(4))
    layout = CacheLayout((LayerGroup(GroupKind.FULL_ATTENTION, 64, layers),), 64, "bytes", "")
    extents = b"".join(EXTENT.pack(chunk, 0, 0, 0, 0, 0, 4096 * chunk, 4 * PAGE) for chunk in range(3))
    runs = BatchRuns(layout).of(batch(extents, [[7, 2, 5]], (0,), (0,)))
    assert rows(merge(runs)) == [
        (1000 + 7 * 4 * PAGE, 0, 4 * PAGE),
        (1000 + 2 * 4 * PAGE, 4096, 4 * PAGE),
        (1000 + 5 * 4 * PAGE, 8192, 4 * PAGE),
    ]


@given(
    ids=st.permutations(range(NUM_BLOCKS)).flatmap(lambda ids: st.sampled_from((ids[:4], ids[:6], ids[:8]))),
    skip=st.integers(0, 2),
    left_out=st.integers(0, 7),
    window_chunks=st.integers(1, 2),
    layers=st.integers(1, 3),
    padding=st.sampled_from((0, 24)),
)
def test_any_block_ids_become_the_bytes_of_a_plain_loop(
    ids: list[int], skip: int, left_out: int, window_chunks: int, layers: int, padding: int
) -> None:
    """A full group and a window, two blocks a chunk, skipped blocks and unwanted blocks."""
    ids = [NO_BLOCK if place == left_out else block for place, block in enumerate(ids)]
    num_chunks = len(ids) // 2
    window = list(range(NUM_BLOCKS - 2 * window_chunks, NUM_BLOCKS))
    groups = tuple(
        LayerGroup(
            kind,
            32,
            tuple(PageLayout(base + 4096 * layer, NUM_BLOCKS, PAGE, PAGE + padding) for layer in range(layers)),
            size,
        )
        for kind, base, size in ((GroupKind.FULL_ATTENTION, 1 << 20, 0), (GroupKind.SLIDING_WINDOW, 1 << 30, 64))
    )
    first_covered = (0, num_chunks - window_chunks)
    block_ids = [ids, window]
    extents, expected = b"", list[tuple[int, int]]()
    for number, (group, covered) in enumerate(zip(groups, first_covered, strict=True)):
        for chunk in range(max(covered, 0), num_chunks):
            place = 4096 * (1 + 16 * number + chunk)
            extents += EXTENT.pack(chunk, number, 0, 0, 0, 0, place, 2 * layers * PAGE)
            for layer, page in enumerate(group.pages):
                for nth in range(2):
                    block = block_ids[number][(chunk - covered) * 2 + nth]
                    if block != NO_BLOCK and (chunk or nth >= skip):
                        start, target = page.address + block * page.stride_bytes, place + (layer * 2 + nth) * PAGE
                        expected += [(start + byte, target + byte) for byte in range(PAGE)]
    layout = CacheLayout(groups, 64, "bytes", "")
    runs = BatchRuns(layout).of(batch(extents, block_ids, first_covered, (skip, skip)))
    starts = BatchRuns(layout).starts
    assert bytes_moved(runs) == bytes_moved(merge(runs)) == bytes_moved(merge(runs, starts)) == sorted(expected)


@pytest.mark.parametrize(
    ("part", "num_bytes", "num_runs"),
    [
        (Part(0, 1, 0, 4), 4 * PAGE, 1),
        (Part(0, 1, 2, 1), PAGE, 1),
        (Part(0, 1, 1, 2), 2 * PAGE, 1),
        (Part(0, 1, 0, 4), 2 * PAGE, 0),  # the wrong size
        (Part(0, 1, 3, 1), PAGE, 0),  # none of its heads
        (Part(1, 1, 1, 2), 2 * PAGE, 0),  # another layer
        (Part(0, 1, 2, 4), 4 * PAGE, 0),  # beyond the plane
    ],
)
def test_a_mover_takes_entries_of_other_heads_and_of_no_other_size(part: Part, num_bytes: int, num_runs: int) -> None:
    pages = (PageLayout(1000, NUM_BLOCKS, 2 * PAGE, 2 * PAGE),)
    group = LayerGroup(GroupKind.FULL_ATTENTION, 16, pages, part=Part(0, 1, 1, 2), plane=Plane(2, 4))
    checked = CheckedRuns(CacheLayout((group,), 16, "bytes"), [(1000, NUM_BLOCKS * 2 * PAGE)], 1 << 20)
    extent = EXTENT.pack(0, 0, part.number & 0xFFFF, 0, part.number >> 16, 0, 4096, num_bytes)
    if num_runs:
        assert len(checked.of(batch(extent, [[3]], (0,), (0,)))) == num_runs
    else:
        with pytest.raises(CopyRefused, match="the extents of group 0 are not"):
            checked.of(batch(extent, [[3]], (0,), (0,)))


def test_pages_are_cut_where_a_row_has_several_tokens_or_the_kernel_copies() -> None:
    assert backend.cuts_pages(16, gather_kernel=False)
    assert not backend.cuts_pages(1, gather_kernel=False)
    assert backend.cuts_pages(1)
    assert backend.cuts_pages(1, mode="direct", batch_runs=512)
    assert backend.cuts_pages(1, gather_kernel=True)
    assert not backend.cuts_pages(1, mode="ipc")  # a mover has no kernel
    assert not backend.cuts_pages(1, gather_kernel=True, mode="ipc")
