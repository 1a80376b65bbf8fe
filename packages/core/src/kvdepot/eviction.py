"""Eviction policies: which chunk leaves when room is needed.

Chunks form trees by prefix, and a parent outlives its children, so only leaves ever leave. Both policies act as if each
use touched the whole prefix from its deepest chunk to the root: an ancestor is never colder than its descendants.
"""

import heapq
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvdepot.protocols import EvictionPolicy

logger = logging.getLogger(__name__)

NO_NODE: Final = 0xFFFFFFFF

# Of one search for a victim: a store may need many, and takes a few milliseconds at the most, whatever the index holds.
_MOST_LOOKED_AT: Final = 4096  # leaves that leases keep
_MOST_MENDED: Final = 16
_MOST_TURNED: Final = 4096

# Ranks: what has a lower one leaves first, whatever the policy; clients' hints change them.
ENDED: Final = 0  # its client said that nobody will ask for it again
NORMAL: Final = 1  # priority 0; above it one for each higher priority


@dataclass(slots=True)
class ChunkTree:
    """What policies see of the index: columns by node number."""

    keys: list[bytes | None] = field(default_factory=list[bytes | None])  # None: the number is not in use
    parent: "array[int]" = field(default_factory=lambda: array("I"))
    num_children: "array[int]" = field(default_factory=lambda: array("I"))
    holds: "array[int]" = field(default_factory=lambda: array("I"))  # leases and unfinished writes
    share: "array[int]" = field(default_factory=lambda: array("I"))  # of the pool, which the chunk counts against
    rank: bytearray = field(default_factory=bytearray)

    def evictable(self, node: int) -> bool:
        """Whether nothing needs the chunk."""
        return not self.num_children[node] and not self.holds[node] and self.keys[node] is not None

    def of_share(self, number: int, rank: int) -> "ShareTree":
        """Return the same columns as the policy of one rank of one share sees them."""
        columns = self.keys, self.parent, self.num_children, self.holds, self.share, self.rank
        return ShareTree(*columns, number, rank)


@dataclass(slots=True)
class ShareTree(ChunkTree):
    """A tree of which only the chunks of one rank of one share can leave: node numbers go from one to another."""

    number: int = 0
    own_rank: int = NORMAL

    def evictable(self, node: int) -> bool:
        """Whether it is of this share and rank and nothing needs it."""
        return self.share[node] == self.number and self.rank[node] == self.own_rank and ChunkTree.evictable(self, node)


class LeastRecentlyUsed:
    """The leaf that was used longest ago leaves first.

    A use is one store into a column, however long the prefix: a chunk that becomes a leaf inherits the last use of the
    child that left, which is what touching every ancestor would have done. Leaves wait in a heap, each once, with a key
    that may be out of date (too old); it is put right when it comes to the top. When very many in a row are, as after
    nearly everything was used again, only some are put right at a time, and the coldest of those leaves.
    """

    def __init__(self, tree: ChunkTree) -> None:
        self._tree = tree
        self._last_use = array("Q")
        self._queued = bytearray()
        self._heap: list[int] = []  # last use << 32 | node
        self._tick = 0

    def _now(self, node: int) -> None:
        missing = node + 1 - len(self._last_use)
        if missing > 0:
            self._last_use.frombytes(bytes(8 * missing))
            self._queued.extend(bytes(missing))
        self._tick += 1
        self._last_use[node] = self._tick

    def added(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._now(node)
        self._queue(node)

    def used(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._now(node)

    def unpinned(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._queue(node)

    def removed(self, node: int) -> None:
        """See `EvictionPolicy`."""
        parent = self._tree.parent[node]
        if node < len(self._last_use) and parent < len(self._last_use):
            self._last_use[parent] = max(self._last_use[parent], self._last_use[node])
        if node < len(self._last_use):
            self._last_use[node] = 0  # the number may go to a chunk that leaves unfinished, never `added`
        if self._heap and self._heap[0] & NO_NODE == node:
            heapq.heappop(self._heap)  # the victim: those of a long prompt would be many to pass over later
            self._queued[node] = 0

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        heap, last_use, evictable = self._heap, self._last_use, self._tree.evictable
        coldest, num_mended = NO_NODE, 0
        for _ in range(_MOST_LOOKED_AT):
            if not heap or num_mended == _MOST_MENDED:
                break
            node = heap[0] & NO_NODE
            if not evictable(node):
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

    def _queue(self, node: int) -> None:
        if node < len(self._queued) and not self._queued[node] and self._tree.evictable(node):
            self._queued[node] = 1
            heapq.heappush(self._heap, self._last_use[node] << 32 | node)


class AdaptiveReplacement:
    """ARC: balances chunks seen once against chunks seen again, by what it would have hit of what it evicted.

    Megiddo and Modha, FAST 2003. Ghosts are remembered by key. A node that cannot leave when it is the coldest of its
    list (it has children or leases, so something below it is warmer) moves to the warm end. A use moves the whole
    prefix, chunk by chunk.
    """

    def __init__(self, tree: ChunkTree) -> None:
        self._tree = tree
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._ghosts_once: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts_again: OrderedDict[bytes, None] = OrderedDict()
        self._target_once = 0.0

    def added(self, node: int) -> None:
        """See `EvictionPolicy`."""
        key = self._tree.keys[node]
        assert key is not None
        capacity = len(self._once) + len(self._again) + 1
        if key in self._ghosts_once:
            step = max(1.0, len(self._ghosts_again) / len(self._ghosts_once))
            self._target_once = min(capacity, self._target_once + step)
            del self._ghosts_once[key]
            self._again[node] = None
        elif key in self._ghosts_again:
            step = max(1.0, len(self._ghosts_once) / len(self._ghosts_again))
            self._target_once = max(0.0, self._target_once - step)
            del self._ghosts_again[key]
            self._again[node] = None
        else:
            self._once[node] = None

    def used(self, node: int) -> None:
        """See `EvictionPolicy`."""
        parent, once, again = self._tree.parent, self._once, self._again
        while node != NO_NODE:
            if node in again:
                again.move_to_end(node)
            elif node in once:
                del once[node]
                again[node] = None
            node = parent[node]

    def unpinned(self, node: int) -> None:
        """See `EvictionPolicy`; the lists hold pinned nodes too."""

    def removed(self, node: int) -> None:
        """See `EvictionPolicy`."""
        key = self._tree.keys[node]
        assert key is not None
        capacity = len(self._once) + len(self._again)
        for nodes, ghosts in ((self._once, self._ghosts_once), (self._again, self._ghosts_again)):
            if node in nodes:
                del nodes[node]
                ghosts[key] = None
            while len(ghosts) > capacity:
                ghosts.popitem(last=False)

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        first, second = self._once, self._again
        if len(self._once) <= self._target_once and self._again:
            first, second = second, first
        for nodes in (first, second):
            for _ in range(min(len(nodes), _MOST_TURNED)):
                node = next(iter(nodes))
                if self._tree.evictable(node):
                    return node
                nodes.move_to_end(node)
        return None


class GuardedPolicy:
    """A policy whose mistakes cost no more than the store that needed it: nothing that it raises reaches the index."""

    def __init__(self, policy: EvictionPolicy, tree: ChunkTree) -> None:
        self.num_errors = 0
        self._policy = policy
        self._tree = tree

    def added(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._tell(self._policy.added, node)

    def used(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._tell(self._policy.used, node)

    def unpinned(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._tell(self._policy.unpinned, node)

    def removed(self, node: int) -> None:
        """See `EvictionPolicy`."""
        self._tell(self._policy.removed, node)

    def victim(self) -> int | None:
        """See `EvictionPolicy`; what cannot leave is not proposed."""
        try:
            node = self._policy.victim()
        except Exception:
            self._note()
            return None
        if node is not None and not (0 <= node < len(self._tree.keys) and self._tree.evictable(node)):
            self.num_errors += 1
            logger.error("%s would evict node %d, which is in use", type(self._policy).__name__, node)
            return None
        return node

    def _tell(self, listener: Callable[[int], None], node: int) -> None:
        try:
            listener(node)
        except Exception:
            self._note()

    def _note(self) -> None:
        self.num_errors += 1
        logger.exception("the eviction policy %s failed", type(self._policy).__name__)


class PolicyFactory(Protocol):
    """Makes a policy for a tree."""

    def __call__(self, tree: ChunkTree, /) -> EvictionPolicy:
        """Return a new policy."""
        ...


POLICIES: Final[dict[str, PolicyFactory]] = {"lru": LeastRecentlyUsed, "arc": AdaptiveReplacement}
