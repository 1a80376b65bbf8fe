"""How a batch is cut into moves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.copying.moves import bucket_sizes, cut, cut_exactly


@given(st.integers(0, 5000), st.integers(0, 8))
def test_every_block_is_moved_once_in_shapes_that_are_known(num_blocks: int, power: int) -> None:
    parts = list(cut(num_blocks, 1 << power))
    assert sum(blocks for blocks, _ in parts) == num_blocks
    assert {bucket for _, bucket in parts} <= {1 << number for number in range(power + 1)}
    assert all(bucket * 3 <= blocks * 4 <= bucket * 4 for blocks, bucket in parts)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_without_fixed_shapes_nothing_is_padded(num_blocks: int, largest: int) -> None:
    parts = list(cut_exactly(num_blocks, largest))
    assert sum(blocks for blocks, _ in parts) == num_blocks
    assert all(0 < blocks == size <= largest for blocks, size in parts)


@given(st.integers(1, 5000), st.integers(0, 8))
def test_the_last_blocks_take_few_moves(num_blocks: int, power: int) -> None:
    assert len(list(cut(num_blocks, 1 << power))) <= num_blocks // (1 << power) + power + 1


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 28), st.integers(1, 512))
def test_buckets_fit_the_staging_memory_unless_one_block_does_not(block: int, staging: int, max_blocks: int) -> None:
    sizes = bucket_sizes(block, staging, max_blocks)
    assert sizes == tuple(2**number for number in range(len(sizes)))
    assert sizes[-1] == 1 or sizes[-1] * block <= staging
    assert sizes[-1] <= max_blocks


def test_a_small_prompt_and_a_long_one() -> None:
    assert list(cut(7, 32)) == [(7, 8)]
    assert list(cut(5, 32)) == [(4, 4), (1, 1)]
    assert np.array(list(cut(75, 32))).tolist() == [[32, 32], [32, 32], [8, 8], [3, 4]]
