"""Eviction policies, which choose the chunk that leaves when a store needs room.

Chunks form trees by prefix. A parent outlives its children, so only leaves are evicted. Both policies act as if each
use touched the whole prefix from its deepest chunk to the root: an ancestor is never colder than its descendants.
"""

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from kvdepot.index.columns import Links, make_column
from kvdepot.index.tree import NO_NODE, ChunkTree

__all__ = [
    "ENDED", "NORMAL", "NO_NODE", "POLICIES", "AdaptiveReplacement", "ChunkTree", "EvictionPolicy", "GuardedPolicy",
    "LeastRecentlyUsed", "PolicyFactory", "ShareTree",
]  # fmt: skip

logger = logging.getLogger(__name__)

# Bounds of one search for a victim. A store may need many victims within a few milliseconds.
_MOST_LOOKED_AT: Final = 4096  # leased leaves
_MOST_MENDED: Final = 16  # outdated heap entries
_MOST_TURNED: Final = 4096  # nodes that cannot leave
_MOST_TOUCHED: Final = 512  # chunks of one prefix, moved by one use

# Priorities: every policy evicts chunks of a lower priority first. Clients' hints change them.
ENDED: Final = 0  # the client ended the session
NORMAL: Final = 1  # a client's priority 0; higher ones add to it


class EvictionPolicy(Protocol):
    """Chooses the next chunk to evict. Nodes are small integers of the index; a parent outlives its children.

    The index reports each change. `victim` proposes only nodes for which `evictable` is true.
    """

    def added(self, node: int) -> None:
        """Add a chunk that became complete: lookups may find it."""
        ...

    def used(self, node: int) -> None:
        """Note a use of the prefix that ends with this chunk: of it and its ancestors, deepest first."""
        ...

    def unpinned(self, node: int) -> None:
        """Note that a node became evictable again: its last lease ended or its last child left."""
        ...

    def removed(self, node: int) -> None:
        """Forget a chunk that was evicted or cleared. Another chunk may get its number."""
        ...

    def victim(self) -> int | None:
        """Return the next chunk to evict without removing it, None if no chunk can leave."""
        ...


@dataclass(slots=True)
class ShareTree(ChunkTree):
    """The tree as seen by the policy of one share and priority: only their chunks can leave."""

    number: int = 0
    own_priority: int = NORMAL

    @classmethod
    def of(cls, tree: ChunkTree, share: int, priority: int) -> "ShareTree":
        """Return the same columns for one policy."""
        columns = tree.keys, tree.parent, tree.num_children, tree.holds, tree.share, tree.priority
        return cls(tree.capacity, *columns, share, priority)

    def evictable(self, node: int) -> bool:
        """Whether the chunk has this share and priority, and nothing holds it."""
        return (
            self.share[node] == self.number
            and self.priority[node] == self.own_priority
            and ChunkTree.evictable(self, node)
        )


class LeastRecentlyUsed:
    """Evicts the least recently used leaf.

    A use stores one number, however long the prefix. A chunk that becomes a leaf inherits the last use of the child
    that left, as if every use had touched every ancestor. A heap holds each leaf once. Its key may be outdated (too
    old) and is corrected when the leaf reaches the top. If nearly everything was used again, a search corrects only a
    few of the many outdated keys and evicts the coldest of these.
    """

    def __init__(self, tree: ChunkTree) -> None:
        self._tree = tree
        self._last_use = make_column("Q", tree.capacity)
        self._queued = make_column("B", tree.capacity)
        self._heap: list[int] = []  # last use << 32 | node
        self._tick = 0

    def _now(self, node: int) -> None:
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
        if parent != NO_NODE:
            self._last_use[parent] = max(self._last_use[parent], self._last_use[node])
        self._last_use[node] = 0  # an unfinished chunk, never `added`, may get its number
        if self._heap and self._heap[0] & NO_NODE == node:
            heapq.heappop(self._heap)  # the victim, so that a later search need not skip all of a long prompt
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
        if not self._queued[node] and self._tree.evictable(node):
            self._queued[node] = 1
            heapq.heappush(self._heap, self._last_use[node] << 32 | node)


_ONCE: Final = 0
_AGAIN: Final = 1
_SPARE: Final = 2


class _Ghosts:
    """Keys of evicted chunks: a list for chunks seen once, and one for chunks seen again."""

    def __init__(self, capacity: int) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._keys: list[bytes] = []  # by slot
        self._slots = Links(capacity, 3)

    @property
    def sizes(self) -> tuple[int, int]:
        """The length of each list."""
        return self._slots.sizes[_ONCE], self._slots.sizes[_AGAIN]

    def add(self, key: bytes, which: int) -> None:
        """Remember a key."""
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._slots.first(_SPARE)
        if slot is None:
            slot = len(self._keys)
            self._keys.append(key)
        self._keys[slot] = key
        self._slot_of[key] = slot
        self._slots.append(slot, which)

    def take(self, key: bytes) -> int | None:
        """Forget a key. Return its list, None if it was in no list."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        which = self._slots.list_of(slot)
        self._forget(slot)
        return which

    def trim(self, most: int) -> None:
        """Forget the oldest keys, until no list is longer than its limit."""
        for which in (_ONCE, _AGAIN):
            while self._slots.sizes[which] > most:
                slot = self._slots.first(which)
                assert slot is not None
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._keys[slot]]
        self._keys[slot] = b""
        self._slots.append(slot, _SPARE)


class AdaptiveReplacement:
    """ARC: balances chunks seen once against chunks seen again, by the hits that its evictions cost.

    Megiddo and Modha, FAST 2003. Ghosts are remembered by key. If the coldest node of a list cannot leave, because it
    has children or leases, it moves to the warm end. A use moves every chunk of the prefix, or the last 512 of a longer
    one, because those leave first.
    """

    def __init__(self, tree: ChunkTree) -> None:
        self._tree = tree
        self._nodes = Links(tree.capacity, 2)
        self._ghosts = _Ghosts(2 * (tree.capacity + 1))
        self._target_once = 0.0

    def added(self, node: int) -> None:
        """See `EvictionPolicy`."""
        key = self._tree.keys[node]
        assert key is not None
        capacity = sum(self._nodes.sizes) + 1
        num_once, num_again = self._ghosts.sizes
        seen = self._ghosts.take(key)
        if seen == _ONCE:
            self._target_once = min(capacity, self._target_once + max(1.0, num_again / num_once))
        elif seen == _AGAIN:
            self._target_once = max(0.0, self._target_once - max(1.0, num_once / num_again))
        self._nodes.append(node, _ONCE if seen is None else _AGAIN)

    def used(self, node: int) -> None:
        """See `EvictionPolicy`."""
        parent, nodes = self._tree.parent, self._nodes
        for _ in range(_MOST_TOUCHED):
            if node == NO_NODE:
                break
            if nodes.list_of(node) is not None:
                nodes.append(node, _AGAIN)
            node = parent[node]

    def unpinned(self, node: int) -> None:
        """See `EvictionPolicy`. The lists hold pinned nodes, too."""

    def removed(self, node: int) -> None:
        """See `EvictionPolicy`."""
        key = self._tree.keys[node]
        assert key is not None
        capacity = sum(self._nodes.sizes)
        seen = self._nodes.list_of(node)
        if seen is not None:
            self._nodes.remove(node)
            self._ghosts.add(key, seen)
        self._ghosts.trim(capacity)

    def victim(self) -> int | None:
        """See `EvictionPolicy`."""
        nodes, evictable = self._nodes, self._tree.evictable
        num_once, num_again = nodes.sizes
        for which in (_AGAIN, _ONCE) if num_once <= self._target_once and num_again else (_ONCE, _AGAIN):
            node = NO_NODE
            for node in islice(nodes.numbers(which), _MOST_TURNED):
                if evictable(node):
                    nodes.begin_with(node, which)
                    return node
            if node != NO_NODE:
                nodes.begin_with(node, which)  # the next search continues there
        return None


class GuardedPolicy:
    """Keeps the mistakes of a policy from the index: an exception or a wrong victim costs one store at most."""

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
        """See `EvictionPolicy`. A victim that cannot leave is logged and dropped."""
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
