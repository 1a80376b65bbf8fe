"""Rebuilds the parts of an index from the table of an earlier server, in steps of some milliseconds.

The record of an unfinished entry always keeps its extent, because its writer may be alive and still filling it. A
sealed record that does not verify or fit is freed.
"""

import logging
from array import array
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.layout import Part, Plane
from kvdepot.pool.extents import sorted_runs
from kvdepot.pool.table import FREE, PARENT_BYTES, SEALED, WRITING, Entry, Record
from kvdepot.wire.messages import CacheSpec

logger = logging.getLogger(__name__)

_STEP: Final = 500  # records, or restored chunks, per step


def restore(index: ChunkIndex, spaces: Sequence[CacheSpec], num_labels: int = 1 << 32) -> Iterator[Entry | None]:
    """Rebuild an index from the table of an earlier server. Call this once, before adding spaces or entries.

    Records refer to `spaces` and labels by number. A record with an unknown number is freed.

    Iterating over the result does the work. It yields None between steps, when the caller can do other work but must
    not begin entries. Nothing is evicted meanwhile (`ChunkIndex.is_restoring`). It also yields the
    unfinished entries, whose writers may still be writing: they have an extent and belong to no chunk. After the end of
    the iterator, `ChunkIndex.discard_entry` frees them.

    If a step fails because of a bug, that is logged and counted. In the first phase, the index is then empty except for
    the extents of unfinished entries. In the second phase, some entries are never found.
    """
    for spec in spaces:
        index.space(spec)
    index.evictor.is_frozen = True
    return _restore(index, num_labels)


def _restore(index: ChunkIndex, num_labels: int) -> Iterator[Entry | None]:
    steps = TablePass(index, len(index.spaces), num_labels)
    try:
        try:
            yield from steps.run()
        except Exception:
            index.num_restore_errors += 1
            logger.exception("restoring the table of an earlier server failed: its entries are discarded")
            _start_cold(index)
            steps = TablePass(index, 0, 0)  # takes over only the extents of unfinished entries
            yield from steps.run()
        for count, node in enumerate(steps.nodes):
            _reveal(index, node)
            if count % _STEP == 0:
                yield None
        yield from steps.unfinished
    # Also after an error: a frozen evictor would let every store into a full pool be declined for good.
    finally:
        index.evictor.is_frozen = False


def _reveal(index: ChunkIndex, node: int) -> None:
    try:
        index.visibility.reveal([node])
    except Exception:
        if not index.num_restore_errors:
            logger.exception("an entry of an earlier server could not be made visible: lookups may never find it")
        index.num_restore_errors += 1


def _start_cold(index: ChunkIndex) -> None:
    now = index.nodes.now
    index.quotas.forget_usage()
    for space in index.spaces:
        space.nodes.clear()
    index.extents.clear()
    index.make_parts()
    index.nodes.now, index.evictor.is_frozen = now, True


class TablePass:
    """One pass over the table, done by `run`."""

    def __init__(self, index: ChunkIndex, num_spaces: int, num_labels: int) -> None:
        self.nodes = array("I")  # of sealed entries, not visible yet; parents first
        self.unfinished: list[Entry] = []  # with an extent and without a chunk
        self._index = index
        self._num_spaces = num_spaces
        self._num_labels = num_labels
        self._is_used = make_column("B", index.table.num_records)

    def run(self) -> Iterator[None]:
        """Rebuild nodes and entries."""
        records: list[Record] = []
        yield from self._read(records)
        by_depth: dict[int, list[Record]] = {}
        yield from self._take_extents(records, by_depth)
        records.clear()  # leaves the only references in `by_depth`, so that they are freed level by level
        yield from self._make_nodes(by_depth)
        yield from self._free_others()
        yield from self._tell_policies()

    def _read(self, records: list[Record]) -> Iterator[None]:
        """Read the records worth restoring, and all unfinished ones, to free their extents later."""
        for entry in self._index.table.entries:
            record = self._index.table.record(entry)
            if record is not None and (
                record.state == WRITING or (record.space < self._num_spaces and record.label < self._num_labels)
            ):
                records.append(record)
            if entry % _STEP == 0:
                yield
        self._index.entries.num_known = records[-1].entry + 1 if records else 0

    def _take_extents(self, records: list[Record], by_depth: dict[int, list[Record]]) -> Iterator[None]:
        """Take over the extents. Group the sealed records by depth."""
        for places in self._index.extents.restore(
            len(records), lambda place: (records[place].offset, records[place].num_bytes, records[place].part)
        ):
            for place in places:
                record = records[place]
                if record.state == SEALED:
                    by_depth.setdefault(record.depth, []).append(record)
                else:
                    self._index.entries.restore_unfinished(record)
                    self._is_used[record.entry] = 1
                    self.unfinished.append(record.entry)
            yield
        self.unfinished.sort()

    def _make_nodes(self, by_depth: dict[int, list[Record]]) -> Iterator[None]:
        """Add nodes, level by level."""
        above: dict[bytes, int] = {}
        for depth in sorted(by_depth):
            if depth and depth - 1 not in by_depth:
                above = {}  # the level directly above is missing
            level: dict[bytes, int] = {}
            records = by_depth[depth][::-1]
            by_depth[depth] = []
            while records:
                record = records.pop()
                if self._take_entry(record, above, level):
                    self._is_used[record.entry] = 1
                else:
                    self._index.extents.free([(record.offset, record.num_bytes)])
                if len(records) % _STEP == 0:
                    yield
            above = level

    def _take_entry(self, record: Record, above: dict[bytes, int], level: dict[bytes, int]) -> bool:
        """Take over an entry. `above` and `level` are nodes by key, one depth up and at this depth.

        The keys of both are the space and the start of the chunk's key, because records refer to parents like that.
        """
        nodes, entries = self._index.nodes, self._index.entries
        space = nodes.spaces[record.space]
        suffix = space.number.to_bytes(4, "little")
        name = record.key[:PARENT_BYTES] + suffix
        if record.group >= len(space.spec.groups):
            return False
        shape = space.spec.groups[record.group]
        if not Part.of(record.part).is_in(Plane(shape.layers, shape.heads)):
            return False
        parent = above.get(record.parent + suffix, NO_NODE)
        # A chunk before it is lost. No lookup would find this one, and it would take room until it is evicted.
        if space.full_mask and record.depth and parent == NO_NODE:
            return False
        node = space.nodes.get(record.key)
        if node is None:
            if name in level:
                level[name] = NO_NODE  # two keys have the same start: ambiguous parents
                return False
            node = self._index.add_node(space, record.key, parent, record.depth, record.label)
            nodes.last_use[node] = 0
            self.nodes.append(node)
            level[name] = node
        elif nodes.depth[node] != record.depth or entries.find(node, record.group, record.part) is not None:
            return False
        entries.restore(record, node)
        nodes.last_use[node] = max(nodes.last_use[node], record.last_use)
        self._index.visibility.sealed_groups[node] |= entries.is_whole(record.entry)
        return True

    def _free_others(self) -> Iterator[None]:
        """Free the records that were not taken over."""
        table, entries = self._index.table, self._index.entries
        for entry in reversed(table.entries):
            if not self._is_used[entry]:
                if table.state(entry) != FREE:
                    table.free([entry])
                if entry < entries.num_known:
                    entries.give_back([entry])
            if entry % _STEP == 0:
                yield

    def _tell_policies(self) -> Iterator[None]:
        """Add the nodes to their policies, the most recently used last."""
        last_use, depth, shares = self._index.nodes.last_use, self._index.nodes.depth, self._index.shares
        keys: list[int] = []
        for count, node in enumerate(self.nodes):
            keys.append(last_use[node] << 64 | depth[node] << 32 | node)
            if count % _STEP == 0:
                yield
        runs: list[list[int]] = []
        for run in sorted_runs(keys):
            runs.append(run)
            yield
        for count, key in enumerate(merge(*runs)):
            node = key & 0xFFFFFFFF
            shares.policy_of(node).added([node])
            if count % _STEP == 0:
                yield
