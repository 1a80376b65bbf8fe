"""Rebuilds the parts of an index from the table of an earlier server, in steps of some milliseconds.

The record of an unfinished entry always keeps its extent, because its writer may be alive and still filling it. A
sealed record that does not verify or fit is freed.
"""

import logging
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE, Space
from kvdepot.layout import Part, Plane
from kvdepot.pool.extents import sorted_runs
from kvdepot.pool.table import FREE, PARENT_BYTES, WRITING, Content, Entry
from kvdepot.wire.messages import CacheSpec

logger = logging.getLogger(__name__)

_STEP: Final = 250  # records, or restored chunks, per step: half a millisecond
_DEPTH_MASK: Final = 0xFFFFFFFF  # of the number of a level; the space is above it
_UNFINISHED: Final = (1 << 64) - 1  # the level of unfinished entries, which no space has


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
        for start in range(0, len(index.nodes), _STEP):
            _reveal(index, range(start, min(start + _STEP, len(index.nodes))))
            yield None
        yield from steps.unfinished
    # Also after an error: a frozen evictor would let every store into a full pool be declined for good.
    finally:
        index.evictor.is_frozen = False


def _reveal(index: ChunkIndex, nodes: range) -> None:
    try:
        index.visibility.reveal(nodes)
    except Exception:
        if not index.num_restore_errors:
            logger.exception("some entries of an earlier server could not be made visible: lookups may never find them")
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
        self.unfinished: list[Entry] = []  # with an extent and without a chunk
        self._index = index
        self._num_spaces = num_spaces
        self._num_labels = num_labels
        self._is_used = make_column("B", index.table.num_records)
        self._fits: defaultdict[int, dict[int, bool]] = defaultdict(dict)  # by space and place
        self._levels: defaultdict[int, list[Entry]] = defaultdict(list)  # sealed entries by space and depth

    def run(self) -> Iterator[None]:
        """Rebuild nodes and entries."""
        yield from self._take_extents()
        yield from self._make_nodes()
        yield from self._free_others()
        yield from self._tell_policies()

    def _take_extents(self) -> Iterator[None]:
        """Take over the extents of records worth restoring and of all unfinished ones, to free these later."""
        table, index, num_spaces, num_labels = self._index.table, self._index, self._num_spaces, self._num_labels
        entries = list[Entry]()
        offsets, sizes, owners, levels = array("Q"), array("I"), array("Q"), array("Q")
        for start in range(0, table.num_records, _STEP):
            for entry, state, space, place, offset, num_bytes, depth, label in table.verified(
                start, min(start + _STEP, table.num_records)
            ):
                if state == WRITING:
                    levels.append(_UNFINISHED)
                elif space < num_spaces and label < num_labels:
                    levels.append(space << 32 | depth)
                else:
                    continue
                entries.append(entry)
                offsets.append(offset)
                sizes.append(num_bytes)
                owners.append(place >> 16)
            yield
        index.entries.num_known = entries[-1] + 1 if entries else 0
        by_level = self._levels
        for positions in index.extents.restore(offsets, sizes, owners):
            for position in positions:
                by_level[levels[position]].append(entries[position])
            yield
        self.unfinished = sorted(by_level.pop(_UNFINISHED, ()))
        for count, entry in enumerate(self.unfinished):
            record = table.record(entry)
            assert record is not None
            index.entries.restore_unfinished(record)
            self._is_used[entry] = 1
            if count % _STEP == 0:
                yield

    def _make_nodes(self) -> Iterator[None]:
        """Add nodes, level by level."""
        above, last = dict[bytes, int](), _UNFINISHED
        for number in sorted(self._levels):
            if number != last + 1 or not number & _DEPTH_MASK:
                above = {}  # the level directly above is missing
            last, level = number, dict[bytes, int]()
            entries = self._levels.pop(number)
            space, first = self._index.spaces[number >> 32], len(self._index.nodes.tree.keys)
            for start in range(0, len(entries), _STEP):
                self._take_entries(space, number & _DEPTH_MASK, entries[start : start + _STEP], above, level, first)
                yield
            above = level

    def _take_entries(
        self,
        space: Space,
        depth: int,
        entries: Sequence[Entry],
        above: dict[bytes, int],
        level: dict[bytes, int],
        first: int,
    ) -> None:
        """Take over entries of chunks of one depth, or free them.

        `above` and `level` are nodes by the start of their keys, one depth up and at this depth, because records refer
        to parents like that. Nodes from `first` on are of this depth.
        """
        index, table, find, fits = self._index, self._index.table, space.nodes.get, self._fits[space.number]
        needs_parent = bool(space.full_mask and depth)
        next_node = len(index.nodes.tree.keys)
        keys: list[bytes] = []  # of new nodes, like the next two
        parents: list[int] = []
        labels: list[int] = []
        found: list[tuple[Entry, int, Content]] = []
        for entry, content in zip(entries, table.contents(entries), strict=True):
            place, _, key, before, label, _ = content
            is_fit, parent = fits.get(place), above.get(before, NO_NODE)
            if is_fit is None:
                is_fit = fits[place] = _fits(space, place)
            # A chunk before it is lost. No lookup would find this one, and it would take room until it is evicted.
            if not is_fit or (needs_parent and parent == NO_NODE):
                continue
            node = find(key)
            if node is None:
                name = key[:PARENT_BYTES]
                node = level.get(name)
                if node is None:
                    node = level[name] = next_node + len(keys)
                    keys.append(key)
                    parents.append(parent)
                    labels.append(label)
                elif node == NO_NODE or node < next_node or keys[node - next_node] != key:
                    level[name] = NO_NODE  # two keys have the same start: ambiguous parents
                    continue
            elif node < first:
                continue  # its key is at another depth, too
            found.append((entry, node, content))
        index.add_level(space, keys, parents, depth, labels)
        is_used = self._is_used
        for entry in index.entries.restore(space, found, index.visibility.sealed_groups):
            is_used[entry] = 1
        index.extents.free([table.extent(entry) for entry in entries if not is_used[entry]])

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
        """Add the nodes to their policies, the most recently used last: of one second, the deepest."""
        nodes = self._index.nodes
        by_use: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
        for start in range(0, len(nodes), _STEP):
            for node, used in enumerate(nodes.last_use[start : min(start + _STEP, len(nodes))], start):
                by_use[used].append(node)
            yield
        runs: list[list[int]] = []
        for run in sorted_runs([*by_use]):
            runs.append(run)
            yield
        for used in merge(*runs):
            own = by_use.pop(used)
            for start in range(0, len(own), _STEP):
                self._index.shares.added(own[start : start + _STEP])
                yield


def _fits(space: Space, place: int) -> bool:
    """Return whether a space has the group and the cells of a place."""
    groups, group = space.spec.groups, place & 0xFFFF
    return group < len(groups) and Part.of(place >> 16).is_in(Plane(groups[group].layers, groups[group].heads))
