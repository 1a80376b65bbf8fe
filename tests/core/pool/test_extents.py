"""The allocation of extents, compared with a model that tracks every 4 KiB."""

import itertools
from collections.abc import Iterator, Sequence
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


def restore(allocator: ExtentAllocator, extents: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Restore extents, each given with its offset, bytes and owner."""
    offsets, sizes, owners = zip(*extents, strict=True) if extents else ((), (), ())
    return allocator.restore(offsets, sizes, owners)


class AllocatorMachine(RuleBasedStateMachine):
    """One arena, or 64 of one page or of four pages, so that extents may need several."""

    extents = Bundle("extents")
    arena_pages = 64

    def __init__(self) -> None:
        super().__init__()
        self.capacity = (64 if self.arena_pages == 64 else 64 * self.arena_pages) * PAGE
        self.allocator = ExtentAllocator(self.capacity, CAPACITY // 2, arena_bytes=self.arena_pages * PAGE)
        self.used: set[int] = set()

    @rule(
        target=extents,
        pages=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), max_size=8),
        has_owners=st.booleans(),
        anywhere=st.booleans(),
    )
    def allocate(self, pages: list[tuple[int, int]], *, has_owners: bool, anywhere: bool) -> list[tuple[int, int]]:
        sizes = [each * PAGE for each, _ in pages]
        owners = [owner for _, owner in pages] if has_owners else []
        taken = [*zip(self.allocator.allocate(sizes, owners, anywhere=anywhere), sizes, strict=False)]
        if len(taken) < len(sizes) and anywhere:
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

    @rule(pages=st.integers(0, 270))
    def grow(self, pages: int) -> None:
        self.allocator.grow(pages * PAGE)

    @invariant()
    def holes_are_what_is_not_used_and_never_touch(self) -> None:
        holes = self.allocator.free_extents()
        free = {page for start, size in holes for page in pages_of(start, size)}
        assert free == set(range(self.allocator.ready_bytes // PAGE)) - self.used
        if self.arena_pages == 64:
            assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(holes))
        self.allocator.check_integrity((page * PAGE, PAGE) for page in self.used)
        assert self.allocator.used_bytes == len(self.used) * PAGE
        assert self.allocator.free_bytes == len(free) * PAGE


class ArenasMachine(AllocatorMachine):
    arena_pages = 4


class SmallArenasMachine(AllocatorMachine):
    arena_pages = 1


TestAllocator = AllocatorMachine.TestCase
TestArenas = ArenasMachine.TestCase
TestSmallArenas = SmallArenasMachine.TestCase


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
    places = {place for some in restore(allocator, [(*each, 0) for each in wanted]) for place in some}
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
    for step, some in enumerate(restore(allocator, [(*each, 0) for each in extents])):
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


class TestOwnersInArenas:
    ARENA = 4 * PAGE
    CAPACITY = 64 * ARENA

    @pytest.fixture
    def allocator(self) -> ExtentAllocator:
        return ExtentAllocator(self.CAPACITY, arena_bytes=self.ARENA)

    def arenas(self, offsets: list[int]) -> set[int]:
        return {offset // self.ARENA for offset in offsets}

    def fill(self, allocator: ExtentAllocator) -> tuple[list[int], list[int]]:
        """Let two owners fill the pool in turn."""
        found: tuple[list[int], list[int]] = ([], [])
        for turn in range(self.CAPACITY // PAGE):
            found[turn % 2].extend(allocator.allocate([PAGE], [turn % 2], anywhere=False))
        assert allocator.free_bytes == 0
        return found

    def test_owners_that_allocate_in_turn_have_arenas_of_their_own(self, allocator: ExtentAllocator) -> None:
        first, second = self.fill(allocator)
        assert len(self.arenas(first)) == len(self.arenas(second)) == 32
        assert not self.arenas(first) & self.arenas(second)

    def test_extents_of_two_owners_in_one_call_lie_apart(self, allocator: ExtentAllocator) -> None:
        offsets = allocator.allocate([PAGE] * 8, [0, 1] * 4)
        assert offsets == [0, 4 * PAGE, PAGE, 5 * PAGE, 2 * PAGE, 6 * PAGE, 3 * PAGE, 7 * PAGE]

    def test_space_in_the_arenas_of_another_is_left_to_it_unless_it_is_much(self, allocator: ExtentAllocator) -> None:
        """A 32nd of the pool is 8 pages. A free arena is taken at once."""
        first, second = self.fill(allocator)
        others = [each for each in second if each % self.ARENA]  # leaves no arena free
        allocator.free([(each, PAGE) for each in others[:8]])
        assert allocator.allocate([PAGE], [0], anywhere=False) == []
        assert allocator.allocate([PAGE], [1], anywhere=False)
        assert self.arenas(allocator.allocate([PAGE], [0])) < self.arenas(second)
        allocator.free([(each, PAGE) for each in others[8:11]])
        assert self.arenas(allocator.allocate([PAGE], [0], anywhere=False)) < self.arenas(second)
        arena = [each for each in second if each // self.ARENA == max(self.arenas(second))]
        allocator.free([(each, PAGE) for each in arena])
        assert allocator.allocate([PAGE] * 4, [0] * 4, anywhere=False) == arena
        allocator.free([(arena[0], PAGE), (first[0], PAGE)])
        assert {*allocator.allocate([PAGE] * 2, [0] * 2, anywhere=False)} == {arena[0], first[0]}

    def test_the_first_stores_find_room_while_the_pool_grows(self) -> None:
        allocator = ExtentAllocator(self.CAPACITY, 2 * PAGE, arena_bytes=self.ARENA)
        assert allocator.allocate([PAGE], [0], anywhere=False) == [0]
        assert allocator.allocate([PAGE], [1], anywhere=False) == [PAGE]
        allocator.grow(6 * PAGE)
        assert allocator.allocate([PAGE], [1], anywhere=False) == [4 * PAGE]
        assert allocator.allocate([PAGE], [0], anywhere=False) == [2 * PAGE]

    def test_extents_larger_than_an_arena_take_several(self, allocator: ExtentAllocator) -> None:
        assert allocator.allocate([9 * PAGE, 9 * PAGE], [0, 0], anywhere=False) == [0, 9 * PAGE]

    def test_owners_keep_their_arenas_over_a_restart(self, allocator: ExtentAllocator) -> None:
        found = [(offset, PAGE, owner) for owner, offsets in enumerate(self.fill(allocator)) for offset in offsets]
        kept = found[::3]
        following = ExtentAllocator(self.CAPACITY, arena_bytes=self.ARENA)
        assert sum(len(some) for some in restore(following, kept)) == len(kept)
        following.check_integrity([(offset, size) for offset, size, _ in kept])
        new = following.allocate([PAGE] * 32, [1] * 32, anywhere=False)
        assert len(new) == 32
        assert self.arenas(new) <= self.arenas([offset for offset, _, owner in found if owner == 1])

    def test_all_arenas_of_a_large_extent_keep_its_owner_over_a_restart(self, allocator: ExtentAllocator) -> None:
        kept = [(0, 9 * PAGE, 1)]
        assert [*restore(allocator, kept)][-1] == [0]
        allocator.check_integrity([(0, 9 * PAGE)])
        assert allocator.allocate([PAGE], [1], anywhere=False) == [9 * PAGE]
        assert allocator.allocate([PAGE], [0], anywhere=False) == [12 * PAGE]
