"""Wires the parts of an index, each over those before it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.index.entries import Entries
from kvdepot.index.eviction import ChunkTree, EvictionPolicy
from kvdepot.index.priorities import Priorities
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.room import Room
from kvdepot.index.shares import Shares
from kvdepot.index.space import Space
from kvdepot.index.tree import Nodes
from kvdepot.index.visibility import Visibility
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable

_SPARE_NODES: Final = 1024  # beyond twice the records, for ghosts


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one index."""

    table: IndexTable
    extents: ExtentAllocator
    nodes: Nodes
    visibility: Visibility
    entries: Entries
    shares: Shares
    priorities: Priorities
    room: Room

    @classmethod
    def make(
        cls, table: IndexTable, extents: ExtentAllocator, spaces: list[Space], quotas: QuotaTable,
        make_policy: Callable[[ChunkTree], EvictionPolicy], on_shown: Callable[[int], object],
        on_hidden: Callable[[int], object], on_ended: Callable[[bytes], object],
    ) -> "Parts":  # fmt: skip
        """Return parts without a node or a record."""
        nodes = Nodes(2 * table.num_records + _SPARE_NODES, spaces)
        visibility = Visibility(nodes, on_shown, on_hidden)
        entries = Entries(nodes, table, extents, quotas)
        shares = Shares(nodes, entries, quotas, make_policy)
        priorities = Priorities(nodes, shares, on_ended)
        room = Room(nodes, visibility, entries, shares, priorities)
        return cls(table, extents, nodes, visibility, entries, shares, priorities, room)

    def add_node(self, space: Space, key: bytes, parent: int, depth: int, label: int) -> int:
        """Make a node without entries. A free number must be left."""
        node = self.nodes.add(space, key, parent, depth, label)
        self.shares.add_node(node)
        self.visibility.add(node)
        self.entries.add_node(node)
        self.priorities.add_node(node)
        return node
