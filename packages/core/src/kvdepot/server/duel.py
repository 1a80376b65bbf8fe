"""Compares LRU and ARC on a sample of the chunks: which of them finds more of the present traffic?

`ShadowIndex` takes the sample and keeps LRU for a pool of the present size in its segments, so only ARC is here. Both
see the same chunks. The rule that found more of them lately should choose the victims, but only if its lead is
significant: each change of the rule spoils the lists that ARC needs. The sample ignores prefixes, which hardly changes
the hits of either rule.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

_ONCE: Final = 0
_AGAIN: Final = 1
_GHOSTS: Final = 2  # lists of evicted chunks begin here, in the same order
_MEMORY: Final = 8  # pools of lookups until the score has forgotten most of a difference
_SURE: Final = 2.0  # standard deviations by which a rule has to lead before it is taken


class Duel:
    """ARC on the sampled chunks, and a score against LRU."""

    def __init__(self) -> None:
        self.limit_bytes = 0.0  # of a pool, scaled down by the sampling rate
        self.prefers_lru = False  # LRU found more lately; otherwise ARC
        self.score = 0.0  # chunks that ARC found and LRU did not, less the others
        self._variance = 0.0  # of the score: the squares of the lookups' differences
        # Chunks seen once, chunks seen again, and those evicted from either list: key -> bytes, the coldest first.
        self._lists: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(4)]
        self._sizes = [0] * 4
        self._target_once = 0.0  # bytes

    def looked_up(self, keys: Sequence[bytes], num_bytes: int, found_by_lru: int) -> None:
        """Count a lookup of sampled chunks of `num_bytes` each, and use them. LRU has `found_by_lru` of them."""
        once, again = self._lists[_ONCE], self._lists[_AGAIN]
        found = 0
        for key in keys:
            if key in again:
                again.move_to_end(key)
                found += 1
            elif key in once:
                self._put(key, self._take(key, _ONCE), _AGAIN)
                found += 1
            else:
                self._insert(key, num_bytes)
        kept = 1 - min(1.0, len(keys) * num_bytes / (_MEMORY * self.limit_bytes))
        self.score = self.score * kept + found - found_by_lru
        self._variance = self._variance * kept + (found - found_by_lru) ** 2
        if self.score**2 > _SURE**2 * self._variance:
            self.prefers_lru = self.score < 0

    def stored(self, key: bytes, num_bytes: int) -> None:
        """Note that a sampled chunk was stored."""
        if key not in self._lists[_ONCE] and key not in self._lists[_AGAIN]:
            self._insert(key, num_bytes)

    def ended(self, key: bytes) -> None:
        """Evict a sampled chunk whose session ended, as the pool does before all others."""
        for which in (_ONCE, _AGAIN):
            if key in self._lists[which]:
                self._evict(key, which)

    def keep(self, limit_bytes: float, is_wanted: Callable[[bytes], bool]) -> None:
        """Change the size of the pool; forget the chunks that are not wanted."""
        self.limit_bytes = limit_bytes
        for number, chunks in enumerate(self._lists):
            for key in [key for key in chunks if not is_wanted(key)]:
                self._take(key, number)
        self._target_once = min(limit_bytes, self._target_once)

    def _insert(self, key: bytes, num_bytes: int) -> None:
        """Add a chunk as ARC does, which moves its target if it had just evicted it."""
        once, again = self._sizes[_GHOSTS:]
        which = _AGAIN
        if key in self._lists[_GHOSTS]:
            self._target_once = min(self.limit_bytes, self._target_once + num_bytes * max(1.0, again / once))
            self._take(key, _GHOSTS)
        elif key in self._lists[_GHOSTS + _AGAIN]:
            self._target_once = max(0.0, self._target_once - num_bytes * max(1.0, once / again))
            self._take(key, _GHOSTS + _AGAIN)
        else:
            which = _ONCE
        self._put(key, num_bytes, which)
        while self._sizes[_ONCE] + self._sizes[_AGAIN] > self.limit_bytes:
            is_once = self._sizes[_ONCE] > self._target_once or not self._lists[_AGAIN]
            which = _ONCE if is_once else _AGAIN
            self._evict(next(iter(self._lists[which])), which)

    def _evict(self, key: bytes, which: int) -> None:
        self._put(key, self._take(key, which), _GHOSTS + which)
        while self._sizes[_GHOSTS + which] > self.limit_bytes:
            self._take(next(iter(self._lists[_GHOSTS + which])), _GHOSTS + which)

    def _put(self, key: bytes, num_bytes: int, which: int) -> None:
        self._lists[which][key] = num_bytes
        self._sizes[which] += num_bytes

    def _take(self, key: bytes, which: int) -> int:
        num_bytes = self._lists[which].pop(key)
        self._sizes[which] -= num_bytes
        return num_bytes
