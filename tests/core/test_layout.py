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
    Part,
    Plane,
    check_block_ids,
    default_chunk_tokens,
    fewest,
    heads_of_both,
    layers_of_both,
    mask_of,
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
        (FULL, 16, (PAGE,), 0, Part(1), Plane(1)),
        (FULL, 16, (PAGE,), 0, Part(-1), Plane(1)),
        (FULL, 16, (PAGE,), 0, Part(0, 1, 0, 0), Plane(1, 4)),
        (FULL, 16, (PAGE,), 0, Part(0, 1, 1, 4), Plane(1, 4)),
        (FULL, 16, (PAGE,), 0, Part(0, 1, 0, 3), Plane(1, 4)),
        (FULL, 16, (PAGE,), 0, Part(0, 1, 0, 4), Plane(1, 4), 32),
        (FULL, 16, (PAGE,), 0, Part(0, 2), Plane(2)),
    ],
)
def test_a_group_that_does_not_add_up_is_refused(values: tuple[object, ...]) -> None:
    with pytest.raises(LayoutError):
        LayerGroup(*values)  # type: ignore[arg-type]


@st.composite
def parts_of(draw: st.DrawFn, plane: Plane) -> Part:
    first_layer, first_head = draw(st.integers(0, plane.layers - 1)), draw(st.integers(0, plane.heads - 1))
    num_layers = draw(st.integers(1, plane.layers - first_layer))
    return Part(first_layer, num_layers, first_head, draw(st.integers(1, plane.heads - first_head)))


planes = st.one_of(
    st.builds(Plane, st.integers(1, 40), st.integers(1, 256)), st.builds(Plane, st.integers(1, 65_536), st.just(1))
)


def cells_of(part: Part) -> set[tuple[int, int]]:
    layers = range(part.first_layer, part.first_layer + part.num_layers)
    return set(itertools.product(layers, range(part.first_head, part.first_head + part.num_heads)))


@given(st.data(), planes)
def test_a_part_is_known_by_its_number_of_48_bits(data: st.DataObject, plane: Plane) -> None:
    part = data.draw(parts_of(plane))
    assert part.is_in(plane)
    assert 0 <= part.number < 1 << 48
    assert Part.of(part.number) == part


def test_a_part_of_one_cell_has_the_number_of_its_rank() -> None:
    assert Part().number == 0
    assert [Part(rank).number for rank in (1, 65_535)] == [1 << 16, 65_535 << 16]


@given(st.data(), st.builds(Plane, st.integers(1, 9), st.integers(1, 9)))
def test_masks_of_parts_have_a_bit_for_each_cell(data: st.DataObject, plane: Plane) -> None:
    mine, other = data.draw(parts_of(plane)), data.draw(parts_of(plane))
    mask = mask_of(mine.number, plane.heads)
    assert mask.bit_count() == mine.num_cells == len(cells_of(mine))
    assert (mask & mask_of(other.number, plane.heads)).bit_count() == len(cells_of(mine) & cells_of(other))
    assert mask | mask_of(Part(0, plane.layers, 0, plane.heads).number, plane.heads) == (1 << math.prod(plane)) - 1


def sizes(plane: Plane, ranks: tuple[int, ...], stages: tuple[int, ...]) -> list[int]:
    """Return the parts of engines with these numbers of ranks and stages."""
    return sorted(
        {
            Part(plane.layers // s * stage, plane.layers // s, plane.heads // r * rank, plane.heads // r).number
            for r, s in itertools.product(ranks, stages)
            for rank, stage in itertools.product(range(r), range(s))
        }
    )


def check_fewest(plane: Plane, part: int, parts: tuple[int, ...]) -> None:
    wanted = cells_of(Part.of(part))

    def have_all(some: tuple[int, ...]) -> bool:
        return wanted <= {cell for each in some for cell in cells_of(Part.of(each))}

    found = fewest(part, parts, plane.heads)
    assert bool(found) == have_all(parts)
    if found:
        assert set(found) <= set(parts)
        assert have_all(found)
        assert not any(map(have_all, itertools.combinations(parts, len(found) - 1)))


@pytest.mark.parametrize(
    ("plane", "ranks", "stages"),
    [(Plane(1, 4), (1, 2, 4), (1,)), (Plane(6, 1), (1,), (1, 2, 3)), (Plane(2, 2), (1, 2), (1, 2))],
)
def test_a_reader_takes_the_fewest_of_any_parts(plane: Plane, ranks: tuple[int, ...], stages: tuple[int, ...]) -> None:
    every = sizes(plane, ranks, stages)
    for count in range(len(every) + 1):
        for parts in itertools.combinations(every, count):
            for part in every:
                check_fewest(plane, part, parts)


@given(st.data())
def test_a_reader_takes_the_fewest_parts_of_engines_with_many_ranks_and_stages(data: st.DataObject) -> None:
    plane = Plane(6, 8)
    every = sizes(plane, (1, 2, 4, 8), (1, 2, 3))
    parts = data.draw(st.lists(st.sampled_from(every), max_size=12, unique=True))
    check_fewest(plane, data.draw(st.sampled_from(every)), tuple(parts))


def test_a_reader_of_very_many_parts_takes_the_widest_first() -> None:
    heads = [Part(layer, 1, head, 1).number for layer, head in itertools.product(range(30), range(64))]
    whole = Part(0, 30, 0, 64).number
    assert sorted(fewest(whole, tuple(heads), 64)) == sorted(heads)
    assert fewest(whole, tuple(heads[1:]), 64) == ()
    assert fewest(whole, (*heads, whole), 64) == (whole,)
    left, right = Part(0, 30, 0, 32).number, Part(0, 30, 32, 32).number
    assert fewest(whole, (*heads, left, right), 64) == (left, right)


@given(st.data(), st.integers(1, 16), st.integers(1, 4))
def test_another_part_can_be_read_if_it_has_cells_of_this_worker(
    data: st.DataObject, heads: int, num_tensors: int
) -> None:
    plane = Plane(3, heads)
    mine, other = data.draw(parts_of(plane)), data.draw(parts_of(plane))
    page = PageLayout(0, 8, 64 * mine.num_heads, 64 * mine.num_heads)
    group = LayerGroup(FULL, 16, (page,) * num_tensors * mine.num_layers, 0, mine, plane)
    both = cells_of(mine) & cells_of(other)
    assert both == set(itertools.product(layers_of_both(mine, other), heads_of_both(mine, other)))
    expected = 4 * num_tensors * 64 * other.num_cells if both else 0
    assert group.readable_bytes(other, 64) == expected


def test_chunks_are_whole_blocks_of_every_group() -> None:
    groups = (LayerGroup(FULL, 16, (PAGE,)), LayerGroup(FULL, 48, (PAGE,)))
    with pytest.raises(LayoutError, match="multiple of 48"):
        CacheLayout(groups, 64, "bytes")
    assert CacheLayout(groups, 96, "bytes").chunk_sizes_bytes == (6 * 64, 2 * 64)


def test_a_recurrent_group_keeps_one_block_a_chunk_whatever_its_size() -> None:
    layout = CacheLayout((LayerGroup(GroupKind.RECURRENT, 1000, (PAGE, PAGE)),), 64, "bytes")
    assert layout.chunk_sizes_bytes == (128,)


@given(st.lists(st.integers(-2, 9), max_size=12), st.integers(0, 3))
def test_block_ids_are_whole_chunks_of_the_run_and_exist(block_ids: list[int], num_chunks: int) -> None:
    group = LayerGroup(FULL, 16, (PAGE,))
    fits = len(block_ids) % 4 == 0 and len(block_ids) // 4 <= num_chunks and all(0 <= block < 8 for block in block_ids)
    if fits:
        assert check_block_ids(group, block_ids, 64, num_chunks) == len(block_ids) // 4
    else:
        with pytest.raises(LayoutError):
            check_block_ids(group, block_ids, 64, num_chunks)
