"""Policies compared with naive models."""

import random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.index.eviction import AUTO, POLICIES, EvictionPolicy, Preference
from kvdepot.index.tree import NO_NODE, ChunkTree


def key_of(node: int) -> bytes:
    return blake3(node.to_bytes(4, "little")).digest()


class Forest:
    """A tree of chunks, driven as by the index, with the order of use of a naive LRU."""

    def __init__(self, policy: str) -> None:
        self.tree = ChunkTree.with_room(512)
        self.preference = Preference()
        self.policy: EvictionPolicy = POLICIES[policy](self.tree, self.preference)
        self.last_touch: dict[int, int] = {}
        self.tick = 0

    def add(self, parent: int) -> int:
        node = len(self.tree.keys)
        self.tree.keys.append(key_of(node))
        self.tree.parent[node] = parent
        if parent != NO_NODE:
            self.tree.num_children[parent] += 1
        self.policy.added([node])
        self.touch(node)
        return node

    def use(self, node: int) -> None:
        self.policy.used(node)
        self.touch(node)

    def touch(self, node: int) -> None:
        """Touch the chunk and every ancestor, deepest first."""
        while node != NO_NODE:
            self.tick += 1
            self.last_touch[node] = self.tick
            node = self.tree.parent[node]

    def hold(self, node: int) -> None:
        self.tree.holds[node] += 1

    def let_go(self, node: int) -> None:
        self.tree.holds[node] -= 1
        if self.tree.evictable(node):
            self.policy.unpinned(node)

    def remove(self, node: int) -> None:
        parent = self.tree.parent[node]
        self.policy.evicted([node])
        self.policy.removed([node])
        self.tree.keys[node] = None
        del self.last_touch[node]
        if parent != NO_NODE:
            self.tree.num_children[parent] -= 1
            if self.tree.evictable(parent):
                self.policy.unpinned(parent)

    @property
    def here(self) -> list[int]:
        return sorted(self.last_touch)

    @property
    def evictable(self) -> list[int]:
        return [node for node in self.here if self.tree.evictable(node)]


def drive(forest: Forest, seed: int, num_steps: int) -> list[tuple[int | None, list[int]]]:
    """Take random steps. Return each victim with the nodes that were evictable then, coldest first."""
    rng = random.Random(seed)
    held: list[int] = []
    chosen: list[tuple[int | None, list[int]]] = []
    for _ in range(num_steps):
        action = rng.random()
        if action < 0.35 or not forest.here:
            forest.add(rng.choice([NO_NODE, *forest.here]))
        elif action < 0.55:
            forest.use(rng.choice(forest.here))
        elif action < 0.65:
            held.append(rng.choice(forest.here))
            forest.hold(held[-1])
        elif action < 0.75 and held:
            forest.let_go(held.pop(rng.randrange(len(held))))
        else:
            victim = forest.policy.victim()
            chosen.append((victim, sorted(forest.evictable, key=forest.last_touch.__getitem__)))
            if victim is not None:
                forest.remove(victim)
    return chosen


@given(st.integers(0, 2**32))
def test_lru_evicts_what_touching_every_ancestor_would_have_left_coldest(seed: int) -> None:
    for victim, coldest_first in drive(Forest("lru"), seed, 120):
        assert victim == (coldest_first[0] if coldest_first else None)


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32))
def test_only_unneeded_chunks_are_ever_proposed(policy: str, seed: int) -> None:
    for victim, evictable in drive(Forest(policy), seed, 150):
        assert victim in evictable if evictable else victim is None


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_can_be_evicted_in_the_end(policy: str) -> None:
    forest = Forest(policy)
    drive(forest, 3, 300)
    for node in forest.here:
        while forest.tree.holds[node]:
            forest.let_go(node)
    while (victim := forest.policy.victim()) is not None:
        forest.remove(victim)
    assert forest.here == []


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    forest = Forest("arc")
    popular = [forest.add(NO_NODE) for _ in range(5)]
    for node in popular:
        forest.use(node)
    for _ in range(50):
        forest.add(NO_NODE)
        if len(forest.here) > 10:
            victim = forest.policy.victim()
            assert victim is not None
            forest.remove(victim)
    assert set(popular) <= set(forest.here)


def test_arc_makes_room_for_what_is_new_when_it_misses_what_it_evicted() -> None:
    forest = Forest("arc")
    once, _, popular = (forest.add(NO_NODE) for _ in range(3))
    forest.use(popular)
    assert forest.policy.victim() == once
    forest.remove(once)
    forest.tree.keys[once] = key_of(once)  # the evicted chunk is stored again
    forest.policy.added([once])
    assert forest.policy.victim() == popular


def test_arc_learns_nothing_from_what_its_owner_removed() -> None:
    forest = Forest("arc")
    once, _, popular = (forest.add(NO_NODE) for _ in range(3))
    forest.use(popular)
    forest.policy.removed([once])
    forest.policy.added([once])
    assert forest.policy.victim() != popular


def test_arc_forgets_what_left_long_ago() -> None:
    forest = Forest("arc")
    first, popular = forest.add(NO_NODE), forest.add(NO_NODE)
    forest.use(popular)
    forest.remove(first)
    for _ in range(20):
        forest.remove(forest.add(NO_NODE))
    forest.tree.keys[first] = key_of(first)
    forest.policy.added([first])
    assert forest.policy.victim() == first, "it is seen for the first time again"


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_auto_evicts_as_lru_does_while_that_is_preferred(seed: int, before: int) -> None:
    forest = Forest(AUTO)
    drive(forest, before, 100)
    for node in forest.here:
        while forest.tree.holds[node]:
            forest.let_go(node)
    forest.preference.lru = True
    for victim, coldest_first in drive(forest, seed, 120):
        assert victim == (coldest_first[0] if coldest_first else None)


@given(st.integers(0, 2**32))
def test_auto_evicts_as_arc_does_otherwise(seed: int) -> None:
    victims = [[victim for victim, _ in drive(Forest(policy), seed, 150)] for policy in (AUTO, "arc")]
    assert victims[0] == victims[1]
