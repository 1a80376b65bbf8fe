"""Estimates the hit rates of pools of other sizes for the same traffic, from a sample of the chunks.

Chunks are sampled by key (spatial sampling, SHARDS: Waldspurger and others, FAST 2015), so all accesses of a sampled
chunk are seen. The sample is kept in LRU order and divided into segments, whose ends stand for the chosen pool sizes,
scaled down by the sampling rate. The segment in which a chunk is found again tells which of those pools would have had
it. This approximates LRU stack distance. A prefix is used from its end to its start, so the chunks before a chunk are
never colder. Stores count as uses, but only lookups count as accesses. A chunk that has ended is removed from the
sample, because every full pool evicts it first. The sample also decides between LRU and ARC (`PolicySelector`).

The rate starts at a value for the pool's size, and is halved whenever the sample exceeds its budget, so memory is
bounded. A lookup costs a slice of its digests and a few dictionary operations. The estimate needs pools of more than
some hundred chunks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.index.columns import make_column
from kvdepot.index.eviction import AdaptiveReplacement, Preference
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.index.visibility import Watcher
from kvdepot.keys import DIGEST_BYTES, digest_at, num_digests, slice_digests
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature
from kvdepot.server.query import Query
from kvdepot.server.stores import Ticket
from kvdepot.server.turns import Task
from kvdepot.wire.messages import CacheSpec
from kvdepot.wire.status import DepotStatus, PoolEstimate

_LOOKUPS_NOT_SAMPLED: Final = depot_counter(
    "lookups_not_sampled", "Very long lookups left out of the estimates while another one was being counted"
)
_OBSERVED_AT_ONCE: Final = 2048  # chunks per step; the sample takes at most an eighth of them
_MEMORY: Final = 8  # pools of lookups after which the score forgets most of a difference: traffic may change for good
_SURE: Final = 2.0  # standard deviations of a lead: a smaller one may be chance, and a period of LRU spoils ARC's lists


class PolicySelector:
    """Selects LRU or ARC by simulating ARC on at most `capacity` sampled chunks, and scoring it against LRU.

    The segments of `HitRateCurve` simulate LRU for a pool of the present size. This class simulates ARC with the
    index's own policy, over the same chunks without their prefixes, which hardly changes the hits of either policy. The
    policy with more recent hits should choose the victims, but only if its lead is significant, because each switch
    spoils the lists that ARC needs.
    """

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
            self._arc.evicted([victim])
            self._remove(victim)
        (node,) = self._nodes.add(self._space, [key], NO_NODE, 0, 0)
        self._sizes[node] = num_bytes
        self._num_bytes += num_bytes
        self._arc.added([node])

    def _remove(self, node: int) -> None:
        self._num_bytes -= self._sizes[node]
        self._arc.removed([node])
        self._nodes.drop([node])


SCALES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)  # relative to the pool's size

_KEYS: Final = 1 << 16  # number of values of two bytes
_LARGEST_THRESHOLD: Final = _KEYS // 8  # one chunk in 8, however small the pool: sampling costs time
_SMALLEST_THRESHOLD: Final = 8  # one chunk in 8,192: a lower rate would tell nothing
_BUDGET: Final = 8192  # sampled chunks in all segments: four pools with up to twice `_WANTED` each
_WANTED: Final = 1024  # sampled chunks in a pool of the present size, at least: a quarter of the pool still has 256


class HitRateCurve:
    """The sample of one depot.

    Args:
        pool_bytes: the size of the pool.
        scales: sizes of other pools relative to it, ascending, including 1.0.
        budget: the maximum number of sampled chunks.
        preference: set to the policy with more hits at this pool size, which `auto` follows.

    Attributes:
        num_chunks: the estimated number of chunks looked up.
        segment_of: the segment of each sampled chunk, by key.
    """

    def __init__(
        self,
        pool_bytes: int,
        scales: tuple[float, ...] = SCALES,
        budget: int = _BUDGET,
        preference: Preference | None = None,
    ) -> None:
        self.preference = Preference() if preference is None else preference
        self.num_chunks = 0
        self._pool_bytes = pool_bytes
        self._scales = scales
        self._budget = budget
        self._selector = PolicySelector(budget)
        self._own = scales.index(1.0)  # the last segment of a pool of the present size
        self._hits = [0] * len(scales)  # by segment
        self._segments: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in scales]  # key -> bytes
        self._sizes = [0] * len(scales)
        self._limits = [0.0] * len(scales)  # size of each segment in bytes at the present rate
        self.segment_of: dict[bytes, int] = {}
        self._threshold = 0  # keys whose first two bytes are below it are sampled; 0: before the first lookup
        self._weight = 0
        self._highest = 255  # highest first byte of a sampled key
        self._end = b""  # sampled keys are below it
        self._marks = bytes(256)

    @property
    def rate(self) -> float:
        """The share of chunks that is sampled."""
        return self._threshold / _KEYS

    def looked_up(self, digests: bytes, chunk_bytes: int) -> None:
        """Count a lookup of packed `(num_chunks, 32)` digests, each chunk of `chunk_bytes`."""
        if len(digests) == DIGEST_BYTES and digests[0] > self._highest:
            return
        if not self._threshold:
            self._begin(chunk_bytes)
        keys, where, warmest = self._sampled(digests), self.segment_of, self._segments[0]
        found = num_warm = 0
        for key in keys:
            if where.get(key) == 0:  # mostly
                warmest.move_to_end(key)
                num_warm += 1
                continue
            segment = self._use(key, chunk_bytes)
            if segment is not None:
                self._hits[segment] += self._weight
                found += segment <= self._own
        found += num_warm
        self._hits[0] += num_warm * self._weight
        self.num_chunks += len(keys) * self._weight
        if keys:
            self._selector.looked_up(keys, chunk_bytes, found)
            self.preference.lru = self._selector.prefers_lru
        if len(self.segment_of) > self._budget:
            self._set_threshold(self._threshold // 2)

    def stored(self, digests: bytes, chunk_bytes: int) -> None:
        """Note that chunks were stored."""
        if not self._threshold:
            self._begin(chunk_bytes)
        for key in self._sampled(digests):
            self._use(key, chunk_bytes)
            self._selector.stored(key, chunk_bytes)

    def ended(self, key: bytes) -> None:
        """Remove a chunk whose session ended. The next lookup misses it."""
        if key < self._end:
            segment = self.segment_of.pop(key, None)
            if segment is not None:
                self._sizes[segment] -= self._segments[segment].pop(key)
            self._selector.ended(key)

    def estimates(self) -> list[PoolEstimate]:
        """Return the hits that pools of other sizes would have had so far."""
        rows: list[PoolEstimate] = []
        hits = 0
        for scale, more in zip(self._scales, self._hits, strict=True):
            hits += more
            rows.append(PoolEstimate(scale=scale, pool_bytes=int(scale * self._pool_bytes), hit_chunks=hits))
        return rows

    def _begin(self, chunk_bytes: int) -> None:
        threshold = _LARGEST_THRESHOLD
        while threshold > _SMALLEST_THRESHOLD and self._pool_bytes / chunk_bytes * threshold / 2 >= _WANTED * _KEYS:
            threshold //= 2
        self._set_threshold(threshold)

    def _set_threshold(self, threshold: int) -> None:
        """Lower the rate, and remove the chunks that are no longer sampled."""
        self._threshold = max(_SMALLEST_THRESHOLD, threshold)
        self._weight = _KEYS // self._threshold
        self._highest = (self._threshold - 1) >> 8
        self._end = self._threshold.to_bytes(2, "big")
        self._marks = bytes(byte <= self._highest for byte in range(256))
        for key in [key for key in self.segment_of if key >= self._end]:
            segment = self.segment_of.pop(key)
            self._sizes[segment] -= self._segments[segment].pop(key)
        self._selector.keep(self._pool_bytes * self.rate, self._end.__gt__)
        ends = [scale * self._pool_bytes * self.rate for scale in self._scales]
        self._limits = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]

    def _sampled(self, digests: bytes) -> list[bytes]:
        """Return the sampled keys of a run, last chunk first."""
        marks = digests[::DIGEST_BYTES].translate(self._marks)
        keys: list[bytes] = []
        place = marks.rfind(1)
        while place >= 0:
            key = digest_at(digests, place)
            if key < self._end:
                keys.append(key)
            place = marks.rfind(1, 0, place)
        return keys

    def _use(self, key: bytes, num_bytes: int) -> int | None:
        """Move a chunk to the warm end. Return its former segment, None if it was not in the sample."""
        segments, sizes, where = self._segments, self._sizes, self.segment_of
        found = where.get(key)
        if found == 0:
            segments[0].move_to_end(key)
            return 0
        if found is not None:
            sizes[found] -= segments[found].pop(key)
        segments[0][key] = num_bytes
        sizes[0] += num_bytes
        where[key] = 0
        last = len(segments) - 1
        for number, segment in enumerate(segments):
            if sizes[number] <= self._limits[number]:
                break  # this segment fits, so the later ones do not change
            while sizes[number] > self._limits[number]:
                colder, size = segment.popitem(last=False)
                sizes[number] -= size
                if number == last:
                    del where[colder]
                else:
                    segments[number + 1][colder] = size
                    sizes[number + 1] += size
                    where[colder] = number + 1
        return found


class Estimates(Feature):
    """The sample of one depot's lookups and stores. The index follows its preference."""

    name = "estimates"

    def __init__(self, depot: Depot) -> None:
        self.curve = HitRateCurve(depot.index.extents.capacity_bytes, preference=depot.index.preference)
        self._chunk_bytes = depot.contexts.chunk_bytes
        self._counters = depot.counters
        self._turns = depot.background.queue(1)
        depot.index.watchers.all.append(Ends(self.curve))

    def looked_up(self, query: Query) -> None:
        """See `Feature`."""
        chunk_bytes = self._chunk_bytes.get(query.context.space.number)
        if chunk_bytes is None:
            return
        if len(query.digests) <= _OBSERVED_AT_ONCE * DIGEST_BYTES:
            self.curve.looked_up(query.digests, chunk_bytes)
        elif not self._turns.add(self._observing(query.digests, chunk_bytes)):
            self._counters[_LOOKUPS_NOT_SAMPLED] += 1

    def _observing(self, digests: bytes, chunk_bytes: int) -> Task:
        """Count a very long lookup in steps, from its end."""
        step = _OBSERVED_AT_ONCE
        for start in range((num_digests(digests) - 1) // step * step, -1, -step):
            self.curve.looked_up(slice_digests(digests, start, start + step), chunk_bytes)
            yield

    def stored(self, ticket: Ticket, nodes: object) -> None:
        """See `Feature`."""
        self.curve.stored(ticket.digests, ticket.chunk_bytes)

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        status.estimates = self.curve.estimates()
        status.estimated_chunks = self.curve.num_chunks
        status.estimate_rate = self.curve.rate


class Ends(Watcher):
    """Removes chunks from the sample whose session ended."""

    def __init__(self, curve: HitRateCurve) -> None:
        self._curve = curve

    def ended(self, key: bytes, /) -> None:
        """See `Watcher`."""
        self._curve.ended(key)
