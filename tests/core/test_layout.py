"""Arithmetic on blocks, pages and chunks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import LayoutError
from kvdepot.layout import (
    CacheLayout,
    GroupKind,
    LayerGroup,
    PageLayout,
    check_block_ids,
    default_chunk_tokens,
    window_chunks,
)

FULL = GroupKind.FULL_ATTENTION
PAGE = PageLayout(0, 8, 64, 64)


@given(st.lists(st.sampled_from([1, 16, 32, 48, 64, 128, 256]), min_size=1, max_size=4))
def test_the_default_chunk_is_the_smallest_whole_number_of_all_blocks_from_64_on(block_tokens: list[int]) -> None:
    chunk = default_chunk_tokens(block_tokens)
    step = math.lcm(*block_tokens)
    assert chunk % step == 0
    assert chunk >= 64
    assert chunk - step < 64


@given(st.integers(1, 300), st.sampled_from([16, 64, 100]))
def test_a_window_needs_exactly_the_chunks_that_its_next_token_sees(window: int, chunk_tokens: int) -> None:
    boundary = 10_000 * chunk_tokens
    seen = {position // chunk_tokens for position in range(boundary - window + 1, boundary)}
    assert window_chunks(window, chunk_tokens) == max(1, len(seen))


@given(st.integers(0, 100), st.integers(1, 20), st.integers(1, 50), st.integers(0, 30))
def test_blocks_of_a_sound_layout_never_overlap(address: int, num_blocks: int, page: int, padding: int) -> None:
    layout = PageLayout(address, num_blocks, page, page + padding)
    spans = [layout.span(block) for block in range(num_blocks)]
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("values", [(0, 8, 64, 63), (0, 0, 64, 64), (0, 8, 0, 64), (-1, 8, 64, 64)])
def test_a_page_layout_that_cannot_be_is_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(LayoutError):
        PageLayout(*values)


@pytest.mark.parametrize(
    "values",
    [
        (FULL, 0, (PAGE,)),
        (FULL, 16, ()),
        (FULL, 16, (PAGE, PageLayout(0, 9, 64, 64))),
        (FULL, 16, (PAGE,), 5),
        (GroupKind.SLIDING_WINDOW, 16, (PAGE,)),
        (FULL, 16, (PAGE,), 0, 1, 1),
        (FULL, 16, (PAGE,), 0, -1, 1),
    ],
)
def test_a_group_that_does_not_add_up_is_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(LayoutError):
        LayerGroup(*values)  # type: ignore[arg-type]


def test_chunks_are_whole_blocks_of_every_group() -> None:
    groups = (LayerGroup(FULL, 16, (PAGE,)), LayerGroup(FULL, 48, (PAGE,)))
    with pytest.raises(LayoutError, match="multiple of 48"):
        CacheLayout(groups, 64, "bytes")
    assert CacheLayout(groups, 96, "bytes").chunk_sizes_bytes == (6 * 64, 2 * 64)


def test_a_recurrent_group_keeps_one_block_a_chunk_whatever_its_size() -> None:
    layout = CacheLayout((LayerGroup(GroupKind.RECURRENT, 1000, (PAGE, PAGE)),), 64, "bytes")
    assert layout.chunk_sizes_bytes == (128,)
    assert layout.bytes_per_token == 0


@given(st.lists(st.integers(-2, 9), max_size=12), st.integers(0, 3))
def test_block_ids_are_whole_chunks_of_the_run_and_exist(block_ids: list[int], num_chunks: int) -> None:
    group = LayerGroup(FULL, 16, (PAGE,))
    fits = len(block_ids) % 4 == 0 and len(block_ids) // 4 <= num_chunks and all(0 <= block < 8 for block in block_ids)
    if fits:
        assert check_block_ids(group, block_ids, 64, num_chunks) == len(block_ids) // 4
    else:
        with pytest.raises(LayoutError):
            check_block_ids(group, block_ids, 64, num_chunks)
