"""Selects LRU or ARC by simulating both on a sample of chunks.

`HitRateCurve` takes the sample, and its segments simulate LRU for a pool of the present size. This module simulates ARC
with the index's own policy, over chunks without prefixes. Both see the same chunks. The policy with more recent hits
should choose the victims, but only if its lead is significant, because each switch spoils the lists that ARC needs. The
sample ignores prefixes, which hardly changes the hits of either policy.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.index.eviction import NO_NODE, AdaptiveReplacement, Preference
from kvdepot.index.space import Space
from kvdepot.index.tree import Nodes
from kvdepot.wire.messages import CacheSpec

_MEMORY: Final = 8  # the score forgets most of a difference after this many pools of lookups
_SURE: Final = 2.0  # standard deviations by which a policy must lead to be selected


class PolicySelector:
    """Simulates ARC on at most `capacity` sampled chunks, and scores it against LRU."""

    def __init__(self, capacity: int) -> None:
        self.limit_bytes = 0.0  # size of the pool, scaled down by the sampling rate
        self.prefers_lru = False  # whether LRU had more hits recently
        self.score = 0.0  # chunks found only by ARC, minus chunks found only by LRU
        self._variance = 0.0  # of the score: the sum of squared differences of lookups
        self._space = Space(0, CacheSpec(1, (), "sample"))
        self._nodes = Nodes(capacity, [self._space])
        self._arc = AdaptiveReplacement(self._nodes.tree, Preference())
        self._sizes = make_column("Q", capacity)  # bytes, by node
        self._num_bytes = 0

    def looked_up(self, keys: Sequence[bytes], num_bytes: int, found_by_lru: int) -> None:
        """Count a lookup of sampled chunks of `num_bytes` each, of which LRU found `found_by_lru`. Then use them."""
        found = 0
        for key in keys:
            node = self._space.nodes.get(key)
            if node is None:
                self._insert(key, num_bytes)
            else:
                self._arc.used(node)
                found += 1
        kept = 1 - min(1.0, len(keys) * num_bytes / (_MEMORY * self.limit_bytes))
        self.score = self.score * kept + found - found_by_lru
        self._variance = self._variance * kept + (found - found_by_lru) ** 2
        if self.score**2 > _SURE**2 * self._variance:
            self.prefers_lru = self.score < 0

    def stored(self, key: bytes, num_bytes: int) -> None:
        """Note that a sampled chunk was stored."""
        if key not in self._space.nodes:
            self._insert(key, num_bytes)

    def ended(self, key: bytes) -> None:
        """Evict a sampled chunk whose session ended, as the pool evicts it before all others."""
        node = self._space.nodes.get(key)
        if node is not None:
            self._remove(node)

    def keep(self, limit_bytes: float, is_wanted: Callable[[bytes], bool]) -> None:
        """Change the size of the pool, and remove the chunks that are not wanted."""
        self.limit_bytes = limit_bytes
        for node in [node for key, node in self._space.nodes.items() if not is_wanted(key)]:
            self._remove(node)

    def _insert(self, key: bytes, num_bytes: int) -> None:
        """Evict chunks to make room, then add a chunk. A chunk larger than the pool is not added."""
        while self._num_bytes + num_bytes > self.limit_bytes or not self._nodes.num_left:
            victim = self._arc.victim()
            if victim is None:
                return
            self._remove(victim)
        node = self._nodes.add(self._space, key, NO_NODE, 0, 0)
        self._sizes[node] = num_bytes
        self._num_bytes += num_bytes
        self._arc.added(node)

    def _remove(self, node: int) -> None:
        self._num_bytes -= self._sizes[node]
        self._arc.removed(node)
        self._nodes.drop(node)
