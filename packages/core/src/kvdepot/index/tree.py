"""Chunks as a tree: one node per chunk, whose parent is the chunk before it. A space has the nodes of one `CacheSpec`.

A node number is reused once its chunk was evicted and has no holds.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind, window_chunks
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

    def __post_init__(self) -> None:
        self.digest = digest_of(self.spec)
        for number, group in enumerate(self.spec.groups):
            self.heads.append(group.heads)
            self.cells.append((1 << group.layers * group.heads) - 1)
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

    def add(self, space: Space, key: bytes, parent: int, depth: int, label: int) -> int:
        """Add a node without holds and children. There must be a free number. The caller sets `share` and `ended`."""
        tree, node = self.tree, self._free
        if node == NO_NODE:
            node = len(tree.keys)
            tree.keys.append(key)
        else:
            self._free = self._next_free[node]
            self._num_free -= 1
            tree.keys[node] = key
        tree.parent[node] = parent
        tree.num_children[node] = 0
        tree.holds[node] = 0
        self.depth[node] = depth
        self.space_number[node] = space.number
        self.label[node] = label
        self.last_use[node] = self.now
        space.nodes[key] = node
        if parent != NO_NODE:
            tree.num_children[parent] += 1
        return node

    def drop(self, node: int) -> int:
        """Remove a node without children.

        Return its parent. If the node is held, its number is freed with the last hold.
        """
        tree = self.tree
        parent = tree.parent[node]
        del self.spaces[self.space_number[node]].nodes[self.key_of(node)]
        tree.keys[node] = None
        tree.parent[node] = NO_NODE
        if not tree.holds[node]:
            self._give_back(node)
        if parent != NO_NODE:
            self.last_use[parent] = max(self.last_use[parent], self.last_use[node])
            tree.num_children[parent] -= 1
        return parent

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

    def find_run(self, space: Space, digests: bytes, depth: int) -> dict[bytes, int]:
        """Return the nodes of consecutive chunks by their keys, `NO_NODE` for a chunk without a node.

        The run ends before a key that is at another depth or occurs twice, which happens only in forged chains.
        """
        found: dict[bytes, int] = {}
        for start in range(0, len(digests), DIGEST_BYTES):
            key = digests[start : start + DIGEST_BYTES]
            node = space.nodes.get(key, NO_NODE)
            if key in found or (node != NO_NODE and self.depth[node] != depth + len(found)):
                break
            found[key] = node
        return found

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
