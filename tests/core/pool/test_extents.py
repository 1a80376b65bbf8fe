"""The allocation of extents, compared with a model that tracks every 4 KiB."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvdepot.pool.extents import ExtentAllocator

PAGE = 4096
CAPACITY = 64 * PAGE


def pages_of(offset: int, num_bytes: int) -> set[int]:
    """Return the pages that an extent of `num_bytes` covers."""
    assert offset % PAGE == 0
    return set(range(offset // PAGE, -(-(offset + num_bytes) // PAGE)))


class AllocatorMachine(RuleBasedStateMachine):
    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(CAPACITY, CAPACITY // 2)
        self.used: set[int] = set()

    @rule(target=extents, pages=st.lists(st.integers(1, 20), max_size=8))
    def allocate(self, pages: list[int]) -> list[tuple[int, int]]:
        sizes = [each * PAGE for each in pages]
        taken = [*zip(self.allocator.allocate(sizes), sizes, strict=False)]
        if len(taken) < len(sizes):
            assert all(size < sizes[len(taken)] for _, size in self.allocator.free_extents())
        for extent in taken:
            pages_of_it = pages_of(*extent)
            assert not pages_of_it & self.used
            assert max(pages_of_it) < self.allocator.ready_bytes // PAGE
            self.used |= pages_of_it
        return taken

    @rule(extents=consumes(extents), rest=st.integers(1, PAGE), random=st.randoms())
    def free(self, extents: list[tuple[int, int]], rest: int, random: Random) -> None:
        random.shuffle(extents)
        self.allocator.free([(offset, size - PAGE + rest) for offset, size in extents])
        for extent in extents:
            self.used -= pages_of(*extent)

    @rule(pages=st.integers(0, 70))
    def grow(self, pages: int) -> None:
        self.allocator.grow(pages * PAGE)

    @invariant()
    def holes_are_what_is_not_used_and_never_touch(self) -> None:
        holes = self.allocator.free_extents()
        free = {page for start, size in holes for page in pages_of(start, size)}
        assert free == set(range(self.allocator.ready_bytes // PAGE)) - self.used
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(holes))
        assert self.allocator.used_bytes == len(self.used) * PAGE
        assert self.allocator.free_bytes == len(free) * PAGE


TestAllocator = AllocatorMachine.TestCase


def test_a_full_pool_of_one_size_reuses_exactly_what_was_freed() -> None:
    allocator = ExtentAllocator(CAPACITY)
    offsets = allocator.allocate([3 * PAGE] * 30)
    assert offsets == [place * 3 * PAGE for place in range(CAPACITY // (3 * PAGE))]
    assert allocator.allocate([3 * PAGE]) == []
    allocator.free([(offsets[5], 3 * PAGE)])
    assert allocator.allocate([3 * PAGE]) == [offsets[5]]


def test_extents_of_one_store_are_neighbours_if_a_hole_has_room_for_all() -> None:
    allocator = ExtentAllocator(CAPACITY)
    offsets = allocator.allocate([PAGE] * 64)
    allocator.free([(offsets[place], PAGE) for place in (9, 3, 40, 41, 42, 20, 21, 22, 23)])
    assert allocator.allocate([PAGE, PAGE, PAGE]) == offsets[40:43], "the smallest such hole"
    assert allocator.allocate([2 * PAGE] * 3) == [offsets[20], offsets[22]], "as many as there is room for"
    assert sorted(allocator.allocate([PAGE] * 3)) == [offsets[3], offsets[9]]


@given(st.lists(st.tuples(st.integers(-1, 70).map(lambda p: p * PAGE // 2), st.integers(0, 10 * PAGE)), max_size=12))
def test_extents_of_an_earlier_life_are_taken_if_they_can_be(wanted: list[tuple[int, int]]) -> None:
    allocator = ExtentAllocator(CAPACITY)
    places = {place for some in allocator.restore(len(wanted), wanted.__getitem__) for place in some}
    taken = [place in places for place in range(len(wanted))]
    used: set[int] = set()
    for (offset, num_bytes), is_taken in zip(wanted, taken, strict=True):
        if is_taken:
            pages = pages_of(offset, num_bytes)
            assert pages
            assert not pages & used
            assert min(pages) >= 0
            assert max(pages) < CAPACITY // PAGE
            used |= pages
    assert allocator.used_bytes == len(used) * PAGE
    for (offset, num_bytes), is_taken in zip(wanted, taken, strict=True):
        if is_taken:
            allocator.free([(offset, num_bytes)])
    assert allocator.free_extents() == [(0, CAPACITY)]


@pytest.mark.parametrize("grows_at", [None, 0, 1, 2])
def test_a_pool_that_is_ready_in_part_is_restored_and_grows_in_the_meantime(grows_at: int | None) -> None:
    """The previous server was killed while it allocated its pool."""
    allocator = ExtentAllocator(CAPACITY, 16 * PAGE)
    extents = [(2 * PAGE, 5000), (8 * PAGE, PAGE), (20 * PAGE, PAGE)]
    taken: list[int] = []
    for step, some in enumerate(allocator.restore(len(extents), extents.__getitem__)):
        if step == grows_at:
            allocator.grow(18 * PAGE)
        taken += some
    assert taken == [0, 1], "there is no memory yet under the last one"
    allocator.check_integrity(extents[:2])
    assert allocator.ready_bytes == (18 if grows_at is not None else 16) * PAGE
    assert allocator.free_extents()[-1] == (9 * PAGE, allocator.ready_bytes - 9 * PAGE)
    allocator.grow(CAPACITY)
    allocator.check_integrity(extents[:2])


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    allocator = ExtentAllocator(CAPACITY)
    sizes = [pages * PAGE for pages in (8, 1, 3, 1, 51)]
    extents = [*zip(allocator.allocate(sizes), sizes, strict=True)]
    allocator.free(extents[0:3:2])
    assert allocator.allocate([2 * PAGE]) == [extents[2][0]]
    assert allocator.allocate([4 * PAGE]) == [extents[0][0]]
