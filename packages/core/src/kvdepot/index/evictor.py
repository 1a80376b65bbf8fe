"""Makes room: chooses chunks and removes them.

Only nodes without children, leases and unfinished writes are evicted. So full attention stays prefix-closed: if a chunk
is visible, all chunks before it are, and a lease needs to hold only the deepest chunk. A lease yields if its share is
above its quota and a share within its own quota needs room.

A node that lost all entries stays as a tombstone while it has children. The children are invisible and may be evicted.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias

from kvdepot.counting import depot_counter
from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.index.entries import Entries
from kvdepot.index.quotas import MAXIMUM_QUOTAS
from kvdepot.index.shares import Shares
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.index.visibility import Visibility, Watcher
from kvdepot.wire.status import Histogram

logger = logging.getLogger(__name__)

CHUNKS_EVICTED: Final = depot_counter("chunks_evicted", "Chunks evicted to make room")
CHUNKS_EVICTED_LEASED: Final = depot_counter(
    "chunks_evicted_leased", "Evicted chunks that were leased by a tenant above its quota, for a tenant within its own"
)

_REMOVE_STEP: Final = 32  # chunks removed per step, in 0.15 ms: below the 0.6 ms of a turn for one kind of work
_SCAN_STEP: Final = 500  # chunks skipped per step, in 0.1 ms
_MOST_LEASED: Final = 1024  # leased chunks examined to find one without children, in 0.1 ms

EndStore: TypeAlias = Callable[[], bool]
"""Ends an unfinished store of a share above its quota; False if there is none."""


def cannot_end() -> bool:
    """End no store: an `EndStore` for an index without unfinished stores."""
    return False


class Links:
    """Linked lists of numbers below `length`. Each number is in at most one list, and every operation is O(1)."""

    __slots__ = ("_following", "_length", "_list_of", "_preceding", "sizes")

    def __init__(self, length: int, num_lists: int) -> None:
        self.sizes = [0] * num_lists
        self._length = length
        self._list_of = make_column("B" if num_lists < 256 else "I", length)  # list + 1, 0 for no list
        # The entries from `length` on are the lists' sentinels.
        self._following = make_column("I", length + num_lists)
        self._preceding = make_column("I", length + num_lists)
        for end in range(length, length + num_lists):
            self._following[end] = self._preceding[end] = end

    def list_of(self, number: int) -> int | None:
        """Return the list that contains a number, None if no list does."""
        place = self._list_of[number]
        return place - 1 if place else None

    def numbers(self, which: int) -> Iterator[int]:
        """Yield the numbers of a list, which must not change meanwhile."""
        end = number = self._length + which
        while (number := self._following[number]) != end:
            yield number

    def begin_with(self, number: int, which: int) -> None:
        """Rotate a list so that it begins with one of its numbers."""
        end = self._length + which
        before, after = self._preceding[end], self._following[end]
        self._following[before], self._preceding[after] = after, before
        before = self._preceding[number]
        self._following[before] = self._preceding[number] = end
        self._preceding[end], self._following[end] = before, number

    def append(self, number: int, which: int) -> None:
        """Move a number to the end of a list."""
        following, preceding = self._following, self._preceding
        if self._list_of[number]:
            self.remove(number)
        end = self._length + which
        last = preceding[end]
        following[last] = preceding[end] = number
        preceding[number], following[number] = last, end
        self._list_of[number] = which + 1
        self.sizes[which] += 1

    def remove(self, number: int) -> None:
        """Remove a number from its list, if it is in one."""
        place = self._list_of[number]
        if not place:
            return
        before, after = self._preceding[number], self._following[number]
        self._following[before], self._preceding[after] = after, before
        self._list_of[number] = 0
        self.sizes[place - 1] -= 1


class Evictor:
    """Evicts, clears and drops chunks, and holds the chunks that leases need."""

    def __init__(
        self,
        nodes: Nodes,
        visibility: Visibility,
        entries: Entries,
        shares: Shares,
        watcher: Watcher,
    ) -> None:
        self.num_evicted = 0  # `CHUNKS_EVICTED`
        self.num_leased_evicted = 0  # `CHUNKS_EVICTED_LEASED`: leased ones among them
        self.num_steps = 0  # evictions, plus unfinished stores ended to make room
        self.is_frozen = False  # no chunk is removed while the index is being rebuilt
        self.eviction_ages = Histogram(1.0)  # seconds since the last use of chunks evicted to make room
        self._on_victim: Callable[[], None] | None = None
        self._unlogged: list[str] = []  # evicted chunks that the next debug line names
        self._watcher = watcher
        self._nodes = nodes
        self._visibility = visibility
        self._entries = entries
        self._shares = shares
        capacity = nodes.tree.capacity
        self._num_leases = make_column("I", capacity)  # leases and pins of a node; they count as holds, too
        # Leased nodes by share, the most recently leased last.
        self._leased = Links(capacity, MAXIMUM_QUOTAS + 1)

    # --- holds ----------------------------------------------------------------------------------------------------

    def pin(self, nodes: Iterable[int]) -> None:
        """Hold nodes, and thereby all nodes before them, until the same number of calls of `unpin`.

        Shares within their quota may still evict what this share has above its own quota.
        """
        tree = self._nodes.tree
        for node in nodes:
            tree.holds[node] += 1
            self._num_leases[node] += 1
            self._leased.append(node, tree.share[node])

    def unpin(self, nodes: Iterable[int]) -> None:
        """Undo one `pin`. Nodes without other holds may be evicted from now on."""
        nodes = [*nodes]
        for node in nodes:
            self._num_leases[node] -= 1
            if not self._num_leases[node]:
                self._leased.remove(node)
        self.release(nodes)

    def release(self, nodes: Collection[int]) -> None:
        """Undo one hold of each node, as often as it is listed. Tombstones without holds are removed at once."""
        self._nodes.release(nodes)
        tree = self._nodes.tree
        for node in nodes:
            if not tree.num_children[node] and not tree.holds[node]:  # saves a call for most chunks of a prefix
                self.settle(node)

    def settle(self, node: int) -> int:
        """If a chunk may be evicted, tell its policy. Drop an unneeded tombstone and the tombstones before it.

        Return the chunk that is evictable now, `NO_NODE` if there is none.
        """
        while node != NO_NODE and self._nodes.tree.evictable(node):
            if not self._entries.is_tombstone(node):
                self._shares.policy_of(node).unpinned(node)
                if self._on_victim is not None:
                    on_victim, self._on_victim = self._on_victim, None
                    on_victim()
                return node
            node = self._drop([node])
        return NO_NODE

    def _drop(self, nodes: Sequence[int]) -> int:
        """Remove chunks without entries, each the only child of the next. Return the chunk before them."""
        self._shares.removed(nodes)
        self._visibility.forget(nodes)
        num_leases = self._num_leases
        for node in [node for node in nodes if num_leases[node]]:
            self._leased.remove(node)
        return self._nodes.drop(nodes)

    # --- leaving --------------------------------------------------------------------------------------------------

    def make_room(
        self, num_bytes: int, most: int, share: int = 0, end_store: EndStore = cannot_end, *, is_owed: bool = False
    ) -> bool:
        """Evict the next prefix of a share from its end on, for another share or itself. Return False if none can be.

        Evict about `num_bytes`, and at most `most` chunks. A share that `is_owed` room, because it stays within its
        quota, takes it from shares above theirs: first unleased chunks, then leased ones. If unfinished stores hold all
        of that room, `end_store` ends a store of a share above its quota, and a later call finds the room. The share's
        own chunks come last.
        """
        if self.is_frozen:
            return False
        for number in self._shares.quotas.victims(share):
            if number == share and is_owed:
                node = self._leased_victim()
                if node is not None or end_store():
                    self.num_steps += 1
                    if node is not None:
                        self.num_leased_evicted += 1
                        self._make_room([node])
                    return True
            node = self._shares.victim(number)
            if node is not None:
                # No share gives more than it has above its quota.
                spare = num_bytes if number == share else self._shares.quotas.excess_bytes(number)
                nodes = self._tail(node, min(num_bytes, spare), most)
                self.num_steps += len(nodes)
                self._make_room(nodes)
                return True
        return False

    def _tail(self, node: int, num_bytes: int, most: int) -> Sequence[int]:
        """Return a victim and the chunks before it that are the next victims, until they have about `num_bytes`."""
        tree, policy = self._nodes.tree, self._shares.policy_of(node)
        parents, num_children, holds = tree.parent, tree.num_children, tree.holds
        nodes = [node]
        most = min(most, -(-num_bytes // max(1, self._entries.bytes_of(nodes)[0])))  # most chunks have equal sizes
        while len(nodes) < most:
            node = parents[node]
            if node == NO_NODE or num_children[node] > 1 or holds[node]:
                break
            nodes.append(node)
        nodes = policy.next_of(nodes)
        for count, size in enumerate(self._entries.bytes_of(nodes), 1):
            num_bytes -= size
            if num_bytes <= 0:
                return nodes[:count]
        return nodes

    def _make_room(self, nodes: Sequence[int]) -> None:
        add, now, last_use = self.eviction_ages.add, self._nodes.now, self._nodes.last_use
        add(max(0, now - last_use[nodes[0]]), len(nodes))  # a chunk inherits the last use of the chunk after it
        self._shares.policy_of(nodes[0]).evicted(nodes)  # before the nodes are gone: ARC remembers their keys
        self.evict_all(nodes)

    def await_victim(self, on_victim: Callable[[], None]) -> None:
        """Set a function to be called once, when another chunk becomes evictable. It replaces an earlier one."""
        self._on_victim = on_victim

    def next_victim(self) -> int | None:
        """Return the next chunk to evict for any share, without removing it."""
        if self.is_frozen:
            return None
        for number in self._shares.quotas.victims(0):
            node = self._shares.victim(number)
            if node is not None:
                return node
        return None

    def evict(self, node: int, *, makes_room: bool = True) -> bool:
        """Evict one given chunk and its entries: to make room, or as its owner asked, like `evict_all`.

        If it is held or the evictor `is_frozen`, change nothing and return False.
        """
        if self.is_frozen or not self._nodes.tree.evictable(node):
            return False
        if makes_room:
            self._make_room([node])
        else:
            self.evict_all([node])
        return True

    def end_of(self, node: int, most: int, is_wanted: Callable[[int], bool]) -> list[int]:
        """Return the last chunks of the prefix that ends with `node`, if `evict_all` may remove them: at most `most`.

        The last one comes first. The list ends before the first chunk that is needed or not wanted.
        """
        tree, num_children = self._nodes.tree, 0
        nodes: list[int] = []
        while (
            len(nodes) < most
            and node != NO_NODE
            and tree.num_children[node] == num_children
            and not tree.holds[node]
            and is_wanted(node)
        ):
            nodes.append(node)
            node, num_children = tree.parent[node], 1
        return [] if self.is_frozen else nodes

    def evict_all(self, nodes: Sequence[int]) -> None:
        """Evict chunks that at most leases hold, as their owner asked. Each is the only child of the next.

        Their ages tell nothing about the pool's size, and policies learn nothing from their return.
        """
        self.num_evicted += len(nodes)
        if logger.isEnabledFor(logging.DEBUG):
            for node in nodes:
                key, seconds = self._nodes.key_of(node), self._nodes.idle_seconds(node)
                self._unlogged.append(f"{key[:4].hex()} ({seconds:.0f} s)")
        keys = self._nodes.tree.keys
        self._watcher.evicted(nodes, [keys[node] or b"" for node in nodes])
        self._remove(nodes)

    def log_evicted(self, why: str, *details: object) -> None:
        """Name the chunks evicted since the last call in one debug line: a line for each would be too many."""
        if self._unlogged:
            text = "evicted %d chunks %s (start of the key, time since the last use): %s"
            logger.debug(text, len(self._unlogged), why % details, " ".join(self._unlogged))
            self._unlogged.clear()

    def clear(self, wanted: Callable[[int, Space], bool]) -> Iterator[int]:
        """Remove all unused chunks for which `wanted(label, space)` is true.

        A chunk with a remaining descendant stays, too. While the index is being rebuilt, all chunks stay. Yield the
        number of removed entries after each step. Between steps, the index may be used freely.
        """
        tree = self._nodes.tree

        def is_wanted(node: int) -> bool:
            return wanted(self._nodes.label[node], self._nodes.space_of(node))

        for node in range(len(tree.keys)):
            if tree.evictable(node) and is_wanted(node):
                yield from self._clear_up(node, is_wanted)
            if node % _SCAN_STEP == 0:
                yield 0

    def clear_end(self, node: int) -> Iterator[int]:
        """Remove a chunk and the chunks before it, up to the first that is still needed. Yield like `clear`."""
        return self._clear_up(node, lambda _node: True)

    def set_quota(self, tenant: str, num_bytes: int) -> Iterator[int]:
        """Change a tenant's quota: see `Shares.set_quota`."""

        def move_leases(node: int) -> None:
            if self._num_leases[node]:
                self._leased.append(node, self._nodes.tree.share[node])

        return self._shares.set_quota(tenant, num_bytes, move_leases)

    def _leased_victim(self) -> int | None:
        """Return a chunk of a share above its quota that only leases hold, None if the search finds none."""
        leased, tree = self._leased, self._nodes.tree
        for share in self._shares.quotas.above():
            node = NO_NODE
            for node in islice(leased.numbers(share), _MOST_LEASED):
                if not tree.num_children[node] and tree.holds[node] == self._num_leases[node]:
                    return node
            if node != NO_NODE:
                leased.begin_with(node, share)  # the next search continues here
        return None

    def _remove(self, nodes: Sequence[int]) -> int:
        """Remove a chain of unpinned chunks, leaf first. Return its first surviving ancestor, as `settle` does."""
        self._entries.remove_all(nodes)
        return self.settle(self._drop(nodes))

    def _clear_up(self, node: int, is_wanted: Callable[[int], bool]) -> Iterator[int]:
        keys, entries = self._nodes.tree.keys, self._entries
        while nodes := self.end_of(node, _REMOVE_STEP, is_wanted):
            before = entries.num_sealed
            node = self._remove(nodes)
            key = keys[node] if node != NO_NODE else None
            yield before - entries.num_sealed
            if key is None or keys[node] != key:
                break  # there is none, or it was evicted meanwhile

    def check_integrity(self) -> None:
        """Check that each leased node is in the list of its share.

        Raises:
            IntegrityError: a leased node is in another list or in none.
        """
        tree = self._nodes.tree
        for node, key in enumerate(tree.keys):
            share = self._leased.list_of(node)
            is_leased = key is not None and bool(self._num_leases[node])
            require(share == (tree.share[node] if is_leased else None), f"the leases of node {node} are misplaced")
