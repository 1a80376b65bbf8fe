"""Eviction policies: choose the chunk to evict when a store needs room.

Chunks form trees by prefix. A parent outlives its children, so only leaves are evicted. The policies behave as if each
use touched the whole prefix from its deepest chunk to the root, so an ancestor is never colder than its descendants.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, Protocol, TypeAlias

from kvdepot.index.columns import make_column
from kvdepot.index.tree import NO_NODE, ChunkTree
from kvdepot.keys import DIGEST_BYTES

# Bounds of one search for a victim: a store may need many victims within a few milliseconds.
_MOST_LOOKED_AT: Final = 4096  # leased leaves skipped: they leave the queue, so the next search continues there
_MOST_MENDED: Final = 16  # outdated heap entries corrected; then the coldest of these leaves is evicted
_MOST_TOUCHED: Final = 512  # chunks of a prefix marked by one use, from its end: that is evicted first


@dataclass(slots=True)
class Preference:
    """The policy with more hits in the present traffic. Set by the code that samples the traffic."""

    lru: bool = False  # otherwise ARC


class EvictionPolicy(Protocol):
    """Chooses the next chunks to evict. Nodes are small integers of the index. A parent outlives its children.

    The index reports each change.
    """

    def added(self, nodes: Sequence[int]) -> None:
        """Add chunks that have become complete, so that lookups may find them: deepest first."""
        ...

    def used(self, node: int) -> None:
        """Note a use of the prefix that ends with this chunk: of the chunk and its ancestors, deepest first."""
        ...

    def unpinned(self, node: int) -> None:
        """Note that a node became evictable again: its last lease ended or its last child was removed."""
        ...

    def evicted(self, nodes: Sequence[int]) -> None:
        """Note that chunks are evicted to make room, not because their owner asked for it. `removed` follows."""
        ...

    def removed(self, nodes: Sequence[int]) -> None:
        """Remove chunks that were evicted or cleared, or move to another policy: each before its parent.

        Their numbers may be reused.
        """
        ...

    def victim(self) -> int | None:
        """Return the next chunk to evict, for which `evictable` is true, without removing it. None if there is none."""
        ...

    def next_of(self, nodes: Sequence[int]) -> Sequence[int]:
        """Return the first ones of a victim and the chunks before it, each needed only by the one after it.

        They end before the first one that would not be the next victim.
        """
        ...


@dataclass(slots=True)
class ShareTree(ChunkTree):
    """The view of the tree for one of the two policies of a share, which may evict only its own chunks."""

    number: int = 0
    is_ended: int = False

    @classmethod
    def of(cls, tree: ChunkTree, share: int, *, is_ended: bool) -> "ShareTree":
        """Return a view of the same columns for one policy."""
        columns = tree.keys, tree.parent, tree.num_children, tree.holds, tree.share, tree.ended
        return cls(tree.capacity, *columns, share, is_ended)

    def evictable(self, node: int) -> bool:
        """Return whether the chunk belongs to this view, and has no holds and no children."""
        return (
            self.share[node] == self.number
            and self.ended[node] == self.is_ended
            and not self.num_children[node]
            and not self.holds[node]
            and self.keys[node] is not None
        )


class _Leaves:
    """The leaves of one view in the order of their last use.

    A heap has each leaf once. Its key may be outdated (too old) and is corrected when the leaf reaches the top. If
    nearly all leaves were used again, a search corrects only a few of the many outdated keys and returns the coldest of
    those.
    """

    def __init__(self, last_use: "memoryview[int]", belongs: Callable[[int], bool]) -> None:
        self._last_use = last_use
        self._belongs = belongs
        self._queued = make_column("B", len(last_use))
        self._heap: list[int] = []  # last use << 32 | node

    def add(self, node: int) -> None:
        """Add a leaf, unless it is in the heap already."""
        if not self._queued[node]:
            self._queued[node] = 1
            heapq.heappush(self._heap, self._last_use[node] << 32 | node)

    def removed(self, node: int) -> None:
        """Remove a leaf if it is at the top.

        Otherwise a later search would have to skip every chunk of a long prompt.
        """
        if self._heap and self._heap[0] & NO_NODE == node:
            heapq.heappop(self._heap)
            self._queued[node] = 0

    def first(self) -> int | None:
        """Return the coldest leaf, None if there is none."""
        heap, last_use, belongs = self._heap, self._last_use, self._belongs
        coldest, num_mended = NO_NODE, 0
        for _ in range(_MOST_LOOKED_AT):
            if not heap or num_mended == _MOST_MENDED:
                break
            node = heap[0] & NO_NODE
            if not belongs(node):
                heapq.heappop(heap)
                self._queued[node] = 0
            elif heap[0] >> 32 < last_use[node]:
                heapq.heapreplace(heap, last_use[node] << 32 | node)
                num_mended += 1
                if coldest == NO_NODE or last_use[node] < last_use[coldest]:
                    coldest = node
            else:
                return node
        return None if coldest == NO_NODE else coldest


_ONCE: Final = 1
_AGAIN: Final = 2

_LAST_BYTES: Final = Struct("<Q")  # of a key
_NAME_OFFSET: Final = DIGEST_BYTES - _LAST_BYTES.size
_NO_KEY: Final = bytes(DIGEST_BYTES)
_WAYS: Final = 4  # words per set
_NUMBER_MASK: Final = (1 << 31) - 1


class _Ghosts:
    """Remembers the keys of evicted chunks, of two kinds: seen once, and seen again.

    It remembers about `most` keys of each kind, in a table of words. Each key has a set of four words. A word has four
    bytes of the key, the number of the eviction (31 bits), and the kind. Keys are identified by their last eight bytes,
    because sampled keys (`HitRateCurve`) have similar first bytes.
    """

    def __init__(self) -> None:
        self._words = make_column("Q", 0)
        self._num_sets = 0
        self._num_words = [0, 0]  # [seen once, seen again]
        self._num_evicted = [0, 0]

    def sizes(self, most: int) -> tuple[int, int]:
        """Return how many keys of each kind are remembered."""
        once, again = self._num_words
        return min(once, most), min(again, most)

    def add(self, keys: Iterable[bytes | None], seen: int, most: int) -> None:
        """Remember keys for the next `most` evictions of their kind. If `most` has grown far, forget all keys first."""
        if most > 2 * self._num_sets:
            self._num_sets = 1 << (most - 1).bit_length()
            self._words, self._num_words = make_column("Q", _WAYS * self._num_sets), [0, 0]
        words, num_evicted, num_words, kind = self._words, self._num_evicted, self._num_words, seen - _ONCE
        num_sets, last_bytes = self._num_sets, _LAST_BYTES.unpack_from
        for key in keys:
            (name,) = last_bytes(key or _NO_KEY, _NAME_OFFSET)
            num_evicted[kind] += 1
            chosen = start = name % num_sets * _WAYS
            most_since = -1
            for place in range(start, start + _WAYS):
                word = words[place]
                if not word:
                    chosen = place
                    break
                since = num_evicted[word & 1] - (word >> 1) & _NUMBER_MASK
                if since > most_since:
                    chosen, most_since = place, since
                    if since >= most:  # it is not remembered any more
                        break
            if words[chosen]:
                num_words[words[chosen] & 1] -= 1
            words[chosen] = name >> 32 << 32 | (num_evicted[kind] & _NUMBER_MASK) << 1 | kind
            num_words[kind] += 1

    def take(self, keys: Sequence[bytes | None], most: int) -> list[int]:
        """Forget keys, and return the kind of each, 0 for one that is not remembered."""
        if not self._num_sets:
            return [0] * len(keys)
        words, num_evicted, num_sets, last_bytes = (
            self._words,
            self._num_evicted,
            self._num_sets,
            _LAST_BYTES.unpack_from,
        )
        kinds: list[int] = []
        for key in keys:
            (name,) = last_bytes(key or _NO_KEY, _NAME_OFFSET)
            start = name % num_sets * _WAYS
            name >>= 32
            found = 0
            for place in range(start, start + _WAYS):
                word = words[place]
                if word >> 32 == name and word:
                    kind = word & 1
                    words[place] = 0
                    self._num_words[kind] -= 1
                    if num_evicted[kind] - (word >> 1) & _NUMBER_MASK < most:
                        found = kind + _ONCE
                    break
            kinds.append(found)
        return kinds


class AdaptiveReplacement:
    """ARC: balances chunks seen once against chunks seen again by the hits that evictions cost.

    Megiddo and Modha, FAST 2003. It evicts the least recently used leaf of one of the two kinds. A use stores one
    number, however long the prefix is: a chunk that becomes a leaf inherits the last use of the removed child, as if
    every use had touched all ancestors. The first use of a prefix marks its chunks as seen again. In a very long
    prefix, the rest is marked later, by children that are removed.

    While `Preference.lru` is set, it evicts like LRU: the colder of the two leaves.
    """

    def __init__(self, tree: ChunkTree, preference: Preference) -> None:
        self._tree = tree
        self._preference = preference
        self._last_use = make_column("Q", tree.capacity)
        self._seen = seen = make_column("B", tree.capacity)  # 0: not in this policy
        self._once = _Leaves(self._last_use, lambda node: seen[node] == _ONCE and tree.evictable(node))
        self._again = _Leaves(self._last_use, lambda node: seen[node] == _AGAIN and tree.evictable(node))
        self._ghosts = _Ghosts()
        self._num_marked = [0, 0, 0]  # [unused, seen once, seen again]
        self._target_once = 0.0
        self._tick = 0

    def added(self, nodes: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        keys, num_marked, last_use = self._tree.keys, self._num_marked, self._last_use
        num_children, seen_of = self._tree.num_children, self._seen
        self._tick = tick = self._tick + 1
        capacity = num_marked[_ONCE] + num_marked[_AGAIN] + 1
        for node, seen in zip(nodes, self._ghosts.take([keys[node] for node in nodes], capacity), strict=True):
            if seen:
                self._adapt(seen, capacity)
            last_use[node] = tick
            num_marked[seen_of[node]] -= 1
            seen_of[node] = mark = _AGAIN if seen else _ONCE
            num_marked[mark] += 1
            if not num_children[node]:
                self.unpinned(node)

    def used(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._tick += 1
        self._last_use[node] = self._tick
        if self._seen[node] == _ONCE:
            above = node
            for _ in range(_MOST_TOUCHED):
                if above == NO_NODE or self._seen[above] != _ONCE:
                    break
                self._mark(above, _AGAIN)
                above = self._tree.parent[above]
            self.unpinned(node)

    def unpinned(self, node: int) -> None:
        """See `EvictionPolicy`."""
        if self._tree.evictable(node) and self._seen[node]:
            (self._once if self._seen[node] == _ONCE else self._again).add(node)

    def evicted(self, nodes: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        most, seen_of, keys = sum(self._num_marked[_ONCE:]), self._seen, self._tree.keys
        for kind in (_ONCE, _AGAIN):
            own = [keys[node] for node in nodes if seen_of[node] == kind]
            if own:
                self._ghosts.add(own, kind, most)

    def removed(self, nodes: Sequence[int]) -> None:
        """See `EvictionPolicy`."""
        parents, last_use, seen_of, num_marked = self._tree.parent, self._last_use, self._seen, self._num_marked
        for node in nodes:
            parent, seen = parents[node], seen_of[node]
            if parent != NO_NODE:
                if last_use[node] > last_use[parent]:  # noqa: PLR1730  # a call for each chunk
                    last_use[parent] = last_use[node]
                if seen == _AGAIN and seen_of[parent] == _ONCE:
                    self._mark(parent, _AGAIN)
            num_marked[seen] -= 1
            num_marked[0] += 1
            seen_of[node] = 0
            last_use[node] = 0  # the number may be reused for a chunk that is discarded before it is `added`
        if not self._tree.num_children[nodes[0]]:
            self._once.removed(nodes[0])
            self._again.removed(nodes[0])

    def next_of(self, nodes: Sequence[int]) -> Sequence[int]:
        """See `EvictionPolicy`."""
        seen_of, last_use = self._seen, self._last_use
        seen, latest = seen_of[nodes[0]], last_use[nodes[0]]
        for place, node in enumerate(nodes):
            if seen_of[node] != seen or last_use[node] > latest:
                return nodes[:place]
        return nodes

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        # Most shares have no ended chunks, but are asked for one at each eviction: searching costs 1.5 us.
        if not any(self._num_marked):
            return None
        if self._preference.lru:
            once, again = self._once.first(), self._again.first()
            if once is None or again is None:
                return again if once is None else once
            return once if self._last_use[once] < self._last_use[again] else again
        first, second = self._once, self._again
        if self._num_marked[_ONCE] <= self._target_once and self._num_marked[_AGAIN]:
            first, second = second, first
        node = first.first()
        return second.first() if node is None else node

    def _adapt(self, seen: int, capacity: int) -> None:
        """Give more room to the kind of a chunk that returned after its eviction."""
        num_once, num_again = self._ghosts.sizes(capacity)
        if seen == _ONCE:
            self._target_once = min(capacity, self._target_once + max(1.0, num_again / (num_once + 1)))
        else:
            self._target_once = max(0.0, self._target_once - max(1.0, num_once / (num_again + 1)))

    def _mark(self, node: int, seen: int) -> None:
        before, self._seen[node] = self._seen[node], seen
        self._num_marked[before] -= 1
        self._num_marked[seen] += 1


PolicyFactory: TypeAlias = Callable[[ChunkTree, Preference], EvictionPolicy]
"""Creates a policy for a tree. The policy may follow the preference."""

AUTO: Final = "auto"
POLICIES: Final[dict[str, PolicyFactory]] = {
    AUTO: AdaptiveReplacement,
    "lru": lambda tree, _preference: AdaptiveReplacement(tree, Preference(lru=True)),
    "arc": lambda tree, _preference: AdaptiveReplacement(tree, Preference()),
}
