"""Chunks as a tree: one node per chunk, whose parent is the chunk before it. A space has the nodes of one `CacheSpec`.

A node number is reused once its chunk was evicted and has no holds.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind, Part, window_chunks
from kvdepot.pool.table import place_number
from kvdepot.wire.messages import CacheSpec


def digest_of(value: object) -> bytes:
    """Return a digest of 32 bytes of a plain value."""
    return blake3(msgspec.msgpack.encode(value)).digest()


@dataclass(slots=True)
class Space:
    """All chunks of one `CacheSpec`."""

    number: int
    spec: CacheSpec
    nodes: dict[bytes, int] = field(default_factory=dict[bytes, int])
    digest: bytes = b""  # identifies the spec in keys and records
    full_mask: int = 0  # bit g: group g is full attention
    window_mask: int = 0  # bit g: group g is a sliding window or a recurrent state
    # (bit, chunks needed before a boundary), smallest first
    windows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    # By group: chunks needed before a boundary; 0: all of them.
    chunks_needed: list[int] = field(default_factory=list[int])
    heads: list[int] = field(default_factory=list[int])  # by group: the heads of its plane
    cells: list[int] = field(default_factory=list[int])  # by group: the mask of all cells of its plane (`mask_of`)
    whole: dict[int, int] = field(default_factory=dict[int, int])  # bit of a group by the `place_number` of its plane

    def __post_init__(self) -> None:
        self.digest = digest_of(self.spec)
        for number, group in enumerate(self.spec.groups):
            self.heads.append(group.heads)
            self.cells.append((1 << group.layers * group.heads) - 1)
            self.whole[place_number(number, Part(0, group.layers, 0, group.heads).number)] = 1 << number
            if group.kind is GroupKind.FULL_ATTENTION:
                self.full_mask |= 1 << number
                self.chunks_needed.append(0)
                continue
            is_window = group.kind is GroupKind.SLIDING_WINDOW
            self.chunks_needed.append(window_chunks(group.window_tokens, self.spec.chunk_tokens) if is_window else 1)
            self.windows.append((1 << number, self.chunks_needed[-1]))
            self.window_mask |= 1 << number
        self.windows.sort(key=lambda window: window[1])


NO_NODE: Final = 0xFFFFFFFF


@dataclass(slots=True)
class ChunkTree:
    """The tree as seen by eviction policies: columns by node number."""

    capacity: int  # nodes
    keys: list[bytes | None]  # by the numbers used so far; None: not in use
    parent: "memoryview[int]"
    num_children: "memoryview[int]"
    holds: "memoryview[int]"  # leases, pins, copies and unfinished writes
    share: "memoryview[int]"  # the share of the pool that the chunk counts against
    ended: "memoryview[int]"  # 1: leaves before all others of its share

    @classmethod
    def with_room(cls, capacity: int) -> "ChunkTree":
        """Return an empty tree."""
        parent, num_children, holds, share = (make_column("I", capacity) for _ in range(4))
        return cls(capacity, [], parent, num_children, holds, share, make_column("B", capacity))

    def evictable(self, node: int) -> bool:
        """Return whether the node is in use and has no holds and no children."""
        return not self.num_children[node] and not self.holds[node] and self.keys[node] is not None


class Nodes:
    """All nodes, with the facts about their chunks."""

    def __init__(self, capacity: int, spaces: list[Space]) -> None:
        self.spaces = spaces
        self.tree = ChunkTree.with_room(capacity)
        self.now = 0  # the depot's clock in seconds
        self.depth = make_column("I", capacity)
        self.space_number = make_column("I", capacity)
        self.label = make_column("I", capacity)
        self.last_use = make_column("Q", capacity)  # seconds; a chunk inherits the value of a removed child
        self._next_free = make_column("I", capacity)
        self._free = NO_NODE  # the first free number
        self._num_free = 0

    def __len__(self) -> int:
        return len(self.tree.keys) - self._num_free

    @property
    def num_left(self) -> int:
        """The number of nodes that can be added."""
        return self.tree.capacity - len(self.tree.keys) + self._num_free

    def add(self, space: Space, keys: Sequence[bytes], parent: int, depth: int, label: int) -> list[int]:
        """Add consecutive chunks as nodes without holds, each below the one before it. Return their numbers.

        There must be as many free numbers. The caller sets `share` and `ended`.
        """
        tree, free, following = self.tree, self._free, self._next_free
        parents, num_children, holds, all_keys = tree.parent, tree.num_children, tree.holds, tree.keys
        depths, space_numbers, labels, last_use = self.depth, self.space_number, self.label, self.last_use
        number, now = space.number, self.now
        nodes: list[int] = []
        for key in keys:
            if free == NO_NODE:
                node = len(all_keys)
                all_keys.append(key)
            else:
                node, free = free, following[free]
                self._num_free -= 1
                all_keys[node] = key
            if parent != NO_NODE:
                num_children[parent] += 1
            parents[node] = parent
            num_children[node] = 0
            holds[node] = 0
            depths[node] = depth
            space_numbers[node] = number
            labels[node] = label
            last_use[node] = now
            nodes.append(node)
            parent = node
            depth += 1
        self._free = free
        space.nodes.update(zip(keys, nodes, strict=True))
        return nodes

    def add_level(
        self, space: Space, keys: Sequence[bytes], parents: Sequence[int], depth: int, labels: Sequence[int]
    ) -> range:
        """Add chunks of one depth as nodes without holds. Return their numbers, which follow the highest one so far.

        There must be as many higher numbers. The caller sets `share`, `ended` and `last_use`.
        """
        tree, count = self.tree, len(keys)
        nodes = range(len(tree.keys), len(tree.keys) + count)
        own = slice(nodes.start, nodes.stop)
        # A number that was never used has zeros in all columns.
        tree.keys += keys
        tree.parent[own] = array("I", parents)
        self.depth[own] = array("I", [depth]) * count
        self.space_number[own] = array("I", [space.number]) * count
        self.label[own] = array("I", labels)
        num_children = tree.num_children
        for parent in parents:
            if parent != NO_NODE:
                num_children[parent] += 1
        space.nodes.update(zip(keys, nodes, strict=True))
        return nodes

    def drop(self, nodes: Iterable[int]) -> int:
        """Remove nodes without children, in this order. Return the parent of the last one.

        If a node is held, its number is freed with the last hold.
        """
        tree, above = self.tree, NO_NODE
        keys, parents, num_children, holds, last_use = (
            tree.keys,
            tree.parent,
            tree.num_children,
            tree.holds,
            self.last_use,
        )
        spaces, space_number = self.spaces, self.space_number
        for node in nodes:
            above, key = parents[node], keys[node]
            assert key is not None
            del spaces[space_number[node]].nodes[key]
            keys[node] = None
            parents[node] = NO_NODE
            if not holds[node]:
                self._next_free[node], self._free = self._free, node
                self._num_free += 1
            if above != NO_NODE:
                if last_use[node] > last_use[above]:  # noqa: PLR1730  # a call for each chunk
                    last_use[above] = last_use[node]
                num_children[above] -= 1
        return above

    def release(self, nodes: Iterable[int]) -> None:
        """Undo one hold of each node."""
        tree = self.tree
        for node in nodes:
            tree.holds[node] -= 1
            if tree.keys[node] is None and not tree.holds[node]:  # it was removed while leased
                self._give_back(node)

    def _give_back(self, node: int) -> None:
        self._next_free[node], self._free = self._free, node
        self._num_free += 1

    def find(self, space: Space, key: bytes, depth: int) -> int | None:
        """Return the node of a chunk, visible or not."""
        node = space.nodes.get(key)
        return node if node is not None and self.depth[node] == depth else None

    def find_run(self, space: Space, digests: bytes, depth: int) -> tuple[list[bytes], list[int]]:
        """Return the keys and the nodes of consecutive chunks, `NO_NODE` for a chunk without a node.

        The run ends before a key that is at another depth or occurs twice, which happens only in forged chains.
        """
        keys = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
        find, depths = space.nodes.get, self.depth
        nodes = [find(key, NO_NODE) for key in keys]
        stop = len(keys)
        for chunk, node in enumerate(nodes):
            if node != NO_NODE and depths[node] != depth + chunk:
                stop = chunk
                break
        if len(set(keys)) < len(keys):
            stop = min(stop, next(chunk for chunk in range(len(keys)) if keys[chunk] in keys[:chunk]))
        return keys[:stop], nodes[:stop]

    def key_of(self, node: int) -> bytes:
        """Return the key of a node in use."""
        key = self.tree.keys[node]
        assert key is not None
        return key

    def space_of(self, node: int) -> Space:
        """Return the space of a node."""
        return self.spaces[self.space_number[node]]

    def idle_seconds(self, node: int) -> int:
        """Return the seconds since the last known store or use of a prefix that ends with this chunk."""
        return max(0, self.now - self.last_use[node])

    def check_integrity(self) -> None:
        """Check that keys, parents, depths and counts agree.

        Raises:
            IntegrityError: they disagree.
        """
        tree, children = self.tree, Counter[int]()
        for space in self.spaces:
            for key, node in space.nodes.items():
                require(tree.keys[node] == key, f"node {node} has another key than its space says")
                require(self.space_number[node] == space.number, f"node {node} is of another space")
                parent = tree.parent[node]
                if parent == NO_NODE:
                    continue
                children[parent] += 1
                require(self.space_number[parent] == space.number, f"node {node} is below a node of another space")
                require(self.depth[parent] == self.depth[node] - 1, f"node {node} is not one below node {parent}")
        for node, key in enumerate(tree.keys):
            require(key is None or tree.num_children[node] == children[node], f"node {node} miscounts its children")
        # A chunk that was removed while leased keeps its number until the lease ends.
        num_left = sum(key is None and bool(tree.holds[node]) for node, key in enumerate(tree.keys))
        require(len(self) == num_left + sum(len(space.nodes) for space in self.spaces), "node numbers were lost")
